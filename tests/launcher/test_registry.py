"""A registry is asked for digests: what it may answer, and what is made of it."""

import hashlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from launcher.images.registry import DOCKER_HUB, NotInRegistry, RegistryError, parse, resolve

DIGEST = f"sha256:{'a' * 64}"
IMAGE = "vllm/vllm-openai:v0.33.0"
REALM = "https://auth.docker.io/token"

Handler = Callable[[httpx.Request], httpx.Response]


def ask(handler: Handler, image: str = IMAGE) -> str:
    return resolve(image, transport=httpx.MockTransport(handler))


def hub(request: httpx.Request) -> httpx.Response:
    """Answer as Docker Hub does: an anonymous token first."""
    if request.url.host == "auth.docker.io":
        assert request.url.params["scope"] == "repository:vllm/vllm-openai:pull"
        assert request.url.params["service"] == "registry.docker.io"
        return httpx.Response(200, json={"token": "t"})
    if request.headers.get("Authorization") != "Bearer t":
        challenge = f'Bearer realm="{REALM}",service="registry.docker.io",scope="repository:vllm/vllm-openai:pull"'
        return httpx.Response(401, headers={"WWW-Authenticate": challenge})
    assert request.method == "HEAD"
    assert "application/vnd.oci.image.index.v1+json" in request.headers["Accept"]
    return httpx.Response(200, headers={"Docker-Content-Digest": DIGEST})


@pytest.mark.parametrize(
    ("image", "host", "repository", "reference"),
    [
        (IMAGE, DOCKER_HUB, "vllm/vllm-openai", "v0.33.0"),
        ("debian:bookworm", DOCKER_HUB, "library/debian", "bookworm"),
        ("docker.io/vllm/vllm-openai:v1", DOCKER_HUB, "vllm/vllm-openai", "v1"),
        ("127.0.0.1:5000/a/b:v1", "127.0.0.1:5000", "a/b", "v1"),
        ("localhost/a:v1", "localhost", "a", "v1"),
        (f"ghcr.io/a/b@{DIGEST}", "ghcr.io", "a/b", DIGEST),
    ],
)
def test_an_image_name_is_taken_apart_as_docker_does(image: str, host: str, repository: str, reference: str) -> None:
    name = parse(image)
    assert (name.host, name.repository, name.reference) == (host, repository, reference)


def test_a_digest_is_read_with_an_anonymous_token() -> None:
    assert ask(hub) == DIGEST


def test_without_the_digest_header_the_manifest_itself_is_hashed() -> None:
    body = b'{"schemaVersion": 2}'

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=body if request.method == "GET" else b"")

    assert ask(handler) == f"sha256:{hashlib.sha256(body).hexdigest()}"


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (401, {}, r"answered 401: it wants a login, or has no such repository; `docker login`"),
        (401, {"WWW-Authenticate": 'Basic realm="x"'}, r"answered 401: it wants a login"),
        (403, {}, r"answered 403: it wants a login"),
        (404, {}, r"answered 404: no such image; correct `base` in images/pins\.yaml"),
        (418, {}, r"answered 418; a manifest was asked for at https://registry-1\.docker\.io/v2/vllm/vllm-openai/"),
        (429, {"Retry-After": "30"}, r"answered 429: too many requests from this address; try again in 30 s"),
        (429, {}, r"too many requests from this address; try again later"),
        (500, {}, r"answered 500: the registry itself has failed; try again later"),
        (503, {}, r"answered 503: the registry itself has failed"),
        (200, {"Docker-Content-Digest": "sha512:ab"}, r"the digest 'sha512:ab'; a sha256 one is needed"),
    ],
)
def test_an_answer_without_a_digest_says_what_to_do(status: int, headers: dict[str, str], message: str) -> None:
    with pytest.raises(RegistryError, match=message) as error:
        ask(lambda request: httpx.Response(status, headers=headers))
    assert str(error.value).startswith(IMAGE)
    assert isinstance(error.value, NotInRegistry) == (status == 404)


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"token": 1}'])
def test_a_token_that_is_none_is_named(body: bytes) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.host == "auth.docker.io":
            return httpx.Response(200, content=body)
        return httpx.Response(401, headers={"WWW-Authenticate": f'Bearer realm="{REALM}"'})

    with pytest.raises(RegistryError, match=f"{REALM} gave no token"):
        ask(handler)


def test_a_refused_token_is_a_refused_login() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(401, headers={"WWW-Authenticate": f'Bearer realm="{REALM}"'})

    with pytest.raises(RegistryError, match="it wants a login"):
        ask(handler)


def test_a_token_that_does_not_help_is_not_asked_for_again() -> None:
    asked: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if request.url.host == "auth.docker.io":
            return httpx.Response(200, json={"access_token": "t"})
        return httpx.Response(401, headers={"WWW-Authenticate": f'Bearer realm="{REALM}"'})

    with pytest.raises(RegistryError, match="it wants a login"):
        ask(handler)
    assert len(asked) == 3


@contextmanager
def silent_server() -> Iterator[str]:
    """Yield the address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []
        thread = threading.Thread(target=lambda: taken.append(server.accept()[0]))
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(5)
        for connection in taken:
            connection.close()


def test_a_registry_that_stalls_is_given_up() -> None:
    with silent_server() as address, pytest.raises(RegistryError, match=r"gave no answer in 0\.3 s; try again later"):
        resolve(f"{address}/a:v1", timeout_s=0.3)


def test_a_registry_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(RegistryError, match=f"{address} cannot be reached .*check the network"):
        resolve(f"{address}/a:v1", timeout_s=5)
