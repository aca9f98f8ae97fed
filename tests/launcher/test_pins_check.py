"""Digests of pins: resolved, compared, and refused where they are not known."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.cli import base as cli
from launcher.errors import CheckFailed, Refused
from launcher.images import base, build, registry
from launcher.images.build import LocalImage
from launcher.images.pins import Pin, load_pins, lock_file
from launcher.images.registry import NotInRegistry, RegistryError

DIGEST, OTHER = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"
Answers = dict[str, str | RegistryError]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAFT_STATE", str(tmp_path))
    return tmp_path


@pytest.fixture
def registry_says(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answers], None]:
    def use(answers: Answers) -> None:
        def answer(image: str) -> str:
            given = answers[image]
            if isinstance(given, RegistryError):
                raise given
            return given

        monkeypatch.setattr(registry, "resolve", answer)

    return use


@pytest.fixture
def docker_has(monkeypatch: pytest.MonkeyPatch) -> Callable[[LocalImage | None], None]:
    return lambda image: monkeypatch.setattr(build, "local_image", lambda reference: image)


def current() -> Pin:
    return load_pins().current


OFFLINE = RegistryError("registry-1.docker.io cannot be reached")


def test_a_digest_is_read_once_and_kept(
    registry_says: Callable[[Answers], None], docker_has: Callable[[LocalImage | None], None]
) -> None:
    docker_has(None)
    registry_says({current().base: DIGEST})
    assert base.ensure_digest(current(), unpinned=False).digest == DIGEST
    registry_says({current().base: OTHER})
    assert base.ensure_digest(current(), unpinned=False).digest == DIGEST
    assert current().reference == f"vllm/vllm-openai@{DIGEST}"


def test_an_image_that_was_pulled_before_needs_no_registry(docker_has: Callable[[LocalImage | None], None]) -> None:
    docker_has(LocalImage("sha256:1", DIGEST))
    assert base.ensure_digest(current(), unpinned=False).digest == DIGEST
    assert json.loads(lock_file().read_text(encoding="utf-8")) == {"vllm/vllm-openai:v0.33.0": DIGEST}


@pytest.mark.parametrize("is_here", [False, True])
def test_offline_a_pin_without_a_digest_is_refused(
    is_here: bool, registry_says: Callable[[Answers], None], docker_has: Callable[[LocalImage | None], None]
) -> None:
    docker_has(LocalImage("sha256:1", None) if is_here else None)
    registry_says({current().base: OFFLINE})
    with pytest.raises(Refused, match="its digest is not known") as error:
        base.ensure_digest(current(), unpinned=False)
    assert "registry-1.docker.io cannot be reached" in str(error.value)
    assert "graft pins resolve" in str(error.value)
    assert ("--unpinned" in str(error.value)) == is_here
    assert not lock_file().exists()


def test_an_image_without_a_digest_is_taken_where_that_is_asked_for(
    docker_has: Callable[[LocalImage | None], None],
) -> None:
    docker_has(LocalImage("sha256:1", None))
    assert base.ensure_digest(current(), unpinned=True).digest is None
    assert not lock_file().exists()


def test_unpinned_does_not_take_an_image_that_is_not_here(
    registry_says: Callable[[Answers], None], docker_has: Callable[[LocalImage | None], None]
) -> None:
    docker_has(None)
    registry_says({current().base: OFFLINE})
    with pytest.raises(Refused):
        base.ensure_digest(current(), unpinned=True)


@pytest.mark.parametrize(
    ("locked", "known"),
    [
        (f"vllm/vllm-openai@{OTHER}", OTHER),
        (f"somewhere.else/vllm-openai@{OTHER}", DIGEST),
        ("vllm/vllm-openai:v0.33.0", DIGEST),
        (None, DIGEST),
    ],
)
def test_the_digest_of_a_lock_comes_before_what_a_tag_names_now(
    locked: str | None,
    known: str,
    registry_says: Callable[[Answers], None],
    docker_has: Callable[[LocalImage | None], None],
) -> None:
    docker_has(None)
    registry_says({current().base: DIGEST})
    assert base.ensure_digest(current(), unpinned=False, locked_base=locked).digest == known
    assert base.ensure_digest(current(), unpinned=False, locked_base=f"vllm/vllm-openai@{DIGEST}").digest == known
    assert current().digest == known


TAG = "vllm/vllm-openai:v0.33.0"
BY_DIGEST = f"vllm/vllm-openai@{DIGEST}"
GONE = NotInRegistry("no such image")


@pytest.mark.parametrize(
    ("answers", "state", "message"),
    [
        ({TAG: DIGEST}, "same", "the tag names the pinned image"),
        ({TAG: OTHER}, "moved", f"the tag now names {OTHER}; the pinned image is used on"),
        ({TAG: GONE, BY_DIGEST: DIGEST}, "moved", "the tag is gone; the pinned image is still in the registry"),
        ({TAG: GONE, BY_DIGEST: GONE}, "gone", "the registry has the pinned image no more"),
        ({TAG: GONE, BY_DIGEST: OFFLINE}, "unknown", "cannot be reached"),
        ({TAG: OFFLINE}, "unknown", "cannot be reached"),
    ],
)
def test_a_pin_is_compared_with_what_its_tag_names_now(
    answers: Answers, state: str, message: str, registry_says: Callable[[Answers], None]
) -> None:
    registry_says(answers)
    pin = current().model_copy(update={"digest": DIGEST})
    found = base.check(pin)
    assert found.state == state
    assert message in found.message
    assert current().digest is None


def test_a_pin_that_was_never_resolved_cannot_be_compared() -> None:
    assert base.check(current()).state == "unresolved"


def run(*arguments: str) -> tuple[str, Exception | None]:
    result = CliRunner().invoke(cli.app, arguments, standalone_mode=False)
    return result.output, result.exception  # type: ignore[return-value]


def test_the_commands_resolve_show_and_check(registry_says: Callable[[Answers], None]) -> None:
    beside = {pin.base: OTHER for pin in load_pins().services.values()}
    registry_says({TAG: DIGEST, "vllm/vllm-openai:v0.32.0": OFFLINE, **beside})
    output, error = run("pins", "resolve")
    assert f"0.33.0: {TAG} is {DIGEST}" in output
    assert f"prometheus: {load_pins().services['prometheus'].base} is {OTHER}" in output
    assert isinstance(error, CheckFailed)
    assert "cannot be reached" in str(error)
    assert f"digest: {DIGEST}" in run("pins")[0]

    assert run("pins", "check", "0.33.0") == ("0.33.0: same: the tag names the pinned image\n", None)
    registry_says({TAG: OTHER})
    output, error = run("pins", "check", "0.33.0", "--json")
    assert json.loads(output)[0]["tagged"] == OTHER
    assert str(error) == "not as pinned: 0.33.0 moved"
    assert current().digest == DIGEST
