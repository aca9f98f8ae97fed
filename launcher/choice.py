"""The vLLM release that an upgrade or a rollback left a service with; it goes before the profile's."""

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from launcher.errors import UsageError
from launcher.state import ServiceState


class Choice(BaseModel):
    """What is written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vllm: str


def chosen_vllm(state: ServiceState) -> str | None:
    """Return the chosen release; None: the profile's.

    Raises:
        UsageError: the file is not one of this launcher.
    """
    path = choice_file(state)
    try:
        return Choice.model_validate_json(path.read_text(encoding="utf-8")).vllm
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UsageError(f"{path}: not a choice of this launcher; remove it, the profile then decides") from error


def choose_vllm(state: ServiceState, vllm: str, profiles_own: str) -> None:
    """Have later starts use this release; nothing is written down where it is the profile's own."""
    path = choice_file(state)
    if vllm == profiles_own:
        path.unlink(missing_ok=True)
        return
    unfinished = path.with_suffix(".partial")
    unfinished.write_text(json.dumps({"vllm": vllm}) + "\n", encoding="utf-8")
    unfinished.replace(path)


def choice_file(state: ServiceState) -> Path:
    """Return where it is written."""
    return state.root / "vllm.json"
