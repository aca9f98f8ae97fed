"""What a fix is: frozen data that can be read, printed and checked with the standard library and `packaging` alone.

A fix is one module in `vllm_graft/fixes/` with one `PATCH`.  Its module level imports nothing of torch or vLLM: the
launcher reads the same data in an environment that has neither.  Whatever needs vLLM is imported inside the callables.

A fix that subclasses a vLLM class and hands it over through a supported extension point (`kind="register"`)::

    from typing import Any

    from vllm_graft.patch import Extension, Patch, Process, Target, When

    STOCK = "vllm.v1.attention.backends.turboquant_attn"


    def build(original: Any) -> Any:
        from vllm_graft.attention.turboquant import backend_on  # imports vLLM, hence not at module level

        return backend_on(original)  # a class that vLLM can import by its __module__ and __qualname__


    def current() -> Any:  # what the extension point gives at this moment
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        return AttentionBackendEnum.TURBOQUANT.get_class()


    def install(replacement: Any) -> None:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.TURBOQUANT)(replacement)


    def restore(original: Any) -> None:  # undo: give `original` back, without a registration when it is the stock class
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        AttentionBackendEnum.TURBOQUANT.clear_override()
        if current() is not original:
            install(original)


    def reached() -> Any:  # the object that vLLM's own caller gets, by the caller's own way to it
        from vllm.platforms import current_platform
        ...


    PATCH = Patch(
        id="tq-mixed-batch",
        title="TurboQuant judges a mixed batch row by row",
        symptom="a long new prompt makes the other running requests forget theirs",
        upstream=("https://github.com/vllm-project/vllm/issues/46460",),
        processes=(Process.ENGINE_CORE, Process.WORKER),
        affects=">=0.32.0,<=0.33.0",
        when=When(kv_cache_dtypes=("turboquant_*",)),
        kind="register",
        target=Target(f"{STOCK}:TurboQuantAttentionBackend", reads=(f"{STOCK}:TurboQuantMetadataBuilder",)),
        fingerprints={"0.33.0": "0123456789abcdef"},  # python -m vllm_graft fingerprint PATH [PATH ...]
        build=build,
        extension=Extension(install=install, current=current, restore=restore),
        reached=reached,
        remove_when="vLLM #46461 is in the oldest supported version",
        proof="tests/patches/test_tq_mixed_batch.py",
    )

A `wrap` or `replace` fix has no `extension`; `build` gets the original function or class and returns what takes its
place, and `Target.also` names the places that hold the original by value (`from module import name`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet

Capability = tuple[int, int]
Kind = Literal["wrap", "replace", "register"]

_ID = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_PROOF = re.compile(r"tests/(\w+/)*test_\w+\.py")


class Process(StrEnum):
    """What a process of vLLM does; one process can do several of these."""

    API_SERVER = "api-server"
    ENGINE_CORE = "engine-core"
    WORKER = "worker"
    MODEL_INSPECTION = "model-inspection"


class Outcome(StrEnum):
    """What became of one fix in one process."""

    APPLIED = "applied"
    NOT_AFFECTED = "not-affected"
    NOT_APPLICABLE = "not-applicable"
    DISABLED = "disabled"
    PENDING = "pending"
    DRIFTED = "drifted"
    FAILED = "failed"


def _names_an_object(path: str) -> bool:
    return all(name.isidentifier() for part in path.split(":", 1) for name in part.split("."))


@dataclass(frozen=True)
class Target:
    """The object that a fix takes the place of, as `module:attribute.path`.

    `also` are further places that hold the same object by value.  `reads` are further objects (or whole modules,
    without a colon) whose source the replacement relies on: a change in any of them changes the fingerprint.
    """

    path: str
    also: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for path in (self.path, *self.also):
            if ":" not in path or not _names_an_object(path):
                raise ValueError(f"Target: got {path!r}; write it as 'module:attribute.path'")
        for path in self.reads:
            if not _names_an_object(path):
                raise ValueError(f"Target.reads: got {path!r}; write it as 'module' or 'module:attribute.path'")


@dataclass(frozen=True)
class When:
    """The conditions under which a fix is wanted; all of those given must hold, and none means always.

    Capabilities are CUDA compute capabilities, `(8, 9)` for an RTX 4090; one visible GPU in range is enough.
    `kv_cache_dtypes` are shell patterns, `architectures` the exact names of config.json.
    """

    capability_at_least: Capability | None = None
    capability_below: Capability | None = None
    architectures: tuple[str, ...] = ()
    kv_cache_dtypes: tuple[str, ...] = ()
    speculation: bool | None = None

    def __str__(self) -> str:
        parts = []
        if self.capability_at_least is not None:
            parts.append("compute capability >= {}.{}".format(*self.capability_at_least))
        if self.capability_below is not None:
            parts.append("compute capability < {}.{}".format(*self.capability_below))
        if self.architectures:
            parts.append(f"architecture {' or '.join(self.architectures)}")
        if self.kv_cache_dtypes:
            parts.append(f"KV cache {' or '.join(self.kv_cache_dtypes)}")
        if self.speculation is not None:
            parts.append("speculative decoding" if self.speculation else "no speculative decoding")
        return ", ".join(parts) or "always"


@dataclass(frozen=True)
class Extension:
    """A supported extension point of vLLM: how to put a replacement in, look at what is in, and put the former back."""

    install: Callable[[Any], None]
    current: Callable[[], Any]
    restore: Callable[[Any], None]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One fix: what it is for, where it belongs, what it replaces and how that is proven.

    `affects` is a version specifier with an upper bound; `fingerprints` maps a public vLLM version to the fingerprint
    of the target there.  `reached` returns the object that vLLM's own caller gets, found the way that caller finds it.
    """

    id: str
    title: str
    symptom: str
    upstream: tuple[str, ...]
    processes: tuple[Process, ...]
    affects: str
    kind: Kind
    target: Target
    fingerprints: Mapping[str, str]
    build: Callable[[Any], Any] = field(repr=False)
    reached: Callable[[], Any] = field(repr=False)
    remove_when: str
    proof: str
    when: When = When()
    extension: Extension | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprints", MappingProxyType(dict(self.fingerprints)))
        for problem in _problems(self):
            raise ValueError(f"fix {self.id!r}: {problem}")


