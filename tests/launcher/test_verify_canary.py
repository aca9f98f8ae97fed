"""The start's canary: a model that can call tools is asked for a call, whole and streamed, before it counts as up."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import canary, ready, service
from launcher.ask import Answer
from launcher.canary import Canary, canary_of
from launcher.plan import Flag
from launcher.profile import CanaryQuestion
from launcher.ready import CanaryAsked, Event, NotReady, Ready, follow
from launcher.runtime import RunState
from launcher.service import FailedStart
from tests.launcher.fake_model import Asked, Said, served
from tests.launcher.test_host_runtime import make_plan
from tests.launcher.test_ready import RUNNING, Scripted

CALLS = Canary(calls_tools=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(ready, "STATE_INTERVAL_S", 0.01)
    monkeypatch.setattr(ready, "DYING_S", 0.1)


def paris(said: Said, asked: Asked) -> Said:
    return said if asked.body.get("tools") else Said("Paris.")


def followed(url: str, asked: Canary) -> Iterator[Event]:
    return follow(Scripted([(RUNNING, "")], base_url=url), "obedient", canary=asked)


def flags(*arguments: str) -> tuple[Flag, ...]:
    return tuple(Flag(name=name, value=None, reason="test", source="test") for name in arguments)


def test_a_call_is_asked_for_whole_and_streamed_before_the_server_is_ready() -> None:
    requests: list[Asked] = []
    with served(spoil=staticmethod(paris), asked=requests) as url:
        *_, call, last = followed(url, CALLS)
    assert call == CanaryAsked("a tool call, whole and streamed")
    assert isinstance(last, Ready)
    assert last.answer.text == "Paris."
    assert [bool(one.body.get("tools")) for one in requests] == [False, True, True]
    assert [one.streams for one in requests[1:]] == [False, True]
    assert requests[1].body["messages"] == requests[2].body["messages"]


def test_another_start_asks_for_another_call() -> None:
    requests: list[Asked] = []
    with served(spoil=staticmethod(paris), asked=requests) as url:
        for _ in range(2):
            list(followed(url, CALLS))
    assert requests[1].body["messages"] != requests[4].body["messages"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_broken_call_is_a_failed_start_with_a_cause_a_remedy_and_the_raw_text(streams: bool) -> None:
    def spoil(said: Said, asked: Asked) -> Said:
        broken = Said("<tool_call>\n<function=get get get", finish_reason="length")
        return broken if asked.body.get("tools") and asked.streams == streams else paris(said, asked)

    with (
        served(spoil=staticmethod(spoil)) as url,
        pytest.raises(NotReady, match=r"wrong tool call, .*<function=get get get") as caught,
    ):
        list(followed(url, CALLS))
    assert caught.value.problem is not None
    assert caught.value.problem.cause == "tool-call-broken"
    assert "make fetch" in caught.value.problem.remedy


def test_a_streamed_call_unlike_the_whole_one_is_a_failed_start() -> None:
    def spoil(said: Said, asked: Asked) -> Said:
        if not (asked.body.get("tools") and asked.streams):
            return paris(said, asked)
        (name, text), *_ = said.calls
        return replace(said, calls=((name, text.replace("{", "{ ", 1)),))

    with served(spoil=staticmethod(spoil)) as url, pytest.raises(NotReady, match="streamed unlike whole"):
        list(followed(url, CALLS))


def test_with_speculation_the_remedy_is_to_start_without_it() -> None:
    with served(spoil=staticmethod(lambda said, asked: Said("London"))) as url, pytest.raises(NotReady) as caught:
        list(followed(url, replace(CALLS, speculates=True)))
    assert caught.value.problem is not None
    assert caught.value.problem.cause == "wrong-answer"
    assert "take `serve.speculation` out" in caught.value.problem.remedy


def test_a_server_that_dies_over_the_call_is_told_as_dead() -> None:
    dead = RunState("exited", exit_code=3)

    def refuse(asked: Asked) -> tuple[int, str] | None:
        if asked.body.get("tools"):
            stand_in.script[:] = [(dead, "")]
            return 500, "EngineCore died"
        return None

    stand_in = Scripted([(RUNNING, "")])
    with served(spoil=staticmethod(paris), refuse=staticmethod(refuse)) as url:
        stand_in.base_url = url
        with pytest.raises(NotReady, match="exit code 3 while in phase canary"):
            list(follow(stand_in, "obedient", canary=CALLS))


def test_a_model_that_cannot_call_tools_is_asked_for_none() -> None:
    assert not canary_of(make_plan(8000)).calls_tools
    calling = canary_of(make_plan(8000, flags=flags("--enable-auto-tool-choice", "--speculative-config")))
    assert (calling.calls_tools, calling.speculates) == (True, True)
    requests: list[Asked] = []
    with served(spoil=staticmethod(paris), asked=requests) as url:
        list(followed(url, Canary()))
    assert len(requests) == 1


def test_a_model_is_asked_its_own_question_where_it_has_one() -> None:
    plan = make_plan(8000).model_copy(update={"canary": CanaryQuestion(question="2 + 2?", expected="4")})
    assert (canary_of(plan).question, canary_of(plan).expected) == ("2 + 2?", "4")
    assert canary_of(make_plan(8000)).expected == "Paris"


def test_a_failed_start_has_the_canarys_cause_whatever_the_log_says(tmp_path: Path) -> None:
    problem = canary.answer_problem(Canary(), _answer("London"))
    log = tmp_path / "failed.log"
    log.write_text("ValueError: No available memory for the cache blocks.\n", encoding="utf-8")
    failure = FailedStart(NotReady("wrong answer", problem=problem), make_plan(8000), log, RUNNING)
    found = service.diagnose_failure(failure)
    assert found is not None
    assert (found.cause, found.rule) == ("wrong-answer", "canary")
    assert "make fetch" in found.remedy


def _answer(text: str) -> Answer:
    return Answer(text, "", "m", "stop", 1, 1, None, 0.1)
