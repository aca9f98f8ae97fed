"""The programs that keep a service serving, as one zip file for the image; the same sources give the same bytes."""

import io
import zipfile
from functools import cache
from pathlib import Path

from launcher.state import CHECKOUT

NAME = "operate.pyz"
IN_IMAGE = f"/opt/graft/{NAME}"
MODULES = (
    "__init__.py",
    "diagnose.py",
    "errors.py",
    "evidence.py",
    "logtext.py",
    "observed.py",
    "plan.py",
    "problems.py",
    "profile.py",
    "state.py",
    "yamltext.py",
    "host/__init__.py",
    "host/facts.py",
    "host/kernel.py",
)
"""Of the launcher, besides all of launcher/operate and launcher/rules: what the diagnosis needs."""
_MAIN = "import sys\nfrom launcher.operate.__main__ import main\nsys.exit(main())\n"
_EPOCH = (1980, 1, 1, 0, 0, 0)


@cache
def operate_zip(source: Path = CHECKOUT / "launcher") -> bytes:
    """Return the zip file, which Python runs as a program."""
    files = [source / name for name in MODULES]
    files += sorted((source / "operate").rglob("*.py"))
    files += sorted((source / "rules").glob("*.yaml"))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        _add(archive, "__main__.py", _MAIN.encode())
        for path in files:
            _add(archive, f"launcher/{path.relative_to(source).as_posix()}", path.read_bytes())
    return buffer.getvalue()


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
