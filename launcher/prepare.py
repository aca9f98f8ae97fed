"""Gather what a plan is made from: files read, the machine probed; and make the plan."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.choice import chosen_vllm
from launcher.errors import UsageError
from launcher.fit import calibration
from launcher.fit.geometry import FitError
from launcher.fit.request import card_from_name_or_size
from launcher.fit.weights import Weights, weights_from_folder
from launcher.host import nvml
from launcher.host.facts import HostFacts
from launcher.host.modelfiles import incomplete_files
from launcher.host.probe import probe
from launcher.images.pins import load_pins
from launcher.match import Choice, Match, choose, match
from launcher.memory import MemoryInputs, card_of
from launcher.plan import Runtime
from launcher.planner import Inputs, Planned, make
from launcher.profile import Model, Profile, load_model, load_profile, profile_files, user_folder
from launcher.state import ServiceState, cache_root, state_root


@dataclass(frozen=True)
class Options:
    """What a user chose; None where they left it to the launcher."""

    profile: str | None = None
    model: str | None = None
    profiles_dir: Path | None = None
    runtime: Runtime | None = None
    card: str | None = None
    advise: bool = False


def models_dir() -> Path:
    """Return the folder that checkpoints are kept in, one folder each: `$GRAFT_MODELS`, else the state's cache."""
    configured = os.environ.get("GRAFT_MODELS")
    return Path(configured).expanduser().resolve() if configured else cache_root() / "models"


def calibration_file() -> Path:
    """Return the file of recorded boots."""
    return state_root() / "boots.json"


def shipped_and_own(options: Options) -> tuple[Profile, ...]:
    """Return every profile, the user's beside the shipped ones."""
    user = user_folder(options.profiles_dir)
    return tuple(load_profile(name, user) for name in profile_files(user))


def host_facts(profile: Profile) -> HostFacts:
    """Probe this machine for a profile."""
    return probe([profile.serve.port], models_dir(), state_root())


def gpu_facts() -> HostFacts:
    """Ask NVML alone: all that the choice of a profile needs."""
    return HostFacts(nvml=nvml.read())


def matches(options: Options, facts: HostFacts) -> tuple[Match, ...]:
    """Return how each profile suits this machine."""
    return match(shipped_and_own(options), facts)


def chosen_profile(options: Options, facts: HostFacts | None = None) -> tuple[Profile, Choice | None]:
    """Return the profile named, else the one for the card named, else the one that suits this machine and why.

    An upgrade or a rollback may have chosen another vLLM for it.

    Raises:
        UsageError: none is named and none suits; the message says which is closest and what to change.
        FitError: the card is neither a known name nor a size.
    """
    user = user_folder(options.profiles_dir)
    if options.profile:
        return _as_chosen(load_profile(options.profile, user)), None
    if options.card:
        return nearest_profile(shipped_and_own(options), options.card), None
    facts = facts or gpu_facts()
    choice = choose(matches(options, facts), facts)
    if choice.profile is None:
        raise UsageError(choice.why)
    return _as_chosen(choice.profile), choice


def nearest_profile(profiles: Sequence[Profile], card: str) -> Profile:
    """Return the one-GPU profile whose card is nearest to the card named.

    Raises:
        FitError: the card is neither a known name nor a size.
    """
    wanted = card_from_name_or_size(card)

    def distance(profile: Profile) -> tuple[int, bool]:
        own = card_of(profile, (), None)
        return abs(own.total_bytes - wanted.total_bytes), own.compute_capability != wanted.compute_capability

    return min((profile for profile in profiles if profile.gpu is not None and profile.gpu.count == 1), key=distance)


def _as_chosen(profile: Profile) -> Profile:
    vllm = chosen_vllm(ServiceState.of(profile.name))
    if vllm is None or vllm == profile.vllm or vllm not in (pin.vllm for pin in load_pins().pins):
        return profile
    return profile.model_copy(update={"vllm": vllm})


def chosen_model(options: Options, profile: Profile) -> Model:
    """Return the model named, else the profile's."""
    return load_model(options.model or profile.model, user_folder(options.profiles_dir))


def planned(options: Options, profile: Profile, facts: HostFacts | None) -> Planned:
    """Return the plan; `facts` None plans for another machine.

    Raises:
        UsageError: an input is wrong.
    """
    return make(inputs_of(options, profile, chosen_model(options, profile), facts))


def inputs_of(options: Options, profile: Profile, model: Model, facts: HostFacts | None) -> Inputs:
    """Read what lies on disk about a model, and put it beside the rest."""
    folder = models_dir() / model.name
    config, weights = model_on_disk(folder)
    try:
        boots = calibration.load(calibration_file())
    except FitError as error:
        raise UsageError(str(error)) from error
    return Inputs(
        profile=profile,
        model=model,
        pin=load_pins().of(profile.vllm),
        facts=None if options.card else facts,
        config=config,
        config_source=str(folder / "config.json"),
        weights=weights,
        memory=MemoryInputs(card=options.card, boots=boots, advise=options.advise),
        model_dir=folder,
        model_is_here=weights is not None,
        runtime=options.runtime,
    )


def model_on_disk(folder: Path) -> tuple[dict[str, Any] | None, Weights | None]:
    """Return a checkpoint's config.json and its sizes; None for what is not there, or not whole yet."""
    path = folder / "config.json"
    if not path.is_file():
        return None, None
    config = read_config(path)
    if incomplete_files(folder):
        return config, None
    try:
        return config, weights_from_folder(folder)
    except FitError:
        return config, None


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json.

    Raises:
        UsageError: it cannot be read or is no JSON object.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}; fetch it again") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path}: a JSON object is needed, got {type(config).__name__}")
    return config


def api_key(secrets_dir: Path) -> str | None:
    """Return the service's API key; None where it has none."""
    path = secrets_dir / "api_key"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None
