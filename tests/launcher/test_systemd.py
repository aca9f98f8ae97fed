"""The systemd unit: starts and stops by graft, restarts nothing, and keeps where things lie."""

import shutil
import subprocess
from pathlib import Path

import pytest

from launcher.systemd import unit_of
from tests.launcher.test_cli_planning import Graft, graft

__all__ = ["graft"]


def test_a_unit_starts_and_stops_the_service() -> None:
    unit = unit_of("rtx4090", "/opt/graft/.venv/bin/graft", {"GRAFT_STATE": "/data/my graft%1", "HF_TOKEN": "t"}, None)
    lines = unit.splitlines()
    assert "ExecStart=/opt/graft/.venv/bin/graft up --profile rtx4090" in lines
    assert "ExecStop=/opt/graft/.venv/bin/graft down --profile rtx4090" in lines
    assert 'Environment="GRAFT_STATE=/data/my graft%%1"' in lines
    assert "WantedBy=default.target" in lines
    assert not any(line.startswith(("Restart=", "User=")) for line in lines)
    assert "HF_TOKEN" not in unit


def test_a_unit_of_the_system_names_its_user() -> None:
    lines = unit_of("cpu", "/bin/graft", {}, "alice").splitlines()
    assert "User=alice" in lines
    assert "WantedBy=multi-user.target" in lines


def test_a_unit_is_printed_alone_so_that_it_can_be_saved(graft: Graft) -> None:
    ended = graft("systemd", "cpu")
    assert ended.out.startswith("[Unit]\nDescription=Graft: cpu\n")
    assert "systemctl --user enable --now graft-cpu.service" in ended.err or "enable --now" in ended.err


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze on PATH")
    unit = tmp_path / "graft-cpu.service"
    unit.write_text(unit_of("cpu", "/bin/true", {"GRAFT_STATE": "/tmp/a b"}, None), encoding="utf-8")
    done = subprocess.run([program, "verify", str(unit)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
