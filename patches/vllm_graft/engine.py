"""Puts fixes in: resolve, fingerprint, build, bind, verify.  The only module that changes an object of vLLM."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

from packaging.version import Version

from vllm_graft.fingerprint import fingerprint
from vllm_graft.patch import Extension, Outcome, Patch

_TAKES_ALL = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


@dataclass(frozen=True)
class Place:
    """Where an object is bound: an attribute of a module or class, with the raw value that was found there."""

    path: str
    owner: Any
    name: str
    value: Any


@dataclass(frozen=True)
class Applied:
    """One fix that is in: what undo needs."""

    patch: Patch
    fingerprint: str
    original: Any
    replacement: Any
    places: tuple[Place, ...]
    extension: Extension | None


@dataclass(frozen=True)
class Attempt:
    """What came of putting one fix in."""

    outcome: Outcome
    reason: str
    fingerprint: str | None


class UndoError(RuntimeError):
    """A fix cannot be taken out again, because something else has been put on top of it."""


class Unresolved(Exception):
    """A target cannot be replaced; carries the outcome that this means."""

    def __init__(self, outcome: Outcome, reason: str, found: str | None = None) -> None:
        super().__init__(reason)
        self.outcome, self.reason, self.fingerprint = outcome, reason, found


class Engine:
    """The fixes that are in this process, in the order in which they were put in."""

    def __init__(self) -> None:
        self._applied: dict[str, Applied] = {}

    def __contains__(self, fix: str) -> bool:
        return fix in self._applied

    def apply(self, patch: Patch, vllm: str) -> Attempt:
        """Put a fix in, once; whatever goes wrong, vLLM's objects are as they were before and the outcome says why.

        The target's module is imported here rather than waited for: a required fix must be in, or known not to be, when
        vLLM goes on.
        """
        if patch.id in self._applied:
            return self._report(self._applied[patch.id])
        try:
            applied = self._put_in(patch, vllm)
        except Unresolved as error:
            return Attempt(error.outcome, error.reason, error.fingerprint)
        except Exception as error:  # noqa: BLE001 - foreign code of every kind runs here; the outcome carries the cause
            return Attempt(Outcome.FAILED, f"{type(error).__name__}: {error}", None)
        self._applied[patch.id] = applied
        return self._report(applied)

    def undo(self, fix: str) -> None:
        """Take a fix out and give vLLM the very objects back that it had.

        Raises:
            UndoError: another fix, or foreign code, is on top of it.
            KeyError: the fix is not in.

        """
        applied = self._applied[fix]
        _take_out(applied)
        del self._applied[fix]

    def undo_all(self) -> None:
        """Take all fixes out, the last one first."""
        for fix in reversed(list(self._applied)):
            self.undo(fix)

    def applied(self, fix: str) -> Applied:
        """The record of a fix that is in."""
        return self._applied[fix]

    def stock(self, path: str) -> Any:
        """The object at a path as vLLM has it, below any fix; modules have no colon."""
        replaced = [applied for applied in self._applied.values() if applied.extension is None]
        originals = {applied.patch.target.path: applied.original for applied in reversed(replaced)}
        return resolve(path, originals).value if ":" in path else _import(path)

    def found_fingerprint(self, patch: Patch) -> str:
        """The fingerprint of the fix's target and of what else its replacement relies on, below any fix."""
        return fingerprint(self._sources(patch))

    def _sources(self, patch: Patch) -> list[Any]:
        return [self.stock(path) for path in (patch.target.path, *patch.target.reads)]

    def _report(self, applied: Applied) -> Attempt:
        return Attempt(Outcome.APPLIED, f"in place of {applied.patch.target.path}", applied.fingerprint)

    def _put_in(self, patch: Patch, vllm: str) -> Applied:
        found = self._checked_fingerprint(patch, vllm)
        if patch.extension is None:
            original = resolve(patch.target.path).value
        else:
            original = self._registered(patch, patch.extension, found)
        replacement = patch.build(_plain(original))
        _check_shape(patch, _plain(original), replacement, found)
        if isinstance(original, (staticmethod, classmethod)):
            replacement = type(original)(replacement)
        places = _places(patch, original, found) if patch.extension is None else ()
        applied = Applied(patch, found, original, replacement, places, patch.extension)
        try:
            _bind(applied, replacement)
            _verify(applied)
        except BaseException:
            _bind(applied, original)
            raise
        return applied

    def _checked_fingerprint(self, patch: Patch, vllm: str) -> str:
        version = Version(vllm).public
        sources = self._sources(patch)
        try:
            found = fingerprint(sources)
        except (TypeError, OSError) as error:
            raise Unresolved(Outcome.DRIFTED, f"{patch.target.path} has no source to compare: {error}") from error
        known = patch.fingerprints.get(version)
        if known is None:
            raise Unresolved(Outcome.DRIFTED, f"no fingerprint is recorded for vLLM {version}; found {found}", found)
        if found != known:
            reason = f"the source of {patch.target.path} is {found}, not {known} as in vLLM {version}"
            raise Unresolved(Outcome.DRIFTED, reason, found)
        return found

    def _registered(self, patch: Patch, extension: Extension, found: str) -> Any:
        current = extension.current()
        ours = [applied.replacement for applied in self._applied.values()]
        if current is not resolve(patch.target.path).value and not any(current is other for other in ours):
            reason = f"the extension point holds {_name(current)}, which is neither {patch.target.path} nor a fix"
            raise Unresolved(Outcome.FAILED, reason, found)
        return current


