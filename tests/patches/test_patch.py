"""A fix that is described wrongly is refused before it can do anything."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from vllm_graft.patch import Extension, Patch, Target, When

EXTENSION = Extension(install=print, current=print, restore=print)


def patch(make_patch: Callable[..., Patch], **values: Any) -> Patch:
    return make_patch("json:dumps", lambda original: original, fingerprints={}, **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"affects": ">=1.0"}, "has no upper bound"),
        ({"affects": ">=1.0,!=1.5"}, "has no upper bound"),
        ({"affects": "1.x"}, "write a version specifier"),
        ({"affects": ""}, "has no upper bound"),
        ({"id": "Double_Answer"}, "kebab-case"),
        ({"processes": ()}, "name the processes"),
        ({"title": ""}, "title is empty"),
        ({"symptom": ""}, "symptom is empty"),
        ({"upstream": ()}, "upstream is empty"),
        ({"remove_when": ""}, "remove_when is empty"),
        ({"proof": "somewhere.py"}, "proof: got 'somewhere.py'"),
        ({"kind": "register"}, "has an extension"),
        ({"kind": "wrap", "extension": EXTENSION}, "has an extension"),
        (
            {"kind": "register", "extension": EXTENSION, "target": Target("json:dumps", also=("json:loads",))},
            "target.also must be empty",
        ),
    ],
)
def test_a_wrong_description_is_refused(make_patch: Callable[..., Patch], values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        patch(make_patch, **values)


@pytest.mark.parametrize("affects", ["<2", "<=1.4,>=1.0", "==1.0", "==1.0.*", "~=1.4"])
def test_an_upper_bound_can_be_written_in_several_ways(make_patch: Callable[..., Patch], affects: str) -> None:
    assert patch(make_patch, affects=affects).affects == affects


@pytest.mark.parametrize(
    ("fingerprints", "message"),
    [({"1.0": "abc"}, "16 hexadecimal digits"), ({"2.0": "0123456789abcdef"}, "outside of affects")],
)
def test_a_wrong_fingerprint_is_refused(
    make_patch: Callable[..., Patch], fingerprints: dict[str, str], message: str
) -> None:
    good = patch(make_patch)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(good, fingerprints=fingerprints)


@pytest.mark.parametrize("path", ["json", "json:", "json.dumps", "json:dumps()", ":dumps"])
def test_a_target_is_module_and_attribute(path: str) -> None:
    with pytest.raises(ValueError, match="module:attribute"):
        Target(path)
    with pytest.raises(ValueError, match="module:attribute"):
        Target("json:dumps", also=(path,))


def test_fingerprints_cannot_be_changed(make_patch: Callable[..., Patch]) -> None:
    with pytest.raises(TypeError):
        patch(make_patch).fingerprints["1.0"] = "0123456789abcdef"  # type: ignore[index]


def test_conditions_can_be_printed() -> None:
    when = When(capability_below=(8, 9), kv_cache_dtypes=("turboquant_*",), speculation=True)
    assert str(when) == "compute capability < 8.9, KV cache turboquant_*, speculative decoding"
    assert str(When()) == "always"


def test_the_fix_table_needs_neither_torch_nor_vllm() -> None:
    program = (
        "import sys, vllm_graft.fixes, vllm_graft.plugin\n"
        "heavy = {'torch', 'vllm', 'triton', 'pydantic', 'numpy', 'pynvml'} & set(sys.modules)\n"
        "raise SystemExit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_plugin_module_imports_nothing_that_can_fail() -> None:
    """vLLM logs an error in a plugin's import and serves on without it."""
    program = "import sys; before = set(sys.modules); import vllm_graft; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["vllm_graft"]
