"""A systemd unit that starts a service with the machine and stops it in order; systemd restarts nothing. Pure."""

from collections.abc import Mapping, Sequence

KEPT_VARIABLES = ("GRAFT_STATE", "GRAFT_MODELS", "GRAFT_PROFILES", "DOCKER_HOST")
"""Of the environment that the unit is asked for in: they say where things lie."""


def unit_of(profile: str, graft: str, environment: Mapping[str, str], user: str | None) -> str:
    """Return a unit's text.

    Args:
        graft: path of the `graft` program.
        user: whose service it is, for a unit of the system; None: for one of the user's own systemd.
    """
    kept = {name: environment[name] for name in KEPT_VARIABLES if environment.get(name)}
    lines: Sequence[str] = (
        "[Unit]",
        f"Description=Graft: {profile}",
        "Wants=network-online.target",
        # Units that are not there are passed over: the host runtime needs no Docker.
        "After=network-online.target docker.service",
        "",
        "[Service]",
        # The watchdog starts the engine again, by its budget: a second one here would undo its stop for good.
        "Type=oneshot",
        "RemainAfterExit=yes",
        "TimeoutStartSec=infinity",
        "TimeoutStopSec=120",
        *((f"User={user}",) if user else ()),
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in kept.items()),
        f"ExecStart={_quoted(graft).replace('$', '$$')} up --profile {profile}",
        f"ExecStop={_quoted(graft).replace('$', '$$')} down --profile {profile}",
        "",
        "[Install]",
        f"WantedBy={'multi-user.target' if user else 'default.target'}",
    )
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return a word as systemd reads it: `%` begins a specifier, and blanks end a word (systemd.syntax(7))."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{plain}"' if any(one.isspace() or one in "\"'" for one in text) else plain