def _problems(patch: Patch) -> list[str]:
    problems = []
    if not _ID.fullmatch(patch.id):
        problems.append("id must be kebab-case, such as 'tq-mixed-batch'")
    if not patch.processes:
        problems.append("processes is empty; name the processes that need it")
    for name in ("title", "symptom", "upstream", "remove_when"):
        if not getattr(patch, name):
            problems.append(f"{name} is empty")
    if not _PROOF.fullmatch(patch.proof):
        problems.append(f"proof: got {patch.proof!r}; write 'tests/.../test_name.py'")
    if (patch.kind == "register") != (patch.extension is not None):
        problems.append(f"kind is {patch.kind!r}; 'register', and only it, has an extension")
    if patch.kind == "register" and patch.target.also:
        problems.append("a registered replacement leaves the stock object in place: target.also must be empty")
    return problems + _version_problems(patch)


def _version_problems(patch: Patch) -> list[str]:
    try:
        affects = SpecifierSet(patch.affects, prereleases=True)
    except InvalidSpecifier:
        return [f"affects: got {patch.affects!r}; write a version specifier such as '>=0.32.0,<=0.33.0'"]
    problems = []
    if not any(part.operator in ("<", "<=", "==", "===", "~=") for part in affects):
        problems.append(f"affects: {patch.affects!r} has no upper bound; a fix must not outlive the code it is for")
    for version, fingerprint in patch.fingerprints.items():
        if version not in affects:
            problems.append(f"fingerprints: {version} is outside of affects {patch.affects!r}")
        if not _FINGERPRINT.fullmatch(fingerprint):
            problems.append(f"fingerprints: {version}: got {fingerprint!r}; 16 hexadecimal digits")
    return problems
