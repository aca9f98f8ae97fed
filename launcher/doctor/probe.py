"""The doctor's look at this machine and at a service: everything that it reads and asks. Prints nothing."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from launcher import circumstances, engine_env, service
from launcher.checks.demand import Demand
from launcher.diagnose import last_words
from launcher.doctor.facts import Copy, DoctorFacts, Hub, Limits, Running, Shm, Unknown
from launcher.host import nvml
from launcher.host.facts import HostFacts
from launcher.operate import p2p
from launcher.plan import Plan
from launcher.runtime import compose
from launcher.views import operating_lines
from launcher.weights import hub as model_hub

HUB_TIMEOUT_S = 3.0
CONTAINER_TIMEOUT_S = 60
_NO_LIMIT = 1 << 62
"""Control groups of version 1 write some such number where there is none."""
_GIB = 1 << 30


def look(plan: Plan, demand: Demand, facts: HostFacts) -> DoctorFacts:
    """Return everything that the doctor asks about one profile on this machine."""
    running = _running(plan.profile, facts)
    container = compose.container_of(plan.profile) if plan.runtime == "docker" and not facts.docker.error else None
    runs = running is not None and running.is_alive
    return DoctorFacts(
        host=facts,
        graft=version("graft-launcher"),
        python=sys.version.split()[0],
        clocks=nvml.clocks() if demand.needs_gpu else (),
        limits=limits_of(container) if container else limits(),
        shm=_shm(container) if plan.runtime == "docker" else _host_shm(),
        hub=hub(),
        container_gpus=_container_gpus(plan, demand, facts, runs),
        copies=_copies(plan, demand, facts, runs),
        running=running,
    )


def limits(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Limits | Unknown:
    """Return the tightest limits of this process's control group and those above it, of either version."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        return Unknown(f"{own}: {error.strerror}")
    paths = {names: path for _, names, path in (line.split(":", 2) for line in lines if line.count(":") >= 2)}
    if (root / "cgroup.controllers").is_file():
        group = paths.get("", "/")
        quota = [_quota(text) for text in _up(root, group, "cpu.max")]
        memory = [_number(text) for text in _up(root, group, "memory.max")]
        pids = [_number(text) for text in _up(root, group, "pids.max")]
    else:
        by_controller = {name: path for names, path in paths.items() for name in names.split(",")}
        memory = [
            _number(one) for one in _up(root / "memory", by_controller.get("memory", "/"), "memory.limit_in_bytes")
        ]
        pids = [_number(one) for one in _up(root / "pids", by_controller.get("pids", "/"), "pids.max")]
        quotas = _up(root / "cpu", by_controller.get("cpu", "/"), "cpu.cfs_quota_us")
        periods = _up(root / "cpu", by_controller.get("cpu", "/"), "cpu.cfs_period_us")
        quota = [_quota(f"{one} {two}") for one, two in zip(quotas, periods, strict=False)]
    memory_bytes = min((value for value in memory if value), default=None)
    return Limits(
        memory_gib=None if memory_bytes is None else round(memory_bytes / _GIB, 2),
        cpus=min((value for value in quota if value), default=None),
        pids=min((value for value in pids if value), default=None),
    )


def _up(root: Path, group: str, name: str) -> list[str]:
    """Return the texts of a file in a group and in those above it, inside what is mounted here."""
    folder = root / group.lstrip("/")
    found = []
    for place in (folder, *folder.parents):
        if not place.is_relative_to(root):
            break
        try:
            found.append((place / name).read_text(encoding="ascii").strip())
        except OSError:
            continue
    return found


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


def _quota(text: str) -> float | None:
    quota, _, period = text.partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def limits_of(container: Mapping[str, Any]) -> Limits:
    """Return the limits that Docker gave a container."""
    host = container.get("HostConfig") or {}
    memory, cpus, pids = host.get("Memory") or 0, host.get("NanoCpus") or 0, host.get("PidsLimit") or 0
    return Limits(
        memory_gib=round(memory / _GIB, 2) if memory else None,
        cpus=cpus / 1e9 if cpus else None,
        pids=pids if pids > 0 else None,
    )


def hub(timeout_s: float = HUB_TIMEOUT_S) -> Hub:
    """Ask the model hub for its front page; an answer that takes longer, name resolution included, counts as none."""
    endpoint = model_hub.endpoint()
    answers: list[Hub] = []
    # A thread, since no client bounds the time that resolving a name takes.
    asking = threading.Thread(target=lambda: answers.append(_ask_hub(endpoint, timeout_s)), daemon=True)
    asking.start()
    asking.join(timeout_s + 0.5)
    return answers[0] if answers else Hub(endpoint, f"no answer in {timeout_s:g} s")


