"""What is rendered: golden files, the Compose Specification, and what a service must never be without."""

import json
import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher import render
from launcher.plan import EnvironmentVariable, Flag, Plan
from launcher.profile import load_profile, profile_files
from launcher.templates import template
from tests.launcher.golden import (
    CDI,
    ELSEWHERE,
    FOLDER,
    HOST,
    NO_GPU,
    NVIDIA,
    OLD_NVIDIA,
    PODMAN,
    Variant,
    golden,
    plan_for,
    surroundings,
    variants,
)

SCHEMA = Path(__file__).parent.parent / "data" / "compose-spec" / "compose-spec.json"
GOLDEN = dict(golden())
COMPOSE_FILES = sorted(path for path in GOLDEN if "/compose." in path)


def rendered(profile: str = "rtx4090", variant: Variant = NVIDIA, **changed: object) -> dict[str, str]:
    return render.run(plan_for(load_profile(profile), variant), surroundings(variant, **changed))


def document(profile: str = "rtx4090", variant: Variant = NVIDIA, **changed: object) -> dict[str, Any]:
    loaded = yaml.safe_load(rendered(profile, variant, **changed)["compose.yaml"])
    assert isinstance(loaded, dict)
    return loaded


def server(profile: str = "rtx4090", variant: Variant = NVIDIA, **changed: object) -> dict[str, Any]:
    service = document(profile, variant, **changed)["services"]["vllm"]
    assert isinstance(service, dict)
    return service


@pytest.mark.parametrize("path", GOLDEN)
def test_a_rendered_file_is_the_golden_one(path: str) -> None:
    assert GOLDEN[path] == (FOLDER / path).read_text(encoding="utf-8"), "python -m tests.launcher.golden writes it anew"


def test_no_golden_file_is_left_over() -> None:
    assert sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file()) == sorted(GOLDEN)


@pytest.mark.parametrize("path", COMPOSE_FILES)
def test_a_compose_file_follows_the_specification(path: str) -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft7Validator(schema).validate(yaml.safe_load(GOLDEN[path]))