def resolve(path: str, originals: Mapping[str, Any] = MappingProxyType({})) -> Place:
    """Find the place `module:attribute.path`, importing the module; `originals` go before what is at their paths."""
    module_name, _, attributes = path.partition(":")
    owner: Any = _import(module_name)
    *outer, name = attributes.split(".")
    walked = f"{module_name}:"
    for attribute in outer:
        owner = originals.get(walked + attribute, _attribute(owner, attribute, path))
        walked += f"{attribute}."
    return Place(path, owner, name, originals.get(path, _attribute(owner, name, path)))


def _import(name: str) -> ModuleType:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if getattr(spec, "_initializing", False):
        raise Unresolved(Outcome.PENDING, f"module {name} is being imported; call register() again after that")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise Unresolved(Outcome.DRIFTED, f"module {name} does not exist") from error
        raise


def _attribute(owner: Any, name: str, path: str) -> Any:
    # Without the descriptor protocol: undo has to give back the very staticmethod or classmethod object.
    try:
        return vars(owner)[name]
    except KeyError:
        raise Unresolved(Outcome.DRIFTED, f"{path}: {_name(owner)} does not define {name}") from None


def _places(patch: Patch, original: Any, found: str) -> tuple[Place, ...]:
    """The target and its by-value copies; a module that is imported later will copy the replacement by itself."""
    copies = [resolve(path) for path in patch.target.also if path.partition(":")[0] in sys.modules]
    for copy in copies:
        if copy.value is not original:
            raise Unresolved(Outcome.DRIFTED, f"{copy.path} is not a copy of {patch.target.path}", found)
    return (resolve(patch.target.path), *copies)


def _bind(applied: Applied, value: Any) -> None:
    if applied.extension is not None:
        put = applied.extension.restore if value is applied.original else applied.extension.install
        put(value)
    for place in applied.places:
        setattr(place.owner, place.name, value)


def _take_out(applied: Applied) -> None:
    bound = [vars(place.owner)[place.name] for place in applied.places]
    if applied.extension is not None:
        bound.append(applied.extension.current())
    for value in bound:
        if value is not applied.replacement:
            raise UndoError(f"{applied.patch.id}: {_name(value)} is on top of it; undo that first")
    _bind(applied, applied.original)


def _verify(applied: Applied) -> None:
    """Check that the replacement is what vLLM gets: at every place, at the extension point, and by the caller's way."""
    patch, replacement = applied.patch, applied.replacement
    if applied.extension is not None and applied.extension.current() is not replacement:
        reason = f"the extension point still gives {_name(applied.extension.current())}"
        raise Unresolved(Outcome.FAILED, reason, applied.fingerprint)
    reached = _plain(patch.reached())
    if reached is not _plain(replacement):
        raise Unresolved(Outcome.FAILED, f"vLLM's own caller still reaches {_name(reached)}", applied.fingerprint)
    if applied.extension is None and (stale := next(stale_copies(applied), None)):
        reason = f"{stale} still holds the original; list it in target.also"
        raise Unresolved(Outcome.FAILED, reason, applied.fingerprint)


def stale_copies(applied: Applied) -> Iterator[str]:
    """The module-level names in the target's top-level package that still hold the original, as `module:name`."""
    package = applied.patch.target.path.partition(":")[0].partition(".")[0]
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == package and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if value is applied.original:
                    yield f"{module_name}:{name}"


def _check_shape(patch: Patch, original: Any, replacement: Any, found: str) -> None:
    problem = ""
    if replacement is original:
        problem = "build() returned the original: nothing would change"
    elif inspect.isclass(original):
        if not (inspect.isclass(replacement) and issubclass(replacement, original)):
            problem = f"build() returned {_name(replacement)}, which is no subclass of {_name(original)}"
    elif inspect.isfunction(original):
        problem = signature_problem(original, replacement)
    if problem:
        raise Unresolved(Outcome.FAILED, f"{patch.target.path}: {problem}", found)


def signature_problem(original: Any, replacement: Any) -> str:
    """Why a function cannot stand in for another by how it is called, empty when it can; annotations do not count.

    A wrapper may take `(*args, **kwargs)` when it names what it wraps (`functools.wraps`).
    """
    for kind in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        if kind(original) != kind(replacement):
            return f"{kind.__name__[2:]}: {kind(original)} before, {kind(replacement)} after"
    before, after = _parameters(original), _parameters(replacement)
    if before != after:
        return f"signature {inspect.signature(original)} became {inspect.signature(replacement)}"
    own = _parameters(replacement, follow_wrapped=False)
    if own != before and {kind for _, kind, _ in own} != _TAKES_ALL:
        return f"the wrapper takes {inspect.signature(replacement, follow_wrapped=False)}, which is not what it shows"
    return ""


def _parameters(function: Any, *, follow_wrapped: bool = True) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function, follow_wrapped=follow_wrapped).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]


def _plain(value: Any) -> Any:
    return value.__func__ if hasattr(value, "__func__") else value


def _name(value: Any) -> str:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return f"{module}.{name}" if module and name else repr(value)
