"""What an image must be before it is released, checked on the stand-in base that the bake file builds on."""

import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher import render
from launcher.images import lock
from launcher.images.build import build_context
from launcher.state import CHECKOUT
from tests.compose.conftest import Deployer
from tests.compose.standin import Standin

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

BAKE = CHECKOUT / "images" / "docker-bake.hcl"
SECRET = re.compile(
    rb"hf_[A-Za-z0-9]{30,}|ghp_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16}|-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----"
    rb"|xox[baprs]-[A-Za-z0-9-]{10,}"
)
SECRET_NAMES = re.compile(r"(^|/)(\.netrc|\.pypirc|\.npmrc|id_rsa|id_ed25519|\.docker/config\.json|\.env|pip\.conf)$")


def docker(*arguments: str, check: bool = True, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, check=False, env={**os.environ, **(environment or {})}
    )
    assert done.returncode == 0 or not check, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@dataclass(frozen=True)
class Baked:
    """The image that the bake file made of the stand-in."""

    reference: str
    context: Path
    base: str

    @property
    def config(self) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(docker("image", "inspect", self.reference))
        return found[0]


@pytest.fixture(scope="module")
def baked(base: Standin, deploy: Deployer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baked]:
    folder = tmp_path_factory.mktemp("bake")
    context = folder / "0.32.0"
    context.mkdir()
    for name, content in build_context(deploy.pin.image()).items():
        (context / name).write_bytes(content)
    environment = {"CONTEXT": str(folder), "CPU_BASE": base.reference, "REPOSITORY": "graft-test/baked"}
    docker("buildx", "bake", "--file", str(BAKE), "--load", "cpu", environment=environment)
    yield Baked("graft-test/baked:dev-cpu", context, base.reference)
    docker("image", "rm", "--force", "graft-test/baked:dev-cpu")


@pytest.fixture(scope="module")
def added(baked: Baked, base: Standin) -> dict[str, bytes]:
    """Return every file of the layers that the build put on top of the base."""
    below = len(json.loads(docker("image", "inspect", base.reference))[0]["RootFS"]["Layers"])
    with subprocess.Popen(["docker", "save", baked.reference], stdout=subprocess.PIPE) as save:
        assert save.stdout is not None
        files: dict[str, bytes] = {}
        layers: dict[str, dict[str, bytes]] = {}
        order: list[str] = []
        with tarfile.open(fileobj=save.stdout, mode="r|") as archive:
            for entry in archive:
                stream = archive.extractfile(entry)
                if stream is None:
                    continue
                if entry.name == "manifest.json":
                    order = json.load(stream)[0]["Layers"]
                elif entry.name.endswith("layer.tar") and entry.size < 1 << 28:
                    layers[entry.name] = _files(stream.read())
    for name in order[below:]:
        files |= layers[name]
    assert "opt/graft/manifest.json" in files
    return files


def _files(layer: bytes) -> dict[str, bytes]:
    found = {}
    with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
        for entry in archive:
            stream = archive.extractfile(entry) if entry.isfile() else None
            if stream is not None:
                found[entry.name] = stream.read()
    return found


def test_the_user_is_not_root(baked: Baked) -> None:
    assert baked.config["Config"]["User"] == render.USER
    said = docker("run", "--rm", "--network", "none", "--entrypoint", "id", baked.reference, "-u")
    assert said.strip() == "2000"


