"""The gateway of a plan: what the profile says, with the reasons that `graft explain` prints. Pure."""

from launcher.errors import UsageError
from launcher.plan import Flag, Gateway, Runtime
from launcher.profile import Profile

LEAST_WAITING = 16
WAITING_FOR_EACH = 4
"""So many requests may wait for each that runs: they then wait about as long as so many answers take."""


def has_gateway(profile: Profile, runtime: Runtime) -> bool:
    """Whether a service of this profile stands behind a gateway."""
    enabled = profile.gateway.enabled
    return runtime == "docker" if enabled == "auto" else enabled


def gateway_of(profile: Profile, runtime: Runtime, max_num_seqs: int) -> Gateway | None:
    """Return the gateway of a plan; None where there is none.

    Args:
        max_num_seqs: requests that the engine serves at once.

    Raises:
        UsageError: one is asked for where there can be none.
    """
    if not has_gateway(profile, runtime):
        return None
    if runtime == "host":
        raise UsageError(
            f"{profile.source_of('gateway.enabled')}: the gateway runs by Docker Compose, and a local process listens "
            "itself: write auto, use --runtime docker, or put a proxy of your own in front"
        )
    asked = profile.gateway
    by_requests = max(LEAST_WAITING, WAITING_FOR_EACH * max_num_seqs)
    max_waiting = by_requests if asked.max_waiting == "auto" else asked.max_waiting
    rows = [
        ("enabled", "yes", "vLLM's own --api-key does not guard every route, so nothing but the gateway reaches it"),
        (
            "max_waiting",
            str(max_waiting),
            f"{WAITING_FOR_EACH} for each of the {max_num_seqs} that run, at least {LEAST_WAITING}; more are told to "
            "come again"
            if asked.max_waiting == "auto"
            else "more requests than this in the queue are told to come again",
        ),
        ("max_request_mib", str(asked.max_request_mib), "a larger body is refused before any of it is read"),
        ("silence_timeout_s", str(asked.silence_timeout_s), "an answer that stands still for so long is ended"),
    ]
    if asked.tls_certificate:
        rows.append(("tls_certificate", asked.tls_certificate, f"TLS on port {asked.tls_port}"))
    return Gateway(
        max_request_bytes=asked.max_request_mib << 20,
        max_waiting=max_waiting,
        max_in_flight=max_num_seqs + max_waiting,
        silence_timeout_s=asked.silence_timeout_s,
        tls_certificate=asked.tls_certificate,
        tls_port=asked.tls_port,
        choices=tuple(
            Flag(name=f"gateway.{key}", value=value, reason=reason, source=profile.source_of(f"gateway.{key}"))
            for key, value, reason in rows
        ),
    )
