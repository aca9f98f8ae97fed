"""The lock of a service: the bytes that a start is made of, so that another one can be held to them."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from vllm_graft.decide import affects
from vllm_graft.fixes import FIXES

from launcher.errors import Refused, UsageError
from launcher.gateway.edge import TEMPLATE as EDGE_TEMPLATE
from launcher.images.build import build_wheel, local_image
from launcher.images.hashes import Hashes
from launcher.images.operate import operate_zip
from launcher.plan import EnvironmentVariable, Plan
from launcher.state import CHECKOUT, ServiceState
from launcher.weights.events import RECORD, Origin

SCHEMA: Literal[1] = 1
TEMPLATES = ("images/Dockerfile.j2", "images/manifest.py", "compose/entrypoint.sh.j2", EDGE_TEMPLATE)
"""What an image and its start are rendered from."""


class LockPart(BaseModel):
    """Base of the lock's values."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LockedFile(LockPart):
    """One file of the model."""

    size_bytes: int
    sha256: str


class LockedModel(LockPart):
    """The model's files, and where they came from."""

    repo: str
    revision: str | None
    """Commit of the hub's repository; None for files that came from elsewhere."""
    package: str | None
    files: dict[str, LockedFile]


class Lock(LockPart):
    """Everything that decides what a service computes; nothing of the machine that it runs on."""

    schema_version: Literal[1] = SCHEMA
    launcher: str
    profile: str
    runtime: str
    vllm: str
    base: str | None
    """Reference of the base image, with its digest; None for the host runtime."""
    base_id: str | None
    """Docker's id of a base image without a digest, which came from no registry."""
    wheel_sha256: str
    templates_sha256: str
    fixes: dict[str, str]
    """Fingerprint of the source that each fix for this vLLM replaces, by the fix's id."""
    fixes_required: tuple[str, ...]
    fixes_disabled: tuple[str, ...]
    model: LockedModel
    served_name: str
    flags: tuple[str, ...]
    environment: dict[str, str]

    @property
    def id(self) -> str:
        """Digest of all of it, as 12 hex digits."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]

    def write(self, path: Path) -> None:
        """Write it as a whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.partial")
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(self.model_dump_json(indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)


@dataclass(frozen=True)
class Difference:
    """One value that is not the locked one; None where it is absent."""

    what: str
    locked: str | None
    now: str | None

    def __str__(self) -> str:
        return f"{self.what}: locked {self.locked or 'nothing'}, now {self.now or 'nothing'}"


def differences(locked: Lock, now: Lock) -> tuple[Difference, ...]:
    """Return every value that differs, by its path in the lock."""
    before, after = dict(_leaves(locked.model_dump())), dict(_leaves(now.model_dump()))
    names = dict.fromkeys((*before, *after))
    return tuple(
        Difference(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)
    )


def refuse_differences(locked: Lock, now: Lock, path: Path) -> None:
    """Stop a start that is not the locked one.

    Raises:
        Refused: naming every difference.
    """
    found = differences(locked, now)
    if found:
        listed = "\n".join(f"  {one}" for one in found)
        raise Refused(f"{path}: this start differs from its lock; without --locked it is made all the same:\n{listed}")


def read(path: Path) -> Lock | None:
    """Read a lock; None where there is none.

    Raises:
        UsageError: it is not one of this launcher.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    try:
        document = json.loads(text)
        if isinstance(document, dict) and document.get("schema_version", SCHEMA) != SCHEMA:
            raise UsageError(
                f"{path}: a lock of version {document['schema_version']}, this launcher reads version {SCHEMA}; use "
                f"the launcher that wrote it ({document.get('launcher', 'unknown')}), or write it again: `graft lock`"
            )
        return Lock.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{path}: {where}: {first['msg']}; write it again: `graft lock`") from error
    except ValueError as error:
        raise UsageError(f"{path}: not JSON ({error}); write it again: `graft lock`") from error


def lock_file(state: ServiceState) -> Path:
    """Return where the lock of a service lies."""
    return state.root / "lock.json"


def _ignore(name: str, done_bytes: int, total_bytes: int) -> None:
    pass


def of(
    plan: Plan,
    model_dir: Path,
    on_bytes: Callable[[str, int, int], None] = _ignore,
) -> Lock:
    """Return the lock of a plan.

    Args:
        model_dir: folder of a whole checkpoint.
        on_bytes: told the file, the bytes read so far and its size where one has to be hashed.
    """
    return Lock(
        launcher=version("graft-launcher"),
        profile=plan.profile,
        runtime=plan.runtime,
        vllm=plan.vllm,
        base=plan.image.base if plan.image else None,
        base_id=_base_id(plan),
        wheel_sha256=build_wheel().sha256,
        templates_sha256=_templates_sha256(),
        fixes={
            fix.id: fix.fingerprints[plan.vllm]
            for fix in FIXES
            if affects(fix, plan.vllm) and plan.vllm in fix.fingerprints
        },
        fixes_required=plan.required_fixes,
        fixes_disabled=plan.disabled_fixes,
        model=model_of(plan, model_dir, on_bytes),
        served_name=plan.served_name,
        flags=plan.argv(),
        environment=_environment(plan.environment),
    )


def _environment(variables: tuple[EnvironmentVariable, ...]) -> dict[str, str]:
    return {variable.name: variable.value for variable in variables}


def _base_id(plan: Plan) -> str | None:
    if plan.image is None or "@" in plan.image.base:
        return None
    image = local_image(plan.image.base)
    return image.id if image else None


def _templates_sha256() -> str:
    digest = hashlib.sha256()
    for name in TEMPLATES:
        digest.update((CHECKOUT / name).read_bytes() + b"\0")
    digest.update(operate_zip())
    return digest.hexdigest()


def model_of(plan: Plan, folder: Path, on_bytes: Callable[[str, int, int], None] = _ignore) -> LockedModel:
    """Return what is locked of a plan's model; the arguments are those of `of`."""
    origin, hashes = Origin.read(folder), Hashes.read()
    fetched = _fetched_hashes(folder, origin)
    files = {}
    for name, path in _files(folder):
        size_bytes = path.stat().st_size
        digest = fetched.get(name) or hashes.sha256(path, partial(_tell, on_bytes, name, size_bytes))
        files[name] = LockedFile(size_bytes=size_bytes, sha256=digest)
    hashes.write()
    return LockedModel(
        repo=origin.repo if origin else plan.model_repo,
        revision=origin.revision if origin else None,
        package=origin.package if origin else None,
        files=files,
    )


def _tell(on_bytes: Callable[[str, int, int], None], name: str, size_bytes: int, done_bytes: int) -> None:
    on_bytes(name, done_bytes, size_bytes)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and name.name != RECORD and not any(part.startswith(".") for part in name.parts):
            yield name.as_posix(), path


def _fetched_hashes(folder: Path, origin: Origin | None) -> dict[str, str]:
    """Return the hashes that were taken when the files came."""
    if origin is None:
        return {}
    since_ns = (folder / RECORD).stat().st_mtime_ns
    return {
        file.path: file.sha256
        for file in origin.files
        if file.sha256 is not None and _is_untouched(folder / file.path, file.size_bytes, since_ns)
    }


def _is_untouched(path: Path, size_bytes: int | None, since_ns: int) -> bool:
    """Whether a file still has its size and was neither written to nor put in another's place since."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return max(found.st_mtime_ns, found.st_ctime_ns) <= since_ns and size_bytes in (None, found.st_size)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, tuple):
        yield path, " ".join(map(str, value))
    elif value is not None:
        yield path, str(value)
