"""The same service started once more without speculation, in the place of the one that speculates."""

from collections.abc import Iterator
from contextlib import contextmanager

from launcher import service
from launcher.bring import Reporter
from launcher.errors import UsageError
from launcher.plan import Plan
from launcher.prepare import Options, chosen_profile
from launcher.profile import Profile


@contextmanager
def without_speculation(plan: Plan, report: Reporter) -> Iterator[str]:
    """Stop a running service, start it without speculation, yield its URL, and put back what ran.

    Clients get no answer meanwhile. What runs for the block is not recorded: lock and rollback stay as they were.

    Raises:
        UsageError: the profile does not speculate.
        Refused: the plan or the machine says no.
        FailedStart: one of the starts failed.
    """
    options = Options(profile=plan.profile, model=plan.model, runtime=plan.runtime)
    profile, _ = chosen_profile(options)
    if profile.serve.speculation is None:
        raise UsageError(f"{plan.profile}: does not speculate; there is nothing to compare with")
    plain = profile.model_copy(update={"serve": profile.serve.model_copy(update={"speculation": None})})
    service.down(plan.profile)
    try:
        yield _start(options, plain, report)
    finally:
        service.down(plan.profile)
        _start(options, profile, report)


def _start(options: Options, profile: Profile, report: Reporter) -> str:
    made, engine = service.prepared(options, profile, report, force=True, unpinned=True)
    return service.start(made, engine, report).base_url
