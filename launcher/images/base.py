"""The base image of a start: known by its digest before anything is planned with it."""

from dataclasses import dataclass
from typing import Literal

from launcher.errors import Refused
from launcher.images import build, registry
from launcher.images.pins import ImagePin, P, record_digest

State = Literal["same", "moved", "gone", "unresolved", "unknown"]


@dataclass(frozen=True)
class Checked:
    """How a pin's digest compares with the registry."""

    pin: ImagePin
    state: State
    tagged: str | None
    """Digest that the tag names now."""
    message: str


def ensure_digest(pin: P, *, unpinned: bool, locked_base: str | None = None) -> P:
    """Return the pin with its digest: the known one, else that of an earlier pull, else the registry's, recorded.

    Args:
        unpinned: a base image on this machine that came from no registry will do.
        locked_base: reference that a lock names; where no digest is known yet, its digest comes before all others.

    Raises:
        Refused: the digest is not known and the registry does not tell it.
    """
    if pin.digest is not None:
        return pin
    repository, _, locked_digest = (locked_base or "").partition("@")
    if locked_digest and repository == pin.base.rpartition(":")[0]:
        record_digest(pin.base, locked_digest)
        return pin.model_copy(update={"digest": locked_digest})
    local = build.local_image(pin.base)
    if local is not None and local.digest is None and unpinned:
        return pin
    if local is not None and local.digest is not None:
        digest = local.digest
    else:
        try:
            digest = registry.resolve(pin.base)
        except registry.RegistryError as error:
            raise Refused(_no_digest(pin, str(error), is_here=local is not None)) from error
    record_digest(pin.base, digest)
    return pin.model_copy(update={"digest": digest})


def _no_digest(pin: ImagePin, why: str, *, is_here: bool) -> str:
    lines = [
        f"{pin.base}: its digest is not known, and a tag alone can come to name another image.",
        f"  {why}",
        "  -> Run `graft pins resolve` once with network, or write its `digest:` in images/pins.yaml.",
    ]
    if is_here:
        lines.append("  -> The image here came from no registry; --unpinned takes it as it is.")
    return "\n".join(lines)


def resolve(pin: P) -> P:
    """Return the pin with its digest, read from the registry and recorded unless it is known already.

    Raises:
        RegistryError: the registry does not tell it.
    """
    if pin.digest is not None:
        return pin
    digest = registry.resolve(pin.base)
    record_digest(pin.base, digest)
    return pin.model_copy(update={"digest": digest})


def check(pin: ImagePin) -> Checked:
    """Compare a pin's digest with the registry; changes nothing."""
    if pin.digest is None:
        return Checked(pin, "unresolved", None, "no digest is known; `graft pins resolve` reads it")
    try:
        tagged = registry.resolve(pin.base)
    except registry.NotInRegistry:
        return _without_tag(pin)
    except registry.RegistryError as error:
        return Checked(pin, "unknown", None, str(error))
    if tagged == pin.digest:
        return Checked(pin, "same", tagged, "the tag names the pinned image")
    return Checked(
        pin,
        "moved",
        tagged,
        f"the tag now names {tagged}; the pinned image is used on. To take the new one write `digest: {tagged}` in "
        "images/pins.yaml",
    )


def _without_tag(pin: ImagePin) -> Checked:
    try:
        registry.resolve(pin.reference)
    except registry.NotInRegistry:
        return Checked(pin, "gone", None, "the registry has the pinned image no more; keep your copy, or pin another")
    except registry.RegistryError as error:
        return Checked(pin, "unknown", None, str(error))
    return Checked(pin, "moved", None, "the tag is gone; the pinned image is still in the registry")
