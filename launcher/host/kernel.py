"""The kernel's log, and the NVIDIA driver as the kernel and the libraries know it."""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

KMSG = Path("/dev/kmsg")
CGROUP = Path("/proc/self/cgroup")
MODULE_VERSION = Path("/proc/driver/nvidia/version")
LIBRARY_DIRS = (
    Path("/usr/lib/x86_64-linux-gnu"),
    Path("/usr/lib/aarch64-linux-gnu"),
    Path("/usr/lib64"),
    Path("/usr/lib"),
    Path("/usr/lib/wsl/lib"),
    Path("/run/opengl-driver/lib"),
)
_RECORD_BYTES = 8192
"""The kernel's own limit on one record (Documentation/ABI/testing/dev-kmsg)."""
_OOM_KILL = re.compile(r"oom-kill:.*\btask_memcg=(?P<group>[^,]*),task=.*,pid=(?P<pid>\d+)")
_KILLED = re.compile(r"\bKilled process (?P<pid>\d+) ")
"""Linux, mm/oom_kill.c: the summary of a kill (since 5.0), and the message that follows it."""
_CONTAINER_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
"""In the name of a container's control group, whatever made it: docker/ID, docker-ID.scope, libpod-ID.scope."""


def log(since_s: float | None = None, device: Path = KMSG) -> str | None:
    """Return the kernel's messages; None where this user may not read them.

    Args:
        since_s: leave out what was logged before, seconds since the epoch.
    """
    try:
        descriptor = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    # The records carry the time since boot.
    boot_s = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    earliest_us = 0.0 if since_s is None else (since_s - boot_s) * 1e6
    try:
        return "\n".join(message for at_us, message in _records(descriptor) if at_us >= earliest_us)
    except PermissionError:
        return None
    finally:
        os.close(descriptor)


def own_log(since_s: float | None = None, device: Path = KMSG, cgroup: Path = CGROUP) -> str | None:
    """Return the kernel's messages without those of kills for memory in other control groups than this process's.

    A server in a container of this machine is killed under a name like ours. Within a container our own group has no
    name that the kernel's log has; there the group's own count of kills tells.
    """
    found, group = log(since_s, device), _memory_group(cgroup)
    return found if found is None or group is None else _without_kills(found, lambda other: other != group)


def log_of(container: str | None, since_s: float | None = None, device: Path = KMSG) -> str | None:
    """Return the kernel's messages without those of kills for memory in other containers than one.

    Args:
        container: its Id; None: the server is in none.
    """

    def is_anothers(group: str) -> bool:
        found = _CONTAINER_ID.search(group)
        return found is not None and found[0] != container

    found = log(since_s, device)
    return None if found is None else _without_kills(found, is_anothers)


def _without_kills(log: str, is_anothers: Callable[[str], bool]) -> str:
    others = {kill["pid"] for kill in _OOM_KILL.finditer(log) if is_anothers(kill["group"])}
    return "\n".join(
        line for line in log.split("\n") if (killed := _KILLED.search(line)) is None or killed["pid"] not in others
    )


def _memory_group(cgroup: Path) -> str | None:
    """Return the control group that counts this process's memory; None where the kernel does not say."""
    try:
        lines = [line.split(":", 2) for line in cgroup.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    # Version 1 names its controllers; the one line of version 2 names none.
    by_controller = {name: group for _, names, group in lines for name in names.split(",")}
    return by_controller.get("memory", by_controller.get(""))


def _records(descriptor: int) -> Iterator[tuple[int, str]]:
    """Yield time (microseconds since boot) and text of each record: `priority,number,time,flags;text`."""
    while True:
        try:
            record = os.read(descriptor, _RECORD_BYTES)
        except BlockingIOError:
            return
        except BrokenPipeError:
            # Overwritten before it was read; the next read goes on with the oldest that is left.
            continue
        if not record:
            return
        head, _, text = record.decode("utf-8", errors="replace").partition(";")
        fields = head.split(",")
        if len(fields) >= 3 and fields[2].isdigit():
            yield int(fields[2]), text.partition("\n")[0]


def module_version(path: Path = MODULE_VERSION) -> str | None:
    """Return the version of the NVIDIA driver that the kernel has loaded."""
    try:
        found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]*\d)", path.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[1] if found else None


def library_version(folders: Sequence[Path] = LIBRARY_DIRS) -> str | None:
    """Return the version in the file name of the NVML library, where there is exactly one such file."""
    versions = {
        path.name.removeprefix("libnvidia-ml.so.")
        for folder in folders
        for path in folder.glob("libnvidia-ml.so.*.*")
        if path.name.removeprefix("libnvidia-ml.so.").replace(".", "").isdigit()
    }
    return versions.pop() if len(versions) == 1 else None
