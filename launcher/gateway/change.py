"""Change the keys of a service, and let a running gateway know."""

from dataclasses import dataclass

from launcher.errors import UsageError
from launcher.gateway import install, keys
from launcher.gateway.choices import has_gateway
from launcher.profile import Profile
from launcher.state import ServiceState


@dataclass(frozen=True)
class Added:
    """A new key."""

    secret: str
    in_force: bool
    """Whether a running gateway knows it already."""


def add(profile: Profile, name: str, requests_per_minute: int | None, concurrency: int | None) -> Added:
    """Make a key.

    Raises:
        UsageError: the name is taken or is none, or nothing would ask for the key.
    """
    _refuse_useless(profile)
    state = ServiceState.of(profile.name)
    secret = keys.add(state, name, requests_per_minute, concurrency)
    return Added(secret, _applied(state))


def remove(profile: Profile, name: str) -> bool:
    """Forget a key; return whether a running gateway did so already.

    Raises:
        UsageError: there is none of this name.
    """
    state = ServiceState.of(profile.name)
    keys.remove(state, name)
    return _applied(state)


def _refuse_useless(profile: Profile) -> None:
    from launcher import service

    running = service.find(profile.name)
    if running is not None and running.plan.gateway is not None:
        return
    if not has_gateway(profile, profile.runtime):
        where = profile.source_of("gateway.enabled")
        raise UsageError(f"{profile.name}: has no gateway ({where}), so no key would be asked for; write enabled: true")


def _applied(state: ServiceState) -> bool:
    if not install.own_key_file(state).is_file():
        # Never started: the first start writes the map.
        return False
    install.write_map(state)
    from launcher import service

    running = service.find(state.root.name)
    if running is None or running.plan.gateway is None:
        return False
    from launcher.runtime.compose import ComposeService

    ComposeService(state.compose_file, running.plan).reload_gateway()
    return True