@pytest.mark.skipif(
    subprocess.run(["sh", "-c", "docker compose version"], capture_output=True).returncode != 0,
    reason="docker compose is not installed",
)
@pytest.mark.parametrize("path", COMPOSE_FILES)
def test_compose_takes_the_file(path: str, tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text(GOLDEN[path], encoding="utf-8")
    project = ["docker", "compose", "--file", str(tmp_path / "compose.yaml"), "--profile", "monitoring"]
    argv = [*project, "config", "--quiet"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("profile", profile_files())
def test_the_same_plan_gives_the_same_bytes(profile: str) -> None:
    variant = variants(load_profile(profile))[0]
    assert rendered(profile, variant) == rendered(profile, variant)


def test_the_plan_can_be_read_back_from_its_file() -> None:
    plan = plan_for(load_profile("rtx4090"), NVIDIA)
    text = render.run(plan, surroundings(NVIDIA))["plan.json"]
    assert Plan.model_validate_json(text).model_dump_json() == plan.model_dump_json()


def test_the_host_runtime_gets_no_file_of_a_container() -> None:
    plan = plan_for(load_profile("cpu"), HOST)
    assert {path.partition("/")[0] for path in render.run(plan)} == {"facts.json", "monitoring", "plan.json"}


def test_a_plan_for_docker_needs_its_surroundings() -> None:
    with pytest.raises(ValueError, match="name the folders around them"):
        render.run(plan_for(load_profile("cpu"), NO_GPU))


@pytest.mark.parametrize("path", COMPOSE_FILES)
def test_a_service_is_closed_to_its_host(path: str) -> None:
    services = yaml.safe_load(GOLDEN[path])["services"]
    vllm = services["vllm"]
    assert vllm["user"] == "2000:0"
    assert "ports" not in vllm
    assert vllm["networks"] == ["inside"]
    assert [port["host_ip"] for port in services["gateway"]["ports"]] == ["127.0.0.1"]
    assert vllm["restart"] == "on-failure:3"
    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert not service.get("privileged")
    binds = [mount for mount in vllm["volumes"] if mount["type"] == "bind"]
    assert len(binds) == 5
    assert all(mount["bind"] == {"create_host_path": False} for mount in binds)
    assert [mount["target"] for mount in binds if not mount.get("read_only")] == ["/run/graft-operate"]


def test_everything_that_the_server_writes_lies_in_the_cache_volume() -> None:
    environment = server()["environment"]
    assert {environment[name] for name in render.CACHES} == set(render.CACHES.values())
    assert all(value == "/cache" or value.startswith("/cache/") for value in render.CACHES.values())


def test_cards_are_asked_for_by_uuid() -> None:
    devices = server("rtx4090-x2")["deploy"]["resources"]["reservations"]["devices"]
    uuids = [f"GPU-00000000-0000-4000-8000-00000000000{index}" for index in (0, 1)]
    assert devices == [{"driver": "nvidia", "device_ids": uuids, "capabilities": ["gpu"]}]
    for variant in (CDI, PODMAN):
        service = server("rtx4090-x2", variant)
        assert service["devices"] == [f"nvidia.com/gpu={uuid}" for uuid in uuids]
        assert "deploy" not in service


def test_a_machine_that_is_not_here_gets_as_many_cards_as_the_plan_needs() -> None:
    devices = server("rtx4090-x2", ELSEWHERE)["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}]


@pytest.mark.parametrize(
    ("variant", "expected"),
    [(NVIDIA, "5s"), (OLD_NVIDIA, None), (ELSEWHERE, None), (PODMAN, None)],
    ids=lambda value: getattr(value, "name", value),
)
def test_start_interval_is_left_to_engines_that_know_it(variant: Variant, expected: str | None) -> None:
    assert server(variant=variant)["healthcheck"].get("start_interval") == expected


def test_secrets_are_files_and_only_those_that_are_there() -> None:
    with_key = document(secrets=("api_key",))
    assert with_key["services"]["vllm"]["secrets"] == ["api_key"]
    assert with_key["secrets"]["api_key"] == {"file": "./secrets/api_key"}
    without = document(secrets=())
    assert "api_key" not in without["secrets"]
    assert "secrets" not in without["services"]["vllm"]


def test_a_model_outside_of_the_state_folder_is_named_by_its_whole_path() -> None:
    volumes = server(model_dir=Path("/srv/models/qwen"))["volumes"]
    assert volumes[0]["source"] == "/srv/models/qwen"
    assert server()["volumes"][0]["source"] == "../cache/models/golden"


def test_the_cache_is_another_one_for_another_image_card_or_set_of_fixes() -> None:
    plan, around = plan_for(load_profile("rtx4090"), NVIDIA), surroundings(NVIDIA)
    older = tuple(gpu.model_copy(update={"compute_capability": (8, 6)}) for gpu in plan.gpus)
    keys = {
        render.cache_key(plan, around),
        render.cache_key(plan, replace(around, image="graft-vllm:0.33.0-111111111111")),
        render.cache_key(plan.model_copy(update={"gpus": older}), around),
        render.cache_key(plan.model_copy(update={"disabled_fixes": ("some-fix",)}), around),
    }
    assert len(keys) == 4
    moved = replace(around, root=Path("/elsewhere/golden"))
    assert render.cache_key(plan, moved) in keys


def test_required_and_disabled_fixes_reach_the_server() -> None:
    plan = plan_for(load_profile("cpu"), NO_GPU).model_copy(
        update={"required_fixes": ("one", "two"), "disabled_fixes": ("three",)}
    )
    environment = render.compose_file(plan, surroundings(NO_GPU)).services["vllm"].environment
    assert environment["GRAFT_REQUIRE"] == "one,two"
    assert environment["GRAFT_DISABLE"] == "three"
    assert environment["GRAFT_FACTS"] == "/run/graft/facts.json"


def test_a_dollar_sign_is_no_variable_of_compose() -> None:
    price = EnvironmentVariable(name="PRICE", value="$5 ${HOME}", reason="a test")
    plan = plan_for(load_profile("cpu"), NO_GPU).model_copy(update={"environment": (price,)})
    text = render.run(plan, surroundings(NO_GPU))["compose.yaml"]
    assert yaml.safe_load(text)["services"]["vllm"]["environment"]["PRICE"] == "$$5 $${HOME}"


def test_the_build_context_holds_nothing_of_the_service_but_the_image() -> None:
    assert server()["build"] == {"context": "./image"}
    assert sorted(path for path in rendered() if path.startswith("image/")) == ["image/Dockerfile", "image/manifest.py"]


@pytest.fixture(scope="module")
def stub_vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for PATH whose `vllm` prints its arguments, each after a NUL."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "vllm").write_text("#!/bin/sh\nprintf '\\0%s' \"$@\"\n", encoding="utf-8")
    (folder / "vllm").chmod(0o755)
    return folder


argument = st.text(
    st.characters(exclude_characters="\0", categories=("L", "N", "P", "S", "Z", "Cc")), min_size=1, max_size=12
)


@given(values=st.lists(argument, max_size=4))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_entrypoint_hands_every_argument_on_unchanged(stub_vllm: Path, values: list[str]) -> None:
    flags = tuple(Flag(name="--flag", value=value, reason="a test", source="a test") for value in values)
    plan = plan_for(load_profile("cpu"), NO_GPU).model_copy(update={"flags": flags})
    script = render.entrypoint(plan, "heading")
    environment = {"PATH": f"{stub_vllm}{os.pathsep}{os.defpath}", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, check=True)
    line, *arguments = done.stdout.decode("utf-8").split("\0")
    assert arguments == ["serve", f"/models/{plan.model}", "--host", "0.0.0.0", "--port", "8000", *plan.argv()]
    assert line.startswith("graft: exec vllm serve /models/")
    assert shlex.split(line)[2:] == ["vllm", *arguments]


def test_the_templates_refuse_a_value_that_is_missing() -> None:
    with pytest.raises(jinja2.UndefinedError, match="'heading' is undefined"):
        template("compose/entrypoint.sh.j2").render()
