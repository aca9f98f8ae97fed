"""The rendered files of every shipped profile, as kept in tests/data/golden.

`python -m tests.launcher.golden` writes them again; read the difference before committing it.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher import render
from launcher.host.facts import Docker, Gpu, HostFacts, Nvml
from launcher.images.pins import load_pins
from launcher.plan import Plan, Runtime
from launcher.planner import Inputs, make
from launcher.profile import Profile, load_model, load_profile, profile_files

FOLDER = Path(__file__).parent.parent / "data" / "golden"
IMAGE = "graft-vllm:0.33.0-000000000000"
WHEEL = "vllm_graft-0.1.0-py3-none-any.whl"
RUN_ID = "0" * 16
NO_LOCK = Path("no-digests-recorded.json")


@dataclass(frozen=True)
class Variant:
    """One kind of machine that a profile is rendered for."""

    name: str
    docker: Docker
    runtime: Runtime = "docker"


NVIDIA = Variant("nvidia", Docker(flavor="docker", engine="28.2.2", api="1.50", runtimes=("nvidia", "runc")))
OLD_NVIDIA = Variant("nvidia-api-1.41", Docker(flavor="docker", engine="20.10.24", api="1.41", runtimes=("nvidia",)))
CDI = Variant("cdi", Docker(flavor="docker", engine="28.2.2", api="1.50", cdi_spec_dirs=("/etc/cdi",)))
PODMAN = Variant("podman", Docker(flavor="podman", engine="5.4.0", api="1.41", cdi_spec_dirs=("/etc/cdi",)))
ELSEWHERE = Variant("another-machine", Docker(error="no Docker Engine runs here"))
NO_GPU = Variant("no-gpu", Docker(flavor="docker", engine="20.10.24", api="1.41"))
HOST = Variant("host", Docker(error="no Docker Engine runs here"), runtime="host")


def variants(profile: Profile) -> tuple[Variant, ...]:
    """Return the machines that a profile is rendered for."""
    return (NO_GPU, HOST) if profile.gpu is None else (NVIDIA, CDI, PODMAN)


def plan_for(profile: Profile, variant: Variant) -> Plan:
    """Plan a shipped profile on a machine that it is made for, its cards idle."""
    facts = None if variant is ELSEWHERE else host_facts(profile, variant)
    inputs = Inputs(
        profile=profile,
        model=load_model(profile.model),
        pin=load_pins(lock=NO_LOCK).of(profile.vllm),
        facts=facts,
        runtime=variant.runtime,
    )
    plan = make(inputs).plan
    # The real one changes with each word of a reason.
    return plan.model_copy(update={"facts": {**plan.facts, "run_id": RUN_ID}})


def host_facts(profile: Profile, variant: Variant) -> HostFacts:
    """Return a machine with the profile's cards and the variant's Docker."""
    gpus = tuple(_gpu(profile, index) for index in range(profile.gpu.count if profile.gpu else 0))
    names = tuple(f"nvidia.com/gpu={gpu.uuid}" for gpu in gpus) if variant.docker.cdi_spec_dirs else ()
    docker = variant.docker.model_copy(update={"cdi_devices": names})
    return HostFacts(nvml=Nvml(driver="580.126.09", cuda_driver="13.0", gpus=gpus), docker=docker)


def surroundings(variant: Variant, **changed: object) -> render.Surroundings:
    """Return where the golden files say that things lie."""
    flavor = variant.docker.flavor or "docker"
    values = {
        "root": Path("/home/user/graft/.graft/golden"),
        "model_dir": Path("/home/user/graft/.graft/cache/models/golden"),
        "image": IMAGE,
        "wheel": WHEEL,
        "secrets": ("api_key",),
        "engine": flavor,
        "engine_api": variant.docker.api,
        "images": {name: pin.reference for name, pin in load_pins(lock=NO_LOCK).services.items()},
    }
    return render.Surroundings(**{**values, **changed})  # type: ignore[arg-type]


def golden() -> Iterator[tuple[str, str]]:
    """Yield path and text of every golden file."""
    for name in profile_files():
        profile = load_profile(name)
        for variant in variants(profile):
            files = render.run(plan_for(profile, variant), surroundings(variant))
            if "compose.yaml" in files:
                yield f"{name}/compose.{variant.name}.yaml", files["compose.yaml"]
            if variant in (NVIDIA, NO_GPU):
                yield f"{name}/entrypoint.sh", files["entrypoint.sh"]
                yield f"{name}/relay.json", files["gateway/relay.json"]
                yield f"{name}/facts.json", files["facts.json"]
            if variant is HOST:
                yield f"{name}/facts.host.json", files["facts.json"]
    profile = load_profile("rtx4090")
    yield "haproxy.cfg", render.run(plan_for(profile, NVIDIA), surroundings(NVIDIA))["gateway/haproxy.cfg"]
    for pin in load_pins(lock=NO_LOCK).pins:
        yield f"Dockerfile.{pin.vllm}", render.dockerfile(pin.image(), WHEEL)


def _gpu(profile: Profile, index: int) -> Gpu:
    assert profile.gpu is not None
    major, minor = profile.gpu.compute_capability.split(".")
    total_mib = (profile.gpu.min_memory_mib + profile.gpu.max_memory_mib) // 2
    return Gpu(
        index=index,
        uuid=f"GPU-00000000-0000-4000-8000-00000000000{index}",
        name="GPU of the golden files",
        compute_capability=(int(major), int(minor)),
        total_mib=total_mib,
        free_mib=total_mib,
    )


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    for path, text in golden():
        (FOLDER / path).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / path).write_text(text, encoding="utf-8")
