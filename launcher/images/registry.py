"""Ask a registry which image a tag names, by the OCI distribution API."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from launcher.errors import GraftError

TIMEOUT_S = 20.0
"""Longest silence of a registry before it counts as stalled."""
ACCEPTED = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
"""Indexes first: the digest of an image for several platforms is that of its index."""
DOCKER_HUB = "registry-1.docker.io"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class RegistryError(GraftError):
    """A registry gave no digest; the message names the image, what was answered, and what to do."""


class NotInRegistry(RegistryError):
    """The registry answers, and has no image of this name."""


@dataclass(frozen=True)
class Name:
    """An image's name, taken apart."""

    host: str
    repository: str
    reference: str
    """Tag or digest."""

    @property
    def is_loopback(self) -> bool:
        return re.fullmatch(r"localhost|127(\.\d+){3}", self.host.partition(":")[0]) is not None

    @property
    def url(self) -> str:
        # Docker's own rule: plain HTTP on this machine, TLS everywhere else.
        scheme = "http" if self.is_loopback else "https"
        return f"{scheme}://{self.host}/v2/{self.repository}/manifests/{self.reference}"


def parse(image: str) -> Name:
    """Take `[host/]repository:tag` or `[host/]repository@digest` apart; without a host it is on Docker Hub."""
    if "@" in image:
        name, _, reference = image.partition("@")
    else:
        name, _, reference = image.rpartition(":")
    first, slash, rest = name.partition("/")
    if slash and (first == "localhost" or "." in first or ":" in first):
        return Name(DOCKER_HUB if first == "docker.io" else first, rest, reference)
    return Name(DOCKER_HUB, name if slash else f"library/{name}", reference)


def resolve(image: str, *, timeout_s: float = TIMEOUT_S, transport: httpx.BaseTransport | None = None) -> str:
    """Return the digest, `sha256:...`, of the manifest or index that an image's name stands for now.

    Raises:
        NotInRegistry: it has no such image.
        RegistryError: it cannot be asked: not reachable, stalled, closed to this machine, limited, or broken.
    """
    name = parse(image)
    try:
        with httpx.Client(
            timeout=timeout_s, follow_redirects=True, trust_env=not name.is_loopback, transport=transport
        ) as client:
            return _resolve(client, image, name)
    except httpx.TimeoutException as error:
        raise RegistryError(f"{image}: {name.host} gave no answer in {timeout_s:g} s; try again later") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RegistryError(
            f"{image}: {name.host} cannot be reached ({' '.join(str(error).split())}); check the network"
        ) from error


def _resolve(client: httpx.Client, image: str, name: Name) -> str:
    headers = {"Accept": ", ".join(ACCEPTED)}
    answer = client.head(name.url, headers=headers)
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        headers |= _authorization(client, image, name, answer)
        answer = client.head(name.url, headers=headers)
    _refuse(image, name, answer)
    digest: str | None = answer.headers.get("Docker-Content-Digest")
    if digest is None:
        # The header is optional: the digest is that of the manifest's bytes.
        answer = client.get(name.url, headers=headers)
        _refuse(image, name, answer)
        digest = f"sha256:{hashlib.sha256(answer.content).hexdigest()}"
    if not _DIGEST.fullmatch(digest):
        raise RegistryError(f"{image}: {name.host} answered with the digest {digest!r}; a sha256 one is needed")
    return digest


def _authorization(client: httpx.Client, image: str, name: Name, answer: httpx.Response) -> dict[str, str]:
    scheme, _, rest = answer.headers.get("WWW-Authenticate", "").partition(" ")
    challenge = dict(_CHALLENGE.findall(rest))
    realm = challenge.pop("realm", None)
    if scheme.lower() != "bearer" or realm is None:
        _refuse(image, name, answer)
    asked = {"scope": f"repository:{name.repository}:pull"} | {
        key: value for key, value in challenge.items() if key in ("service", "scope")
    }
    given = client.get(str(realm), params=asked)
    _refuse(image, name, given)
    token = _token(given)
    if token is None:
        raise RegistryError(f"{image}: {realm} gave no token; try again later")
    return {"Authorization": f"Bearer {token}"}


def _token(answer: httpx.Response) -> str | None:
    try:
        document = answer.json()
    except ValueError:
        return None
    if not isinstance(document, Mapping):
        return None
    token = document.get("token") or document.get("access_token")
    return token if isinstance(token, str) else None


def _refuse(image: str, name: Name, answer: httpx.Response) -> None:
    status, said = answer.status_code, f"{image}: {name.host} answered {answer.status_code}"
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise RegistryError(
            f"{said}: it wants a login, or has no such repository; `docker login` and `docker pull {image}` bring the "
            "image, and its digest is then taken from Docker"
        )
    if status == httpx.codes.NOT_FOUND:
        raise NotInRegistry(f"{said}: no such image; correct `base` in images/pins.yaml")
    if status == httpx.codes.TOO_MANY_REQUESTS:
        wait = answer.headers.get("Retry-After")
        when = f"in {wait} s" if wait and wait.isdigit() else "later"
        raise RegistryError(f"{said}: too many requests from this address; try again {when}, or log in with Docker")
    if status >= httpx.codes.INTERNAL_SERVER_ERROR:
        raise RegistryError(f"{said}: the registry itself has failed; try again later")
    if status != httpx.codes.OK:
        raise RegistryError(f"{said}; a manifest was asked for at {name.url}")
