"""The gateway's API keys: made here, shown once, kept as SHA-256 alone."""

import hashlib
import os
import re
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from launcher.errors import UsageError
from launcher.state import ServiceState

PREFIX = "graft-"
"""Begins every key, so that people and scanners of repositories know one."""
OWN = "graft"
"""Name of the service's own key, which the launcher's commands use."""
KEYS_NAME, TLS_NAME = "keys.map", "tls.pem"
"""Files of the folder of secrets that the edge reads."""
UNLIMITED = 1_000_000_000
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?")


class Key(BaseModel):
    """One key; the key itself is not in it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    requests_per_minute: int | None = Field(default=None, ge=1)
    """None: no limit."""
    concurrency: int | None = Field(default=None, ge=1)
    """Requests under way at once; None: no limit."""
    created: str = ""

    @classmethod
    def of(
        cls, name: str, secret: str, requests_per_minute: int | None = None, concurrency: int | None = None
    ) -> "Key":
        return cls(
            name=name,
            sha256=hashlib.sha256(secret.encode()).hexdigest(),
            requests_per_minute=requests_per_minute,
            concurrency=concurrency,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )


class _Store(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: tuple[Key, ...] = ()


def key_map(keys: Iterable[Key]) -> str:
    """Return the map that the edge looks a key's SHA-256 up in; `edge.Edge.keys_file` says what a line holds."""
    lines = (
        f"{key.sha256} {key.name}:{key.requests_per_minute or UNLIMITED}:{key.concurrency or UNLIMITED}\n"
        for key in keys
    )
    return "".join(lines)


def keys_file(state: ServiceState) -> Path:
    """Return where the keys of a service are kept."""
    return state.secrets_dir / "keys.json"


def read(state: ServiceState) -> tuple[Key, ...]:
    """Return the keys of a service, its own one left out.

    Raises:
        UsageError: the file is not one of this launcher.
    """
    path = keys_file(state)
    try:
        return _Store.model_validate_json(path.read_bytes()).keys
    except FileNotFoundError:
        return ()
    except (OSError, ValidationError) as error:
        raise UsageError(
            f"{path}: not a file of keys ({' '.join(str(error).split())}); restore it or remove it"
        ) from error


def add(state: ServiceState, name: str, requests_per_minute: int | None = None, concurrency: int | None = None) -> str:
    """Make a key, keep its hash, and return it; it is shown nowhere else.

    Raises:
        UsageError: the name is taken, or is none.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r}: no name of a key; write lower-case letters, digits, '.', '_' or '-', at most 64")
    kept = read(state)
    if name == OWN or any(key.name == name for key in kept):
        raise UsageError(f"{name}: there is a key of this name; remove it first, or choose another")
    secret = new_secret()
    _write(state, (*kept, Key.of(name, secret, requests_per_minute, concurrency)))
    return secret


def remove(state: ServiceState, name: str) -> None:
    """Forget a key.

    Raises:
        UsageError: there is none of this name.
    """
    kept = read(state)
    left = tuple(key for key in kept if key.name != name)
    if len(left) == len(kept):
        names = ", ".join(key.name for key in kept) or "none"
        own = f"; {OWN} is the service's own key, in {state.secrets_dir / 'api_key'}" if name == OWN else ""
        raise UsageError(f"{name}: no such key; there are {names}{own}")
    _write(state, left)


def new_secret() -> str:
    """Return a new key: 256 random bits."""
    return f"{PREFIX}{secrets.token_urlsafe(32)}"


def _write(state: ServiceState, keys: tuple[Key, ...]) -> None:
    path = keys_file(state)
    state.secrets_dir.mkdir(parents=True, exist_ok=True)
    state.secrets_dir.chmod(0o700)
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(_Store(keys=keys).model_dump_json(indent=2) + "\n")
    partial.replace(path)
