"""The bake file, the Dockerfile and the workflows: checked by their own linters, and against the pins."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launcher.images.build import build_context
from launcher.images.pins import load_pins
from launcher.state import CHECKOUT

WORKFLOWS = sorted((CHECKOUT / ".github" / "workflows").glob("*.yml"))
BAKE = (CHECKOUT / "images" / "docker-bake.hcl").read_text(encoding="utf-8")
PINS = load_pins(lock=Path("no-digests-recorded.json")).pins
SCRIPTS = Path(sys.executable).parent


def run(*argv: str) -> None:
    done = subprocess.run([str(SCRIPTS / argv[0]), *argv[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("pin", PINS, ids=lambda pin: pin.vllm)
def test_hadolint_has_nothing_against_the_dockerfile(pin: object, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_bytes(build_context(pin.image())["Dockerfile"])  # type: ignore[attr-defined]
    run("hadolint", "--no-color", str(tmp_path / "Dockerfile"))


def test_the_workflows_are_of_githubs_schema() -> None:
    run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *map(str, WORKFLOWS))


def test_there_are_workflows_for_tests_images_and_drift() -> None:
    assert [path.stem for path in WORKFLOWS] == ["drift", "images", "test"]


def test_every_action_is_pinned_by_commit() -> None:
    used = re.findall(r"uses: (\S+)(.*)", "\n".join(path.read_text(encoding="utf-8") for path in WORKFLOWS))
    assert used
    for action, comment in used:
        if not action.startswith("docker://"):
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
            assert re.search(r"# v\d+\.\d+\.\d+$", comment), action


def test_workflows_may_do_no_more_than_they_say() -> None:
    for path in WORKFLOWS:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert document["permissions"] == {"contents": "read"}, path.name
        for job in document["jobs"].values():
            assert job["timeout-minutes"] <= 180


def test_the_bake_file_has_one_target_for_each_pin_and_one_for_cpus() -> None:
    targets = set(re.findall(r'^target "([a-z0-9_-]+)"', BAKE, re.MULTILINE))
    assert targets == {"_common", "cpu", *(f"vllm-{pin.vllm.replace('.', '_')}" for pin in PINS)}
    group = re.search(r"targets = \[(.*)\]", BAKE)
    assert group is not None
    assert len(group[1].split(",")) == len(PINS)
    for pin in PINS:
        assert f'"${{CONTEXT}}/{pin.vllm}"' in BAKE
        assert pin.base == f"vllm/vllm-openai:v{pin.vllm}", "the label org.opencontainers.image.base.name says so"


def test_a_release_builds_each_pin() -> None:
    document = yaml.safe_load((CHECKOUT / ".github/workflows/images.yml").read_text(encoding="utf-8"))
    assert document["jobs"]["image"]["strategy"]["matrix"]["vllm"] == [pin.vllm for pin in PINS]
