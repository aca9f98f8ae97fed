"""The files of a service's folder: gathered for rendering, and written so that the container's user can read them."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from launcher import render
from launcher.gateway.services import IMAGE as EDGE_IMAGE
from launcher.host.facts import Docker
from launcher.images.pins import load_pins
from launcher.monitoring.services import PASSWORD
from launcher.plan import Plan
from launcher.state import ServiceState
from launcher.watching.services import WEBHOOK


def service_files(plan: Plan, state: ServiceState, model_dir: Path, docker: Docker | None = None) -> dict[str, bytes]:
    """Return every file by its path in the service's folder; for Docker the wheel that the image is built from too.

    Args:
        docker: the engine that the files are for; None: unknown, only what every engine knows is used.
    """
    if plan.runtime == "host" or plan.image is None:
        return _encoded(render.run(plan))
    # Imported late: the host runtime has no use for the parts that build an image.
    from launcher.images import operate
    from launcher.images.build import build_wheel, kept_name, tag

    wheel = build_wheel()
    around = render.Surroundings(
        root=state.root,
        model_dir=model_dir,
        image=tag(plan.image, wheel),
        wheel=wheel.name,
        secrets=tuple(name for name in render.SECRETS if (state.secrets_dir / name).is_file()),
        engine=docker.flavor or "docker" if docker else "docker",
        engine_api=docker.api if docker else None,
        has_webhook=(state.secrets_dir / WEBHOOK).is_file(),
        images={
            name: kept_name(pin.reference) if name == EDGE_IMAGE else pin.reference
            for name, pin in load_pins().services.items()
        },
    )
    built_from = {f"image/{wheel.name}": wheel.content, f"image/{operate.NAME}": operate.operate_zip()}
    return {**_encoded(render.run(plan, around)), **built_from}


def write(root: Path, files: Mapping[str, bytes]) -> None:
    """Write the files, each as a whole or not at all; wheels of earlier renderings go."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in tuple(Path(name).parents)[:-1]:
            # Some are mounted as a whole.
            (root / folder).chmod(0o755)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(content)
        # Whatever the umask: the container's user is none of this machine's.
        partial.chmod(0o644)
        partial.replace(path)
    for wheel in (root / "image").glob("*.whl"):
        if f"image/{wheel.name}" not in files:
            wheel.unlink()


def store_secret(state: ServiceState, name: str, value: str) -> None:
    """Keep a secret of `render.SECRETS` for the service: readable inside the container, on this machine by its owner.

    Compose mounts the file with the mode that it has here, and the folder keeps others out.
    """
    if name not in (*render.SECRETS, PASSWORD):
        raise ValueError(f"{name}: no such secret; there are {', '.join((*render.SECRETS, PASSWORD))}")
    state.secrets_dir.mkdir(parents=True, exist_ok=True)
    state.secrets_dir.chmod(0o700)
    path = state.secrets_dir / name
    partial = path.with_name(f".{name}.partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(value)
    partial.chmod(0o444)
    partial.replace(path)


def ensure_password(state: ServiceState) -> Path:
    """Return the file of Grafana's password, made with a new one where there is none."""
    path = state.secrets_dir / PASSWORD
    if not path.is_file():
        store_secret(state, PASSWORD, secrets.token_urlsafe(18))
    return path


def _encoded(files: Mapping[str, str]) -> dict[str, bytes]:
    return {name: text.encode() for name, text in files.items()}
