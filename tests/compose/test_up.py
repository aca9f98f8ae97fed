"""One real server through Docker: build, up, the right answer, what it may and may not do, down."""

import hashlib
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from launcher import render, reports
from launcher.images import build
from launcher.ready import Ready, follow
from launcher.runtime import compose
from tests.compose.conftest import API_KEY, Deployed, Deployer
from tests.compose.standin import Standin

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def running(deploy: Deployer, model_dir: Path) -> Iterator[tuple[Deployed, Ready]]:
    deployed = deploy("up", model_dir, API_KEY)
    service = deployed.service
    build.ensure(deployed.state.compose_file, deployed.image)
    service.start()
    *_, ready = follow(service, deployed.plan.served_name, api_key=API_KEY)
    assert isinstance(ready, Ready)
    yield deployed, ready
    service.stop()


@pytest.fixture
def deployed(running: tuple[Deployed, Ready]) -> Deployed:
    return running[0]


def inside(deployed: Deployed, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the server's container, as its user."""
    argv = ["docker", "exec", deployed.service.container, "sh", "-c", command]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_the_first_answer_is_right(running: tuple[Deployed, Ready]) -> None:
    deployed, ready = running
    assert "Paris" in ready.answer.text
    state = deployed.service.state()
    assert (state.status, state.restart_count, state.exit_code, state.oom_killed) == ("running", 0, None, False)
    assert state.is_alive


def test_an_image_that_is_there_is_not_built_again(deployed: Deployed) -> None:
    begun_s = time.monotonic()
    assert build.ensure(deployed.state.compose_file, deployed.image) is False
    assert time.monotonic() - begun_s < 5


def test_a_second_up_leaves_the_server_alone(deployed: Deployed) -> None:
    argv = ["docker", "inspect", "--format", "{{.Id}} {{.State.StartedAt}}", deployed.service.container]
    before = subprocess.run(argv, capture_output=True, check=True).stdout
    deployed.service.start()
    assert subprocess.run(argv, capture_output=True, check=True).stdout == before


def test_the_key_is_asked_for_and_shows_nowhere(deployed: Deployed) -> None:
    url = f"{deployed.service.base_url}/v1/models"
    assert httpx.get(url, trust_env=False).status_code == httpx.codes.UNAUTHORIZED
    assert httpx.get(url, trust_env=False, headers={"Authorization": f"Bearer {API_KEY}"}).status_code == httpx.codes.OK
    shown = compose.must(compose.inspect(deployed.service.container)).lines
    assert not [line for line in shown if API_KEY in line]
    assert not [line for line in deployed.service.log() if API_KEY in line]
    assert not [path for path in deployed.state.root.glob("*.*") if API_KEY in path.read_text(encoding="utf-8")]


def test_the_log_says_what_was_executed(deployed: Deployed) -> None:
    (line,) = [line for line in deployed.service.log() if line.startswith("graft: ")]
    assert line.startswith("graft: exec vllm serve /models/smollm2-135m-instruct --host 0.0.0.0 --port 8000 ")
    assert line.endswith(" ".join(deployed.plan.argv()))


def test_the_server_is_an_ordinary_user_without_capabilities(deployed: Deployed) -> None:
    status = inside(deployed, "cat /proc/1/status").stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["2000"] * 4
    assert fields["Gid"].split() == ["0"] * 4
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    assert fields["NoNewPrivs"] == "1"


@pytest.mark.parametrize("path", ["/", "/opt/graft", "/usr/local/bin", "/models/smollm2-135m-instruct", "/run/graft"])
def test_nothing_but_caches_can_be_written(deployed: Deployed, path: str) -> None:
    assert inside(deployed, f"test -d {path}").returncode == 0
    assert inside(deployed, f"touch {path}/x").returncode != 0


@pytest.mark.parametrize("path", ["/cache", "/tmp", "/run/graft-reports"])
def test_caches_can_be_written(deployed: Deployed, path: str) -> None:
    assert inside(deployed, f"touch {path}/x && rm {path}/x").returncode == 0


def test_programs_in_tmp_can_run(deployed: Deployed) -> None:
    assert inside(deployed, "cp /bin/true /tmp/program && /tmp/program && rm /tmp/program").returncode == 0


def test_the_manifest_in_the_image_says_what_it_was_made_from(deployed: Deployed, base: Standin) -> None:
    manifest = json.loads(inside(deployed, "cat /opt/graft/manifest.json").stdout)
    (wheel,) = deployed.state.root.glob("image/*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert manifest["base"] == base.reference
    assert manifest["wheel"] == {"name": wheel.name, "sha256": digest}
    assert manifest["versions"]["vllm"] == base.vllm
    assert manifest["versions"]["vllm-graft"] == wheel.name.split("-")[1]
    assert all(fix["holds"] for fix in manifest["fixes"])


def test_every_process_of_the_plan_reports_its_fixes(deployed: Deployed) -> None:
    found = reports.read(deployed.service)
    assert list(reports.problems(found, deployed.plan)) == []
    files = inside(deployed, f"ls {render.REPORTS_DIR}").stdout.split()
    assert len(files) >= len(deployed.plan.processes)


def test_work_grows_with_what_the_server_computes(deployed: Deployed) -> None:
    before = deployed.service.work()
    headers = {"Authorization": f"Bearer {API_KEY}"}
    body = {"model": deployed.plan.served_name, "prompt": "One, two,", "max_tokens": 64, "ignore_eos": True}
    url = f"{deployed.service.base_url}/v1/completions"
    assert httpx.post(url, json=body, headers=headers, timeout=120, trust_env=False).status_code == httpx.codes.OK
    after = deployed.service.work()
    assert before is not None
    assert after is not None
    assert after.cpu_s > before.cpu_s + 0.1


def test_docker_calls_it_healthy(deployed: Deployed) -> None:
    deadline_s = time.monotonic() + 60
    while (health := deployed.service.state().health) == "starting" and time.monotonic() < deadline_s:
        time.sleep(1)
    assert health == "healthy"


def test_down_leaves_the_cache_and_nothing_else(deployed: Deployed) -> None:
    # Last in this file: the server is gone after it.
    deployed.service.stop()
    assert deployed.service.state().status == "absent"
    assert list(deployed.service.log()) == []
    assert deployed.service.work() is None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", deployed.plan.port))
    project = f"label=com.docker.compose.project={render.project_name(deployed.plan.profile)}"
    listed = ["docker", "ps", "--all", "--quiet", "--filter", project]
    assert subprocess.run(listed, capture_output=True, check=True).stdout == b""
    volumes = ["docker", "volume", "ls", "--quiet", "--filter", project]
    assert len(subprocess.run(volumes, capture_output=True, check=True).stdout.split()) == 1
    deployed.service.stop()


def test_the_file_works_by_hand_and_builds_its_image(deploy: Deployer, model_dir: Path) -> None:
    deployed = deploy("by-hand", model_dir)
    subprocess.run(["docker", "image", "rm", "--force", deployed.image], capture_output=True, check=True)
    by_hand = ["docker", "compose", "-f", str(deployed.state.compose_file)]
    subprocess.run([*by_hand, "up", "-d", "--wait"], capture_output=True, check=True, cwd="/")
    body = {"model": deployed.plan.served_name, "prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}
    answer = httpx.post(f"{deployed.service.base_url}/v1/completions", json=body, timeout=120, trust_env=False).json()
    assert "Paris" in answer["choices"][0]["text"]
    subprocess.run([*by_hand, "down"], capture_output=True, check=True)
    assert deployed.service.state().status == "absent"
