"""The files of a service's folder, as they are written."""

import os
import stat
from pathlib import Path

import pytest

from launcher.host.facts import Docker
from launcher.profile import load_profile
from launcher.service_files import service_files, store_secret, write
from launcher.state import ServiceState
from tests.launcher.golden import HOST, NO_GPU, NVIDIA, plan_for


@pytest.fixture
def state(tmp_path: Path) -> ServiceState:
    return ServiceState(tmp_path / "state" / "cpu")


def test_docker_gets_the_compose_file_and_what_its_image_is_built_from(state: ServiceState) -> None:
    files = service_files(plan_for(load_profile("cpu"), NO_GPU), state, state.root.parent / "model", NO_GPU.docker)
    wheels = [name for name in files if name.endswith(".whl")]
    assert len(wheels) == 1
    watching = [name for name in files if name.startswith("monitoring/")]
    assert sorted(set(files) - {*wheels, *watching}) == [
        "compose.yaml",
        "entrypoint.sh",
        "facts.json",
        "gateway/haproxy.cfg",
        "gateway/relay.json",
        "image/Dockerfile",
        "image/manifest.py",
        "image/operate.pyz",
        "keep.json",
        "plan.json",
        "watch.json",
    ]
    assert wheels[0].removeprefix("image/").encode() in files["image/Dockerfile"]


def test_the_host_runtime_gets_no_image(state: ServiceState) -> None:
    files = service_files(plan_for(load_profile("cpu"), HOST), state, state.root.parent / "model")
    assert not any(name.startswith(("image/", "compose")) for name in files)


def test_the_engine_decides_what_the_compose_file_may_use(state: ServiceState) -> None:
    plan, model = plan_for(load_profile("rtx4090"), NVIDIA), state.root.parent / "model"
    assert b"start_interval" in service_files(plan, state, model, NVIDIA.docker)["compose.yaml"]
    assert b"start_interval" not in service_files(plan, state, model)["compose.yaml"]
    podman = Docker(flavor="podman", api="1.41")
    assert b"label=disable" in service_files(plan, state, model, podman)["compose.yaml"]


def test_files_can_be_read_by_the_containers_user_whatever_the_umask(state: ServiceState) -> None:
    before = os.umask(0o077)
    try:
        write(state.root, {"entrypoint.sh": b"one", "image/Dockerfile": b"two"})
    finally:
        os.umask(before)
    written = sorted(path.relative_to(state.root).as_posix() for path in state.root.rglob("*") if path.is_file())
    assert written == ["entrypoint.sh", "image/Dockerfile"]
    assert all(stat.S_IMODE((state.root / name).stat().st_mode) == 0o644 for name in written)


def test_the_wheel_of_an_earlier_rendering_goes(state: ServiceState) -> None:
    write(state.root, {"image/vllm_graft-0.1.0-py3-none-any.whl": b"old"})
    write(state.root, {"image/vllm_graft-0.2.0-py3-none-any.whl": b"new"})
    assert [path.name for path in (state.root / "image").iterdir()] == ["vllm_graft-0.2.0-py3-none-any.whl"]


def test_a_secret_is_a_file_that_others_on_this_machine_cannot_reach(state: ServiceState) -> None:
    store_secret(state, "api_key", "the-first-key")
    store_secret(state, "api_key", "the-second-key")
    path = state.secrets_dir / "api_key"
    assert path.read_text(encoding="utf-8") == "the-second-key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert stat.S_IMODE(state.secrets_dir.stat().st_mode) == 0o700
    files = service_files(plan_for(load_profile("cpu"), NO_GPU), state, state.root.parent / "model")
    assert b"file: ./secrets/api_key" in files["compose.yaml"]
    assert not any(b"the-second-key" in content for content in files.values())


def test_an_unknown_secret_is_refused(state: ServiceState) -> None:
    with pytest.raises(ValueError, match="password: no such secret; there are api_key"):
        store_secret(state, "password", "x")
