"""Kernel, memory, disk, ports and system packages of this machine."""

import ctypes
import os
import shutil
import socket
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launcher.host.facts import Disk, Listener, Packages, Proc

_GIB = 1024**3


def proc() -> Proc:
    """Return the kernel, the memory, the CPUs that this process may use, and the locale of its environment."""
    import psutil

    memory = psutil.virtual_memory()
    return Proc(
        kernel=os.uname().release,
        mem_total_gib=_gib(memory.total),
        mem_available_gib=_gib(memory.available),
        swap_total_gib=_gib(psutil.swap_memory().total),
        cpu_count=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        locale=next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := os.environ.get(name))), None),
    )


def disk(models_dir: Path, state_dir: Path, images_dir: Path | None) -> Disk:
    """Return the free space where models and state go; a folder that is not there yet counts as its parent.

    Args:
        images_dir: where the local Docker Engine unpacks images; None where that is not known.
    """
    models = _existing(models_dir)
    return Disk(
        models_free_gib=free_gib(models),
        state_free_gib=free_gib(_existing(state_dir)),
        models_share_docker_disk=None if images_dir is None else _same_device(models, images_dir),
    )


def free_gib(path: Path) -> float | None:
    """Return the space that an unprivileged process may still write there, GiB; None where it cannot be read."""
    try:
        return _gib(shutil.disk_usage(path).free)
    except OSError:
        return None


def listeners(ports: Sequence[int], published: Mapping[int, str]) -> dict[str, Listener]:
    """Return the ports in use among `ports`, each with its process and its container where they are known.

    Args:
        published: container names by the host port that they publish.
    """
    used = [port for port in ports if not _can_bind(port)]
    by_port = dict(_listening(used)) if used else {}
    return {
        str(port): by_port.get(port, Listener()).model_copy(update={"container": published.get(port)}) for port in used
    }


def packages() -> Packages:
    """Return whether the system packages of the CPU engine are there."""
    try:
        ctypes.CDLL("libnuma.so.1")
        has_libnuma = True
    except OSError:
        has_libnuma = False
    # The same choice as torch._inductor.config.cpp.cxx makes.
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    return Packages(
        libnuma=has_libnuma,
        cxx_compiler=compiler is not None,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        # Virtual environments share the include folder of the Python that they are made from.
        python_headers=(Path(sysconfig.get_path("include")) / "Python.h").is_file(),
    )


def _can_bind(port: int) -> bool:
    """A listener on any address of this machine stands in the way of one on 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            # Linux lets sockets that do not listen share an address; the conflict shows here.
            probe.listen(1)
        except PermissionError:
            # A privileged port: whether someone listens there is not known by this.
            return True
        except OSError:
            return False
    return True


def _listening(ports: Sequence[int]) -> Iterator[tuple[int, Listener]]:
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return
    for connection in connections:
        # Sockets of other users have no pid here unless the caller is root.
        if connection.status == psutil.CONN_LISTEN and connection.pid and connection.laddr:
            port = connection.laddr.port
            if port in ports:
                yield port, Listener(process=_process_name(connection.pid), pid=connection.pid)


def _process_name(pid: int) -> str | None:
    import psutil

    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return None


def _existing(path: Path) -> Path:
    absolute = path.absolute()
    return next(candidate for candidate in (absolute, *absolute.parents) if candidate.exists())


def _same_device(one: Path, two: Path) -> bool | None:
    try:
        return one.stat().st_dev == two.stat().st_dev
    except OSError:
        return None


def _gib(size_bytes: int) -> float:
    return round(size_bytes / _GIB, 2)
