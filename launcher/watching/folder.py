"""The folder that keeper, watchdog and gateway share: made before a start, and without the status of an earlier one."""

from launcher.operate.service_state import FILE_NAME
from launcher.state import ServiceState


def make(state: ServiceState) -> None:
    """Make the folder where it is missing: who runs a container may write there, and no other user of this machine."""
    state.operate_dir.parent.mkdir(parents=True, exist_ok=True)
    state.operate_dir.parent.chmod(0o700)
    state.operate_dir.mkdir(exist_ok=True)
    # Written by the container's user, which is none of this machine's.
    state.operate_dir.chmod(0o777)


def prepare(state: ServiceState) -> None:
    """Make the folder ready for a start: restarts are counted, and smaller settings left, anew."""
    make(state)
    (state.operate_dir / FILE_NAME).unlink(missing_ok=True)
