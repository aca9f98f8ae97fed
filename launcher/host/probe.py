"""Everything that the launcher asks this machine, in one call."""

from collections.abc import Sequence
from pathlib import Path

from launcher.host import docker, nvml, system
from launcher.host.facts import HostFacts


def probe(ports: Sequence[int], models_dir: Path, state_dir: Path) -> HostFacts:
    """Return the facts of this machine; what cannot be read is None or an error inside them, never an exception.

    Args:
        ports: TCP ports that a start would use.
        models_dir: where models are kept; it need not exist.
        state_dir: where the launcher keeps its state; it need not exist.
    """
    engine = docker.read()
    images_dir = Path(engine.docker.root_dir) if engine.is_local and engine.docker.root_dir else None
    return HostFacts(
        nvml=nvml.read(),
        docker=engine.docker,
        proc=system.proc(),
        disk=system.disk(models_dir, state_dir, images_dir),
        packages=system.packages(),
        ports=system.listeners(ports, engine.published),
    )