def test_it_says_what_it_is(baked: Baked) -> None:
    labels = baked.config["Config"]["Labels"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.version"] == "dev-vllm0.32.0"
    assert labels["org.opencontainers.image.base.name"] == baked.base


def test_no_layer_holds_a_secret(baked: Baked, added: dict[str, bytes]) -> None:
    assert [name for name in added if SECRET_NAMES.search(name)] == []
    assert [name for name, content in added.items() if SECRET.search(content)] == []
    text = json.dumps(baked.config) + docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", baked.reference)
    assert SECRET.search(text.encode()) is None
    variables = [one.partition("=")[0] for one in baked.config["Config"]["Env"]]
    assert [name for name in variables if re.search("TOKEN|KEY|SECRET|PASSWORD", name)] == []


def test_a_planted_secret_would_be_found() -> None:
    planted = f"token = hf_{'a' * 34}".encode()
    assert SECRET.search(planted)
    assert SECRET_NAMES.search("root/.netrc")


def test_a_build_leaves_nothing_but_the_package_and_what_proves_it(added: dict[str, bytes]) -> None:
    folders = {
        re.sub(r"^(opt/graft|usr/local/lib/python[\d.]+/dist-packages/vllm_graft).*", r"\1", name) for name in added
    }
    assert {folder for folder in folders if not folder.endswith("dist-packages/vllm_graft")} <= {"opt/graft", "tmp"}


def test_the_entrypoint_is_the_bases(baked: Baked) -> None:
    assert baked.config["Config"]["Entrypoint"] == ["vllm", "serve"]


def test_every_fix_is_proven_inside(baked: Baked, added: dict[str, bytes]) -> None:
    manifest = json.loads(added["opt/graft/manifest.json"])
    assert {fix["outcome"] for fix in manifest["fixes"]} == {"applied"}
    said = docker(
        "run", "--rm", "--read-only", "--tmpfs", "/tmp", "--env", "HOME=/tmp", "--cap-drop", "ALL", "--network", "none",
        "--entrypoint", "python3", baked.reference, "-m", "vllm_graft", "prove", "--json",
    )  # fmt: skip
    proofs = json.loads(said)["fixes"]
    assert [(one["id"], one["fingerprint"]) for one in proofs] == [
        (one["id"], one["fingerprint"]) for one in manifest["fixes"]
    ]
    assert all(one["holds"] for one in proofs)


def test_the_manifest_says_what_the_lock_says(
    added: dict[str, bytes], baked: Baked, deploy: Deployer, tmp_path: Path
) -> None:
    manifest = json.loads(added["opt/graft/manifest.json"])
    plan = deploy("release-lock", tmp_path).plan
    locked = lock.of(plan, tmp_path)
    assert manifest["base"] == locked.base == baked.base
    assert manifest["wheel"]["sha256"] == locked.wheel_sha256
    assert {fix["id"]: fix["fingerprint"] for fix in manifest["fixes"]} == locked.fixes
    assert manifest["versions"]["vllm"].partition("+")[0] == locked.vllm
    wheel = next(baked.context.glob("*.whl"))
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == locked.wheel_sha256


def test_the_rendered_service_has_a_health_check(deploy: Deployer, tmp_path: Path) -> None:
    document = yaml.safe_load(deploy("release-health", tmp_path).state.compose_file.read_text(encoding="utf-8"))
    check = document["services"][render.SERVICE]["healthcheck"]
    assert check["test"][:2] == ["CMD", "curl"]
    assert check["test"][-1].endswith("/health")


def test_the_entrypoint_becomes_the_server_with_nothing_to_write_to_and_no_network(
    baked: Baked, deploy: Deployer, tmp_path: Path
) -> None:
    root = deploy("release-entrypoint", tmp_path).state.root
    name = "graft-test-release"
    docker(
        "run", "--detach", "--name", name, "--read-only", "--cap-drop", "ALL", "--network", "none",
        "--security-opt", "no-new-privileges:true", "--tmpfs", "/tmp:exec,mode=1777", "--env", "HOME=/tmp",
        "--volume", f"{root}/entrypoint.sh:{render.ENTRYPOINT_FILE}:ro",
        "--entrypoint", "/bin/sh", baked.reference, render.ENTRYPOINT_FILE,
    )  # fmt: skip
    try:
        deadline_s = time.monotonic() + 30
        while "graft: exec vllm serve" not in docker("logs", name) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        assert docker("logs", name).startswith("graft: exec vllm serve /models/")
        # Executed, not called: the shell is gone, and the first process is the server.
        while "vllm" not in (line := docker("exec", name, "cat", "/proc/1/cmdline", check=False)):
            assert time.monotonic() < deadline_s, line
            time.sleep(0.2)
        assert "entrypoint.sh" not in line
    finally:
        docker("rm", "--force", name)


def test_equal_inputs_give_equal_files(baked: Baked, added: dict[str, bytes]) -> None:
    again = "graft-test/baked:again"
    docker("build", "--no-cache", "--build-arg", f"BASE={baked.base}", "--tag", again, str(baked.context))
    try:
        sums = "find /opt/graft /usr/local/lib/python3*/dist-packages/vllm_graft* -type f -exec sha256sum {} +"
        lines = docker("run", "--rm", "--network", "none", "--entrypoint", "sh", again, "-c", sums).splitlines()
        found = {path.lstrip("/"): digest for digest, path in (line.split(maxsplit=1) for line in lines)}
        here = {name: hashlib.sha256(content).hexdigest() for name, content in added.items() if name in found}
        assert here == found
        assert any(name.endswith(".pyc") for name in found)
    finally:
        docker("image", "rm", "--force", again)
