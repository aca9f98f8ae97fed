"""system reads this machine: kernel, memory, disk, ports, packages."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.host import system
from launcher.host.facts import Listener, Proc


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(1)
        yield sock.getsockname()[1]


def test_memory_and_cpus_are_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    found = system.proc()
    assert found.kernel == os.uname().release
    assert found.mem_total_gib is not None
    assert found.mem_available_gib is not None
    assert 0 < found.mem_available_gib <= found.mem_total_gib
    assert found.cpu_count is not None
    assert found.cpu_count >= 1
    assert found.locale == "de_DE.UTF-8"


@pytest.mark.parametrize(
    ("kernel", "is_wsl"),
    [
        ("6.6.87.2-microsoft-standard-WSL2", True),
        ("4.4.0-19041-Microsoft", True),
        ("6.8.0-60-generic", False),
        (None, False),
    ],
)
def test_wsl_is_told_by_its_kernel(kernel: str | None, is_wsl: bool) -> None:
    assert Proc(kernel=kernel).is_wsl is is_wsl


def test_a_folder_that_is_not_there_yet_counts_as_its_parent(tmp_path: Path) -> None:
    found = system.disk(tmp_path / "models" / "deep", tmp_path, tmp_path)
    assert found.models_free_gib is not None
    assert found.models_free_gib == pytest.approx(found.state_free_gib, abs=0.5)
    assert found.models_share_docker_disk is True


@pytest.mark.parametrize("images_dir", [None, Path("/no/such/folder")])
def test_an_unknown_image_folder_shares_an_unknown_disk(tmp_path: Path, images_dir: Path | None) -> None:
    assert system.disk(tmp_path, tmp_path, images_dir).models_share_docker_disk is None


def test_a_listener_is_named_by_its_process(listener: int) -> None:
    found = system.listeners([listener], {})
    assert list(found) == [str(listener)]
    assert found[str(listener)].pid == os.getpid()
    assert found[str(listener)].process


def test_a_listener_is_named_by_its_container(listener: int) -> None:
    assert system.listeners([listener], {listener: "graft-cpu-vllm-1"})[str(listener)].container == "graft-cpu-vllm-1"


def test_a_listener_on_every_address_takes_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as sock:
        sock.bind(("0.0.0.0", 0))
        sock.listen(1)
        assert str(sock.getsockname()[1]) in system.listeners([sock.getsockname()[1]], {})


def test_a_process_that_the_system_does_not_name_still_takes_the_port(
    listener: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    monkeypatch.setattr(psutil, "net_connections", lambda kind: [])
    assert system.listeners([listener], {}) == {str(listener): Listener()}


def test_a_free_port_is_not_in_use(listener: int) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        free = sock.getsockname()[1]
    assert str(free) not in system.listeners([free, listener], {})


def test_the_compiler_is_the_one_that_inductor_would_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert system.packages().cxx_compiler is False
    monkeypatch.setenv("CXX", sys.executable)
    assert system.packages().cxx_compiler is True


def test_a_library_that_does_not_load_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", refuse)
    assert system.packages().libnuma is False


@pytest.mark.parametrize("is_there", [True, False])
def test_pythons_headers_are_looked_for_where_the_compiler_would(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_there: bool
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    if is_there:
        (tmp_path / "Python.h").touch()
    found = system.packages()
    assert found.python_headers is is_there
    assert found.python == f"{sys.version_info.major}.{sys.version_info.minor}"
