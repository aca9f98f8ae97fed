"""`graft doctor`: everything that can be checked about a machine and a service, each with one remedy."""

from dataclasses import dataclass

from launcher.doctor.facts import DoctorFacts, Finding, Verdict
from launcher.doctor.findings import examine, worst
from launcher.doctor.probe import look
from launcher.match import choose
from launcher.planner import Planned, demand_of
from launcher.prepare import Options, gpu_facts, host_facts, matches, planned, shipped_and_own
from launcher.profile import Profile, load_profile, user_folder


@dataclass(frozen=True)
class Examined:
    """A profile on this machine, and what was found."""

    profile: str
    made: Planned
    facts: DoctorFacts
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)


def examined(options: Options) -> Examined:
    """Look at this machine and at the profile's service, and return what is found.

    Raises:
        UsageError: the profile or the model is wrong.
    """
    profile, notes = _profile(options)
    facts = host_facts(profile)
    made = planned(options, profile, facts)
    demand = demand_of(made.inputs)
    found = look(made.plan, demand, facts)
    return Examined(profile.name, made, found, examine(found, demand), notes)


def _profile(options: Options) -> tuple[Profile, tuple[str, ...]]:
    """Return the profile to look at; where none suits this machine, the nearest: what is wrong is then found."""
    user = user_folder(options.profiles_dir)
    if options.profile:
        return load_profile(options.profile, user), ()
    facts = gpu_facts()
    choice = choose(matches(options, facts), facts)
    if choice.profile is not None:
        return choice.profile, (f"PROFILE={choice.profile.name}: {choice.why}",)
    closest = choice.closest.profile if choice.closest else None
    profile = closest or next(one for one in shipped_and_own(options) if one.gpu is not None)
    return profile, (f"{choice.why} Looked at as PROFILE={profile.name}.",)
