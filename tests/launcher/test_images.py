"""Pins, the wheel, and the name of an image."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from launcher import render
from launcher.errors import StartFailed, UsageError
from launcher.images import build, operate
from launcher.images.build import PullProgress, Wheel, build_wheel, tag
from launcher.images.pins import load_pins, record_digest
from launcher.profile import load_profile, profile_files

DIGEST = f"sha256:{'a' * 64}"
ONE = """
"0.33.0":
  role: current
  base: vllm/vllm-openai:v0.33.0
  python: "3.12"
  torch: 2.14.0
"""


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "state" / "images.lock.json"


def pins_file(folder: Path, text: str) -> Path:
    path = folder / "pins.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_shipped_pins_are_the_current_release_and_the_one_before(lock: Path) -> None:
    pins = load_pins(lock=lock)
    assert [(pin.vllm, pin.role) for pin in pins.pins] == [("0.33.0", "current"), ("0.32.0", "previous")]
    assert pins.current.base == "vllm/vllm-openai:v0.33.0"
    assert (pins.current.cuda, pins.current.min_driver) == ("13.0", "580")
    assert pins.source == "images/pins.yaml"


def test_a_release_that_is_not_pinned_is_named_with_those_that_are(lock: Path) -> None:
    with pytest.raises(UsageError, match=r"0\.31\.0 is not in images/pins\.yaml; write one of 0\.33\.0, 0\.32\.0"):
        load_pins(lock=lock).of("0.31.0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "a mapping of vLLM releases is needed"),
        ("{", "cannot be read"),
        ('"0.33.0": 1', r"0\.33\.0: a mapping is needed, got int"),
        (ONE.replace("role: current", "role: newest"), r"0\.33\.0\.role: "),
        (ONE.replace("vllm-openai:v0.33.0", "vllm-openai"), r"0\.33\.0\.base: "),
        (ONE + "  digest: sha256:abc\n", r"0\.33\.0\.digest: "),
        (ONE + "  cudnn: 9\n", r"0\.33\.0\.cudnn: "),
        (ONE.replace("0.33.0", "0.33", 1), r"0\.33\.vllm: "),
        (ONE.replace("role: current", "role: previous"), "exactly one release is the current one"),
        (ONE + ONE.replace("0.33.0", "0.32.0", 1), "exactly one release is the current one"),
        ("".join(ONE.replace("0.33.0", f"0.3{minor}.0", 1) for minor in (1, 2, 3)), "3 releases; keep"),
    ],
)
def test_wrong_pins_name_the_file_and_the_key(text: str, message: str, tmp_path: Path, lock: Path) -> None:
    path = pins_file(tmp_path, text)
    with pytest.raises(UsageError, match=message) as error:
        load_pins(path, lock)
    assert str(path) in str(error.value)


def test_a_recorded_digest_is_built_from_and_never_replaced(lock: Path) -> None:
    base = load_pins(lock=lock).current.base
    record_digest(base, DIGEST, lock)
    record_digest(base, f"sha256:{'b' * 64}", lock)
    record_digest("other/image:v1", DIGEST, lock)
    pin = load_pins(lock=lock).current
    assert pin.digest == DIGEST
    assert pin.reference == pin.image().base == f"vllm/vllm-openai@{DIGEST}"
    assert load_pins(lock=lock).of("0.32.0").digest is None


def test_a_digest_in_the_pins_comes_before_a_recorded_one(tmp_path: Path, lock: Path) -> None:
    record_digest("vllm/vllm-openai:v0.33.0", f"sha256:{'b' * 64}", lock)
    path = pins_file(tmp_path, ONE + f"  digest: {DIGEST}\n")
    assert load_pins(path, lock).current.digest == DIGEST


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_lock_file_says_what_to_do(text: str, lock: Path) -> None:
    lock.parent.mkdir()
    lock.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="remove it, the next pull records the digests again"):
        load_pins(lock=lock)


def test_the_wheel_holds_the_package_and_its_plugin_entry_point() -> None:
    wheel = build_wheel()
    assert wheel.name.startswith("vllm_graft-")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(BytesIO(wheel.content)) as archive:
        packed = {name for name in archive.namelist() if name.startswith("vllm_graft/")}
        entry_points = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "[vllm.general_plugins]\ngraft=vllm_graft:register" in archive.read(entry_points).decode()
    package = build.PATCHES / "vllm_graft"
    sources = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert packed == {str(path.relative_to(build.PATCHES)) for path in sources}


def test_the_same_sources_give_the_same_wheel_whenever_and_however_they_were_checked_out(tmp_path: Path) -> None:
    copy = tmp_path / "patches"
    shutil.copytree(build.PATCHES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path in copy.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
        path.chmod(0o700 if path.is_dir() else 0o600)
    assert build_wheel(copy) == build_wheel()


def test_the_programs_of_a_service_run_from_their_zip_with_all_that_they_import(tmp_path: Path) -> None:
    program = tmp_path / operate.NAME
    program.write_bytes(operate.operate_zip())
    assert program.read_bytes() == operate.operate_zip.__wrapped__()
    line = "OSError: [Errno 28] No space left on device"
    settings = {
        "service": "cpu",
        "folder": str(tmp_path),
        "commands": {"normal": [sys.executable, "-c", f"print({line!r}); raise SystemExit(3)"]},
    }
    (tmp_path / "keep.json").write_text(json.dumps(settings), encoding="utf-8")
    argv = [sys.executable, "-I", str(program), "keep", str(tmp_path / "keep.json")]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 3, ended.stderr
    assert '"cause": "disk-full"' in ended.stdout
    wrong = subprocess.run([*argv[:3], "watch"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (wrong.returncode, wrong.stderr) == (2, "watch: one argument is needed, the file of its settings\n")


def test_the_tag_of_an_image_changes_with_what_goes_into_it(lock: Path) -> None:
    wheel, image = Wheel("a.whl", b"a"), load_pins(lock=lock).current.image()
    tags = [
        tag(image, wheel),
        tag(image, Wheel("a.whl", b"b")),
        tag(image.model_copy(update={"base": f"vllm/vllm-openai@{DIGEST}"}), wheel),
    ]
    assert len(set(tags)) == 3
    assert all(one.startswith("graft-vllm:0.33.0-") for one in tags)
    assert tag(image, wheel) == tags[0]


def test_the_dockerfile_begins_from_the_pinned_base(lock: Path) -> None:
    text = render.dockerfile(load_pins(lock=lock).current.image(), "a.whl")
    assert "ARG BASE=vllm/vllm-openai:v0.33.0\nFROM ${BASE}\n" in text
    assert text.endswith("USER 2000:0\n")
    # The built-in front end of Docker Engine 20.10 has no heredocs.
    assert "<<" not in text


def test_the_progress_of_a_pull_counts_the_bytes_of_all_layers() -> None:
    seen: list[PullProgress] = []
    events: list[dict[str, Any]] = [
        {"status": "Pulling from vllm/vllm-openai", "id": "v0.33.0"},
        {"status": "Pulling fs layer", "progressDetail": {}, "id": "a"},
        {"status": "Already exists", "progressDetail": {}, "id": "b"},
        {"status": "Downloading", "progressDetail": {"current": 10, "total": 100}, "id": "a"},
        {"status": "Downloading", "progressDetail": {"current": 5, "total": 50}, "id": "c"},
        {"status": "Extracting", "progressDetail": {"current": 1, "total": 100}, "id": "a"},
        {"status": "Pull complete", "progressDetail": {}, "id": "a"},
        {"status": "Digest: sha256:abc"},
    ]
    build._follow_pull("base", iter(events), seen.append)
    assert seen[0] == PullProgress(10, 100)
    assert seen[1] == PullProgress(15, 150)
    assert seen[-1] == PullProgress(105, 150)


def test_a_refused_pull_says_why() -> None:
    events = [{"error": "toomanyrequests: You have reached your pull rate limit."}]
    with pytest.raises(StartFailed, match="base: cannot be pulled: toomanyrequests"):
        build._follow_pull("base", iter(events), None)


@pytest.mark.parametrize("profile", profile_files())
def test_every_profile_names_a_pinned_release(profile: str, lock: Path) -> None:
    vllm = load_profile(profile).vllm
    assert load_pins(lock=lock).of(vllm).vllm == vllm
