"""The pinned vLLM releases, and the digests that their images turned out to have."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from launcher import yamltext
from launcher.errors import UsageError
from launcher.plan import Image
from launcher.profile import display_path
from launcher.state import CHECKOUT, state_root

PINS_FILE = CHECKOUT / "images" / "pins.yaml"
MOST_PINS = 2
"""The current release and the previous one: each more is a fix table more to keep true."""

Version = Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)*$")]
Release = Annotated[str, StringConstraints(pattern=r"^\d+\.\d+\.\d+$")]
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
Reference = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._/:-]*:[A-Za-z0-9_][A-Za-z0-9._-]*$")]


class ImagePin(BaseModel):
    """An image that is known by its digest as soon as that was read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: Reference
    """Repository and tag."""
    digest: Digest | None = None
    """Of the image index or manifest that the tag named; None until it was read."""

    @property
    def reference(self) -> str:
        """What to pull and to build from: the digest where it is known, since a tag can come to name another image."""
        return self.base if self.digest is None else f"{self.base.rpartition(':')[0]}@{self.digest}"

    @property
    def key(self) -> str:
        """What the file calls it."""
        raise NotImplementedError


class ServicePin(ImagePin):
    """The image of a service beside vLLM, run as it is."""

    name: str

    @property
    def key(self) -> str:
        return self.name


class Pin(ImagePin):
    """One vLLM release and the image that carries it."""

    vllm: Release
    role: Literal["current", "previous"]
    cuda: Version | None = None
    python: Version
    min_driver: Version | None = None
    torch: Version
    unpacked_gib: Annotated[float, Field(gt=0)] | None = None

    @property
    def key(self) -> str:
        return self.vllm

    def image(self) -> Image:
        """Return the pin as the plan holds it."""
        return Image(
            base=self.reference, vllm=self.vllm, cuda=self.cuda, min_driver=self.min_driver, python=self.python
        )


P = TypeVar("P", bound=ImagePin)


class Pins(BaseModel):
    """All pins, in the order of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pins: tuple[Pin, ...]
    services: dict[str, ServicePin] = Field(default_factory=dict)
    """Images of the services beside vLLM, by the service's name."""
    source: str

    @property
    def images(self) -> tuple[ImagePin, ...]:
        """Every pinned image, vLLM's first."""
        return (*self.pins, *self.services.values())

    @property
    def current(self) -> Pin:
        return next(pin for pin in self.pins if pin.role == "current")

    def of(self, vllm: str) -> Pin:
        """Return the pin of a vLLM release.

        Raises:
            UsageError: it is not pinned.
        """
        for pin in self.pins:
            if pin.vllm == vllm:
                return pin
        known = ", ".join(pin.vllm for pin in self.pins)
        raise UsageError(f"vllm: {vllm} is not in {self.source}; write one of {known}")


def load_pins(path: Path = PINS_FILE, lock: Path | None = None) -> Pins:
    """Read the pins; a digest comes from the file, else from what an earlier pull recorded.

    Args:
        lock: file of recorded digests; `lock_file()` unless given.

    Raises:
        UsageError: the file is wrong; the message names it and the key.
    """
    shown = display_path(path)
    document = _mapping(path, shown)
    recorded = _recorded(lock or lock_file())
    beside = document.pop("services", None) or {}
    if not isinstance(beside, dict):
        raise UsageError(f"{shown}: services: a mapping of images is needed, got {type(beside).__name__}")
    services = {str(name): _service_pin(str(name), values, recorded, shown) for name, values in beside.items()}
    pins = tuple(_pin(str(vllm), values, recorded, shown) for vllm, values in document.items())
    if len(pins) > MOST_PINS:
        raise UsageError(f"{shown}: {len(pins)} releases; keep the current and the previous one, at most {MOST_PINS}")
    if [pin.role for pin in pins].count("current") != 1:
        raise UsageError(f"{shown}: role: exactly one release is the current one")
    return Pins(pins=pins, services=services, source=shown)


def lock_file() -> Path:
    """Return where digests are recorded that were read from a registry."""
    return state_root() / "images.lock.json"


def record_digest(base: str, digest: str, lock: Path | None = None) -> None:
    """Remember which image the tag named when it was pulled; a recorded one is never replaced."""
    path = lock or lock_file()
    recorded = {base: digest, **_recorded(path)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(recorded, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(path)


def _mapping(path: Path, shown: str) -> dict[Any, Any]:
    try:
        document = yamltext.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{shown}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict) or not document:
        raise UsageError(f"{shown}: a mapping of vLLM releases is needed")
    return document


def _pin(vllm: str, values: Any, recorded: dict[str, str], shown: str) -> Pin:
    return _read(Pin, {"vllm": vllm}, values, recorded, f"{shown}: {vllm}")


def _service_pin(name: str, values: Any, recorded: dict[str, str], shown: str) -> ServicePin:
    return _read(ServicePin, {"name": name}, values, recorded, f"{shown}: services.{name}")


def _read(kind: type[P], own: dict[str, str], values: Any, recorded: dict[str, str], where: str) -> P:
    if not isinstance(values, dict):
        raise UsageError(f"{where}: a mapping is needed, got {type(values).__name__}")
    digest = values.get("digest", recorded.get(str(values.get("base"))))
    try:
        return kind.model_validate({**values, **own, "digest": digest})
    except ValidationError as error:
        lines = (f"{where}.{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise UsageError("\n".join(lines)) from error


def _recorded(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path}: not JSON ({error}); remove it, the next pull records the digests again") from error
    if not isinstance(recorded, dict):
        raise UsageError(f"{path}: an object is needed; remove it, the next pull records the digests again")
    return {str(base): str(digest) for base, digest in recorded.items()}
