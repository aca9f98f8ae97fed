"""What lies where in a bundle: its manifest, its sums, and the script that installs it."""

import platform
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from launcher.errors import UsageError

SCHEMA: Literal[1] = 1
MANIFEST = "bundle.json"
SUMS = "SHA256SUMS"
"""Every other file with its SHA-256, in the form of sha256sum; written last."""
INSTALLER = "install.sh"
SOURCE = "graft"
WHEELS = "wheels"
MODELS = "models"
IMAGES = "images"
STATE = "state"
SOURCES = (
    "launcher",
    "profiles",
    "compose",
    "images",
    "patches",
    "requirements",
    "docs",
    "pyproject.toml",
    "Makefile",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
)
"""What of the checkout a user's machine needs."""
STATE_FILES = ("lock.json", "vllm.json")
"""Files of a service's folder that decide which bytes it runs; rendered ones are rendered again, secrets stay."""

INSTALL_SCRIPT = """\
#!/bin/sh
# Installs Graft and what this folder carries, without network: sh install.sh [FOLDER]    (default: ~/graft)
set -eu
cd "$(dirname "$0")"
target=${1:-$HOME/graft}
# Relative, since pip splits this variable at spaces.
export PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels PIP_DISABLE_PIP_VERSION_CHECK=1
grep -E '^[0-9a-f]{64}  (graft|wheels)/' SHA256SUMS | sha256sum --check --quiet
mkdir -p "$target"
cp -R graft/. "$target"
"${PYTHON:-python3}" -m venv "$target/.venv"
"$target/.venv/bin/python" -m pip install --quiet --require-hashes -r "$target/requirements/launcher.txt"
"$target/.venv/bin/python" -m pip install --quiet --no-deps --editable "$target" --editable "$target/patches"
touch "$target/.venv/.installed"
exec "$target/.venv/bin/graft" bundle install .
"""


class Manifest(BaseModel):
    """What a bundle is for; what it holds is in its sums."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = SCHEMA
    launcher: str
    profile: str
    model: str
    runtime: Literal["docker", "host"]
    machine: str
    """As `uname -m` says: wheels and images are made for one."""
    images: tuple[str, ...] = ()
    """References of the saved images."""
    digests: dict[str, str] = {}
    """Digests of base images that were read from a registry, by their references."""
    engine_python: str | None = None
    """Python release that the engine's wheels are for, such as "3.11"; None: they are not in it."""

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read a bundle's manifest.

        Raises:
            UsageError: there is none, or not one of this launcher.
        """
        path = folder / MANIFEST
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(
                f"{path}: {error.strerror}; give the folder that `graft bundle` wrote, unpacked"
            ) from error
        except ValueError as error:
            raise UsageError(f"{path}: not a manifest of this launcher; use the launcher that is in it") from error


def this_machine() -> str:
    """Return the machine's architecture, such as x86_64."""
    return platform.machine()
