"""A bundle on a machine without network: a network namespace with no route, and no launcher but the bundle's own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.bundle.layout import INSTALL_SCRIPT
from launcher.state import CHECKOUT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
MODEL = "smollm2-135m-instruct"
NO_ROUTE = "import socket; socket.create_connection(('192.0.2.1', 443), 3)"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def offline(tmp_path: Path) -> Run:
    """Run a program in a network namespace without a route, in an environment of its own."""
    possible = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    if possible.returncode != 0:
        if os.environ.get("CI") and os.geteuid() == 0:
            pytest.fail(f"no network namespace: {possible.stderr}")
        pytest.skip(f"no network namespace can be made: {possible.stderr.strip()}")
    environment = {"HOME": str(tmp_path / "home"), "PATH": os.defpath, "PIP_CONFIG_FILE": os.devnull}

    def run(*argv: str, **more: str) -> "subprocess.CompletedProcess[str]":
        command = ["unshare", "--net", *argv]
        return subprocess.run(command, env=environment | more, cwd="/", capture_output=True, text=True, check=False)

    return run


def test_a_bundle_is_installed_and_plans_without_network(model_dir: Path, tmp_path: Path, offline: Run) -> None:
    bundle, target = tmp_path / "carried here", tmp_path / "graft of mine"
    environment = {**os.environ, "GRAFT_STATE": str(tmp_path / "state"), "GRAFT_MODELS": str(model_dir.parent)}
    graft = [sys.executable, "-m", "launcher", "bundle", str(bundle), "--profile", "cpu", "--without-engine"]
    written = subprocess.run(graft, env=environment, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert written.returncode == 0, written.stdout + written.stderr
    assert "unreachable" in offline(sys.executable, "-c", NO_ROUTE).stderr

    installed = offline("sh", str(bundle / "install.sh"), str(target), PYTHON=sys.executable)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    assert "make up PROFILE=cpu" in installed.stdout
    theirs = str(target / ".venv" / "bin" / "graft")
    assert f"{MODEL}: 0.27 GB in {target}" in offline(theirs, "fetch", "--profile", "cpu").stdout
    planned = offline(theirs, "plan", "cpu")
    assert (planned.returncode, "Context: 4096 tokens." in planned.stdout) == (0, True), planned.stdout + planned.stderr
    # `make` finds the launcher installed, and does not ask for it again.
    assert offline("make", "--directory", str(target), "--question", "install").returncode == 0


def test_a_bundle_with_a_changed_wheel_installs_nothing(model_dir: Path, tmp_path: Path, offline: Run) -> None:
    bundle, target = tmp_path / "bundle", tmp_path / "target"
    (bundle / "wheels").mkdir(parents=True)
    (bundle / "wheels" / "a-1-py3-none-any.whl").write_bytes(b"changed")
    (bundle / "SHA256SUMS").write_text(f"{'0' * 64}  wheels/a-1-py3-none-any.whl\n")
    (bundle / "install.sh").write_text(INSTALL_SCRIPT)
    refused = offline("sh", str(bundle / "install.sh"), str(target))
    assert refused.returncode != 0
    assert "wheels/a-1-py3-none-any.whl: FAILED" in refused.stdout
    assert not target.exists()