def _ask_hub(endpoint: str, timeout_s: float) -> Hub:
    import httpx

    try:
        answer = httpx.head(endpoint, timeout=timeout_s)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return Hub(endpoint, " ".join(str(error).split()) or type(error).__name__)
    try:
        hub_s = parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return Hub(endpoint)
    return Hub(endpoint, clock_skew_s=time.time() - hub_s)


def _running(profile: str, facts: HostFacts) -> Running | None:
    found = service.status(profile, facts)
    if found is None:
        return None
    words = last_words(found.evidence) if found.evidence and found.has_failed and found.diagnosis is None else ()
    return Running(
        is_alive=found.state.status in ("created", "running", "restarting"),
        is_healthy=found.is_healthy,
        status=found.state.status,
        diagnosis=found.diagnosis,
        last_words=words,
        operating=tuple(operating_lines(found.operating, time.time())),
        fix_problems=found.fix_problems,
    )


def _host_shm() -> Shm | Unknown:
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        return Unknown(f"/dev/shm: {error.strerror}")
    return Shm(found.f_blocks * found.f_frsize / 2**20, found.f_bavail * found.f_frsize / 2**20)


def _shm(container: Mapping[str, Any] | None) -> Shm | Unknown:
    if container is None:
        return Unknown("the service has no container")
    size_mib = circumstances.container_facts(container)["shm_size_mib"]
    return Unknown("Docker does not say") if size_mib is None else Shm(size_mib)


def _container_gpus(plan: Plan, demand: Demand, facts: HostFacts, runs: bool) -> tuple[str, ...] | Unknown:
    if plan.runtime != "docker" or not demand.needs_gpu:
        return Unknown("the service runs in no container")
    argv = _inside(plan, facts, runs, ("nvidia-smi", "-L"), "nvidia-smi")
    if isinstance(argv, Unknown):
        return argv
    said = _said(argv)
    if isinstance(said, Unknown):
        return said
    return tuple(part.split(")")[0] for part in said.split("UUID: ")[1:])


def _copies(plan: Plan, demand: Demand, facts: HostFacts, runs: bool) -> tuple[Copy, ...] | Unknown:
    if demand.tensor_parallel_size < 2:
        return Unknown("one card is used")
    if facts.nvml.error is not None or len(facts.nvml.gpus) < 2:
        return Unknown("there are no two cards")
    if runs:
        return Unknown("the running service holds the cards' memory; stop it to have them compared")
    argv: tuple[str, ...] | Unknown
    if plan.runtime == "docker":
        argv = _inside(plan, facts, runs, ("-I", "/opt/graft/operate.pyz", "p2p"), "python3")
    elif engine_env.is_installed(engine_env.ENGINE):
        argv = (str(engine_env.ENGINE.python), str(Path(p2p.__file__)))
    else:
        argv = Unknown(f"{engine_env.ENGINE.folder.name} is not installed")
    if isinstance(argv, Unknown):
        return argv
    said = _said(argv)
    return said if isinstance(said, Unknown) else copies_from(said)


def copies_from(text: str) -> tuple[Copy, ...] | Unknown:
    """Return what `launcher.operate.p2p` printed."""
    try:
        document = json.loads(text.strip().splitlines()[-1])
        if "error" in document:
            return Unknown(str(document["error"]))
        return tuple(Copy(one["from"], one["to"], one["peer"], one["wrong"]) for one in document["pairs"])
    except (ValueError, KeyError, TypeError, IndexError):
        return Unknown(f"no answer that can be read: {text.strip()[:200]!r}")


def _inside(plan: Plan, facts: HostFacts, runs: bool, argv: tuple[str, ...], program: str) -> tuple[str, ...] | Unknown:
    """Return the command that runs a program with the service's GPUs: in its container, else in one of its image."""
    from launcher.images import build
    from launcher.render import project_name

    if facts.docker.engine is None:
        return Unknown("Docker does not answer")
    arguments = argv[1:] if argv[0] == program else argv
    if runs:
        return ("docker", "exec", project_name(plan.profile), program, *arguments)
    assert plan.image is not None
    image = build.tag(plan.image, build.build_wheel())
    if not build.is_there(image):
        return Unknown("there is no image of the service yet; `graft up` builds it")
    uuids = [gpu.uuid for gpu in plan.gpus]
    gpus = (
        tuple(part for uuid in uuids for part in ("--device", f"nvidia.com/gpu={uuid}"))
        if plan.gpu_mode == "cdi"
        else ("--gpus", f'"device={",".join(uuids)}"')
    )
    return ("docker", "run", "--rm", "--network", "none", *gpus, "--entrypoint", program, image, *arguments)


def _said(argv: tuple[str, ...]) -> str | Unknown:
    try:
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=CONTAINER_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Unknown(f"{argv[0]}: {error}")
    if ended.returncode != 0 and not ended.stdout.strip():
        lines = ended.stderr.strip().splitlines()
        return Unknown(f"`{' '.join(argv[:2])}` ended with {ended.returncode}: {lines[-1] if lines else 'no word'}")
    return ended.stdout
