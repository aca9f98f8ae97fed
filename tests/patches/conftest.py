"""Stand-ins for vLLM's modules, and the environments that hold the real ones."""

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm_graft.engine import Engine
from vllm_graft.patch import Extension, Patch, Process, Target, When

ROOT = Path(__file__).parents[2]
_NUMBERS = itertools.count()
PROOFS = tuple(
    sorted(path.name for path in Path(__file__).parent.glob("test_*.py") if "pytest.importorskip(" in path.read_text())
)
"""The files that need vLLM: test_proofs.py runs them with each version's Python."""
collect_ignore = () if importlib.util.find_spec("vllm") else PROOFS


@dataclass(frozen=True)
class Environment:
    """A Python that has one version of vLLM; `reason` says why it cannot be used, empty when it can."""

    vllm: str
    python: Path
    reason: str


def _environment(vllm: str, folder: str) -> Environment:
    python = ROOT / folder / "bin" / "python"
    installed = any((ROOT / folder).glob("lib/python3*/site-packages/vllm/__init__.py"))
    return Environment(vllm, python, "" if installed else f"{folder} has no vLLM {vllm}; `make test` installs it")


ENVIRONMENTS = (_environment("0.32.0", ".venv-engine"), _environment("0.33.0", ".venv-vllm-0.33"))


@pytest.fixture(scope="session", params=ENVIRONMENTS, ids=lambda environment: f"vllm-{environment.vllm}")
def environment(request: pytest.FixtureRequest) -> Environment:
    """One of the environments with vLLM; its tests are skipped, by name, where it is absent."""
    found: Environment = request.param
    if found.reason:
        pytest.skip(found.reason)
    return found


@dataclass(frozen=True)
class Stock:
    """A package made for one test, that stands for vLLM."""

    name: str
    folder: Path

    def module(self, name: str) -> Any:
        """Import one of its modules."""
        __import__(f"{self.name}.{name}")
        return sys.modules[f"{self.name}.{name}"]

    def path(self, path: str) -> str:
        """`module:attribute` within the package, in full."""
        return f"{self.name}.{path}"


@pytest.fixture
def stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Mapping[str, str]], Stock]]:
    """Make a package from sources by module name."""
    made = []

    def make(sources: Mapping[str, str]) -> Stock:
        package = Stock(f"stock_{next(_NUMBERS)}", tmp_path)
        folder = tmp_path / package.name
        folder.mkdir()
        for name, text in {"__init__": "", **sources}.items():
            (folder / f"{name}.py").write_text(text.replace("STOCK", package.name))
        made.append(package.name)
        return package

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for name in list(sys.modules):
        if name.partition(".")[0] in made:
            del sys.modules[name]


@pytest.fixture
def make_patch() -> Callable[..., Patch]:
    """Make a fix with valid values where none are given, and the fingerprint that its target has now."""

    def make(path: str, build: Callable[[Any], Any], **values: Any) -> Patch:
        target = values.pop("target", None) or Target(path)
        draft: dict[str, Any] = {
            "id": "double-answer",
            "title": "The answer is doubled",
            "symptom": "the answer is half of what it should be",
            "upstream": ("https://example.invalid/1",),
            "processes": (Process.API_SERVER, Process.ENGINE_CORE, Process.WORKER),
            "affects": ">=1.0,<2",
            "kind": "wrap",
            "target": target,
            "fingerprints": {},
            "build": build,
            "reached": lambda: Engine().stock(path),
            "remove_when": "upstream doubles it",
            "proof": "tests/patches/test_engine.py",
            "when": When(),
        } | values
        if "fingerprints" not in values:
            draft["fingerprints"] = {"1.0": Engine().found_fingerprint(Patch(**draft))}
        return Patch(**draft)

    return make


@pytest.fixture
def registry_extension() -> Callable[[Any], Extension]:
    """The extension point of a stand-in registry module that has `BACKENDS`, a dict with the key `fast`."""

    def make(registry: Any) -> Extension:
        def put(value: Any) -> None:
            registry.BACKENDS["fast"] = value

        return Extension(install=put, current=lambda: registry.BACKENDS["fast"], restore=put)

    return make


@pytest.fixture
def fixed() -> Iterator[None]:
    """The fix of TurboQuant, put in by the engine and taken out again."""
    from tests.patches import tq_layer

    engine = tq_layer.apply_fix()
    yield
    engine.undo_all()
    assert tq_layer.AttentionBackendEnum.TURBOQUANT.get_class() is tq_layer.stock.TurboQuantAttentionBackend


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Launches of TurboQuant's kernels replaced by records of their arguments; outputs are zero."""
    from tests.patches import tq_layer

    return tq_layer.record_calls(monkeypatch)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Launches of all Triton kernels replaced by records of what would be compiled for them."""
    from tests.patches import tq_layer

    return tq_layer.record_launches(monkeypatch)


@pytest.fixture
def make_layer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a layer of TurboQuant attention: `make_layer(kv_cache_dtype, drafts, max_model_len)`."""
    from tests.patches import tq_layer

    return tq_layer.layers(monkeypatch)


@pytest.fixture
def without_our_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes go to vLLM's kernel, as they do where Graft's does not serve a shape."""
    from tests.patches import tq_layer

    monkeypatch.setattr(tq_layer.decode, "supports", lambda *_, **__: "not served in this test")
