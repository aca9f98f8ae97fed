"""Follow what happens to a service: the events that were written, and those to come."""

import time
from collections.abc import Iterator

from launcher.errors import UsageError
from launcher.operate.events import FILE_NAME, OLD_NAME, Event, Follower, parsed
from launcher.operate.service_state import ServiceStatus, StateFile
from launcher.state import ServiceState

POLL_S = 0.5


def status_of(state: ServiceState) -> ServiceStatus:
    """Return what keeper and watchdog say.

    Raises:
        UsageError: nobody keeps this service.
    """
    file = StateFile(state.operate_dir)
    if not file.path.is_file():
        name = state.root.name
        raise UsageError(
            f"{name}: nobody watches it; `graft up --profile {name}` starts it with a watchdog unless its profile says "
            "watch.enabled: false"
        )
    return file.read()


def last_events(state: ServiceState, most: int) -> tuple[Event, ...]:
    """Return the last events that were written, the oldest first."""
    files = (state.operate_dir / name for name in (OLD_NAME, FILE_NAME))
    lines = [line for file in files if file.is_file() for line in file.read_bytes().splitlines()]
    found = [one for line in lines if (one := parsed(line)) is not None]
    return tuple(found[-most:]) if most else ()


def events_from_now(state: ServiceState, poll_s: float = POLL_S) -> Iterator[Event]:
    """Yield events as they are written, until the service is stopped."""
    follower, file = Follower(state.operate_dir), StateFile(state.operate_dir)
    while True:
        # The state first: what was told before the end is then told.
        is_over = file.read().phase == "stopped"
        yield from follower.new()
        if is_over:
            return
        time.sleep(poll_s)
