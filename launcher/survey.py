"""Questions about models and cards beyond one start: which model fits which card, and what reaches a longer context."""

from dataclasses import dataclass, replace
from pathlib import Path

from launcher.checks import CheckResult, check, facts_from_file
from launcher.errors import UsageError
from launcher.fit.advice import OtherModel, TargetAdvice, alternatives
from launcher.fit.geometry import geometry_from_config
from launcher.fit.planner import FitReport, fit
from launcher.fit.refusals import refusals
from launcher.fit.report import ModelRow
from launcher.fit.request import FitRequest
from launcher.fit.shapes import weights_from_shapes
from launcher.fit.weights import weights_from_folder
from launcher.host.facts import HostFacts
from launcher.images.pins import load_pins
from launcher.memory import card_of, settings_of
from launcher.planner import Planned, demand_of, make, speculation_for
from launcher.prepare import Options, chosen_model, chosen_profile, host_facts, inputs_of, planned, read_config
from launcher.profile import Profile, load_model, model_files, user_folder


def model_rows(options: Options, profile: Profile) -> tuple[ModelRow, ...]:
    """Return how every known model fits a GPU profile's card, or the card that the options name."""
    rows = []
    for name in model_files(user_folder(options.profiles_dir)):
        made = planned(replace(options, model=name), profile, None)
        report = made.memory.report if made.memory else None
        reasons = "; ".join(problem.message for problem in made.plan.problems)
        rows.append(ModelRow(name, made.inputs.model.title, report, bool(made.plan.refusals), reasons))
    return tuple(rows)


def alternatives_of(made: Planned, options: Options) -> tuple[TargetAdvice, ...]:
    """Return what would have to change to reach longer contexts, other models included; none without a memory plan."""
    if made.memory is None or made.memory.report is None:
        return ()
    user = user_folder(options.profiles_dir)
    others = []
    for name in model_files(user):
        if name == made.plan.model:
            continue
        other = make(inputs_of(options, made.inputs.profile, load_model(name, user), made.inputs.facts))
        if other.memory is not None and other.memory.report is not None:
            others.append(OtherModel(name, other.memory.report.request))
    return alternatives(made.memory.report.request, other_models=others)


_PLAIN_KV_DTYPES = ("fp8", "int8_per_token_head", "auto")
"""What is taken for any model where the profile's KV cache is made for others; best first."""


@dataclass(frozen=True)
class FolderFit:
    """What fits of any model, with the profile that the settings are from."""

    profile: str
    report: FitReport
    note: str
    """What differs from the profile; empty when nothing does."""


def fit_folder(path: Path, options: Options) -> FolderFit:
    """Fit any model: its folder, or its config.json; without weights beside it their sizes follow from the shapes.

    Where the profile was not named and its KV cache is refused for this model, one that works is taken.

    Raises:
        UsageError: no card is known, or a file cannot be read.
        FitError: the geometry is not complete, or the combination is refused.
    """
    if not path.exists():
        raise UsageError(f"{path}: not there; give a model's folder or its config.json")
    folder = path if path.is_dir() else path.parent
    config = folder / "config.json" if path.is_dir() else path
    document = read_config(config)
    geometry = geometry_from_config(document, str(config))
    if not options.profile and not options.card:
        raise UsageError("no card is named; give --card 24GiB or --profile rtx4090")
    profile, _ = chosen_profile(options)
    if profile.gpu is None:
        raise UsageError(f"{profile.name}: has no GPU to fit into; name a GPU profile, or --card 24GiB")
    speculation, _ = speculation_for(profile, geometry)
    card = card_of(profile, (), options.card)
    request = FitRequest(
        geometry,
        weights_from_folder(folder)
        if any(folder.glob("*.safetensors"))
        else weights_from_shapes(document, geometry, str(config)),
        settings_of(profile, speculation, is_safe_mode=False, turboquant_fix=True),
        card,
        profile.serve.tensor_parallel_size,
        vllm_version=profile.vllm,
    )
    note = ""
    broken = refusals(request)
    if broken and not options.profile:
        tried = [replace(request.settings, kv_cache_dtype=name) for name in _PLAIN_KV_DTYPES]
        plain = next((one for one in tried if not refusals(request.with_settings(one))), None)
        if plain is not None:
            request = request.with_settings(plain)
            note = f"KV cache {plain.kv_cache_dtype}: {broken[0].message}"
    return FolderFit(profile.name, fit(request), note)


def checked(options: Options, facts_file: Path | None) -> tuple[CheckResult, HostFacts]:
    """Check this machine, or the facts of a file with the demand in it, else with a profile's."""
    facts, demand = (None, None) if facts_file is None else facts_from_file(facts_file)
    if demand is None:
        profile, _ = chosen_profile(options, facts)
        facts = facts or host_facts(profile)
        demand = demand_of(inputs_of(options, profile, chosen_model(options, profile), facts))
    assert facts is not None
    return check(facts, demand), facts


def pinned_versions() -> tuple[str, ...]:
    """Return the pinned vLLM versions, the current one first."""
    return tuple(pin.vllm for pin in sorted(load_pins().pins, key=lambda pin: pin.role != "current"))
