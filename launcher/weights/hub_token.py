"""The hub's token, from a file: an argument or a variable could be seen by others."""

from pathlib import Path

from launcher.errors import UsageError


def stored_token(secrets_dir: Path) -> str | None:
    """Return the token that is kept with a service's secrets; None where there is none.

    Raises:
        UsageError: the file holds no token.
    """
    path = secrets_dir / "hf_token"
    return read_token(path) if path.is_file() else None


def read_token(path: Path) -> str:
    """Return the token that a file holds.

    Raises:
        UsageError: it cannot be read, or holds something else; what it holds is not shown.
    """
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UsageError(f"{path}: the token cannot be read: {reason}") from error
    if not token or len(token.split()) != 1 or not token.isascii():
        raise UsageError(f"{path}: one token of the hub is needed in it, and nothing else")
    return token
