"""`graft verify` against a stand-in that does what it is told, and against ones that are broken in one way each."""

import json
import random
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from launcher import cli
from launcher.ask import Answer, AskFailed, Connection, ServedModel, Unreachable
from launcher.measure import ladder
from launcher.measure.dialogues import Task
from launcher.measure.heatmap import heatmap_svg
from launcher.measure.ladder import Cell, Ladder
from launcher.measure.replies import Share, lower_bound, needed_without_failure
from launcher.measure.target import Target, ToolChoice, target_of
from launcher.measure.verdict import Check, Skipped
from launcher.measure.verify import Settings, VerifyReport, quick, verify
from tests.launcher.fake_model import Asked, Said, served
from tests.launcher.fake_vllm import unused_port

SMALL = Settings(
    seed=7,
    context_tokens=4600,
    tool_replies=24,
    repeats=4,
    prefix_tokens=600,
    depths=(0.0, 0.9),
    compared=6,
    concurrency=2,
)
Spoil = Callable[[Said, Asked], Said]


@dataclass
class Silent:
    """Where the progress goes: what was begun is kept."""

    phases: list[str]

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def progress(self, done: float, total: float, unit: str, detail: str = "") -> None:
        assert 0 < done <= total


def verified(
    settings: Settings = SMALL, reference: dict[str, Any] | None = None, no_tools: str | None = None, **server: Any
) -> VerifyReport:
    """Verify a stand-in with these attributes, against another where one is given."""
    with ExitStack() as stack:
        target = target_of(stack.enter_context(Connection(stack.enter_context(served(**server)))), None)
        if reference is None:
            return verify(target, settings, Silent([]), no_tools=no_tools)
        other = target_of(stack.enter_context(Connection(stack.enter_context(served(**reference)))), None)
        return verify(target, settings, Silent([]), no_tools=no_tools, reference=lambda: nullcontext(other))


def check(report: VerifyReport, name: str) -> Check:
    (found,) = [one for one in report.checks if one.name == name]
    return found


def failed(report: VerifyReport) -> list[str]:
    return [one.name for one in report.checks if one.passed is False]


def spoiled(wrong: Callable[[Asked], bool], to: Callable[[Said], Said]) -> dict[str, Any]:
    return {"spoil": staticmethod(lambda said, asked: to(said) if wrong(asked) else said)}


def asks_for_call(asked: Asked) -> bool:
    return bool(asked.body.get("tools")) and asked.body["max_tokens"] > 1


def test_a_service_that_does_as_it_is_told_passes() -> None:
    report = verified()
    assert report.passed
    assert [one.passed for one in report.checks] == [True, True, True, True, None]
    assert report.failures == ()
    assert not isinstance(report.tools, Skipped)
    assert set(report.tools.kinds) == {"single", "parallel", "nested", "code", "unicode", "null", "no-call", "chain"}
    assert set(report.tools.hows) == {"whole", "streamed", "required"}


def one_wrong_call(done: list[Asked]) -> dict[str, Any]:
    """Return a stand-in's attributes: its first whole call is wrong, whose request is put into `done`."""

    def spoil(said: Said, asked: Asked) -> Said:
        if asked.streams or not said.calls or not asks_for_call(asked) or done:
            return said
        done.append(asked)
        return replace(said, text="lost: ", calls=((said.calls[0][0], '{"wrong": 1}'), *said.calls[1:]))

    return {"spoil": staticmethod(spoil)}


def test_one_wrong_value_fails_the_tool_calls_and_is_listed_with_its_raw_text() -> None:
    done: list[Asked] = []
    report = verified(**one_wrong_call(done))
    assert failed(report) == ["tool calls", "streaming = whole"]
    found = check(report, "tool calls")
    assert found.value is not None
    assert found.threshold == 0.9995
    assert found.value < found.threshold
    first = report.failures[0]
    assert any("wrong: not asked for" in fault for fault in first.faults)
    assert first.raw.startswith("lost: <tool_call>")
    assert first.asked == done[0].body["messages"][-1]["content"]


def test_a_model_may_have_a_share_of_its_own_to_reach() -> None:
    report = verified(replace(SMALL, right_replies=0.9), **one_wrong_call([]))
    assert failed(report) == ["streaming = whole"]
    found = check(report, "tool calls")
    assert (found.passed, found.threshold) == (True, 0.9)
    assert "to show 90.00 %, 29 in a row must be right" in found.said


def test_right_arguments_of_other_bytes_fail_the_stream_alone() -> None:
    def to(said: Said) -> Said:
        dense = [(name, json.dumps(json.loads(text), separators=(",", ":"))) for name, text in said.calls]
        return replace(said, calls=tuple(dense))

    report = verified(**spoiled(lambda asked: asked.streams, to))
    assert failed(report) == ["streaming = whole"]
    assert {one.how for one in report.failures} == {"streamed unlike whole"}


def test_a_reply_that_changes_when_its_prefix_is_cached_fails_the_prefix_alone() -> None:
    def to(said: Said) -> Said:
        return Said(text="of of of of", finish_reason="length")

    report = verified(**spoiled(lambda asked: asked.before >= 2 and asked.prompt_tokens > 500, to))
    assert failed(report) == ["shared prefix"]
    found = check(report, "shared prefix")
    assert found.value == 1 / 3
    assert {one.how for one in report.failures} == {"whole", "repeated"}
    assert any("of of of of" in one.raw for one in report.failures)


def test_the_ladder_stops_at_its_first_miss_and_tells_what_holds() -> None:
    def lost(asked: Asked) -> bool:
        return not asked.body.get("tools") and asked.prompt_tokens > 1500

    report = verified(**spoiled(lost, lambda said: Said("551204")))
    assert failed(report) == ["needles"]
    assert not isinstance(report.needles, Skipped)
    assert report.needles.holds_tokens == 1024
    assert max(cell.step_tokens for cell in report.needles.cells) == 2048
    assert "It holds up to 1,024 tokens; first miss at " in check(report, "needles").said
    assert all(0.97 * one.step_tokens <= one.prompt_tokens <= one.step_tokens for one in report.needles.cells)


def test_no_text_of_the_picture_is_cut_at_its_edge() -> None:
    cells = (Cell(512, 505, 0.0, True, None), Cell(1024, 1001, 0.0, False, "got '1', not 2"))
    picture = ElementTree.fromstring(heatmap_svg(Ladder(9216, 8192, cells, 8192, 512, ()), "Needles"))
    texts = picture.findall(".//{*}text")
    assert "of which the model itself recalls 8,192 reliably." in " ".join(str(one.text) for one in texts)
    assert all(int(one.attrib["x"]) + 7 * len(str(one.text)) <= int(picture.attrib["width"]) for one in texts)


class Bytes(Target):
    """Counts a prompt as a tokenizer of single bytes does, where one sentence is much of a short text."""

    def count_tokens(self, task: Task) -> int:
        return 40 + len(task.messages[0]["content"])

    def ask(self, task: Task, *, stream: bool = False, tool_choice: ToolChoice = "auto") -> Answer:
        raise AskFailed("of no matter here")


def test_a_text_of_every_length_is_found_for_a_tokenizer_of_bytes_too() -> None:
    with Connection("http://127.0.0.1:1") as connection:
        target = Bytes(connection, ServedModel("bytes", None, "vllm"))
        for seed in range(30):
            for length in (300, 512):
                found = ladder.climb(
                    target, random.Random(seed), 2048, lengths=(length,), depths=(0.0,), on_done=lambda *_: None
                )
                assert 0.75 * length < found.cells[0].prompt_tokens <= length


def test_a_reply_that_differs_from_the_reference_where_that_is_sure_is_wrong() -> None:
    to = spoiled(lambda asked: not asked.body.get("tools"), lambda said: replace(said, text=f"x{said.text}"))
    report = verified(reference={}, **{**to})
    assert "greedy equality" in failed(report)
    found = check(report, "greedy equality")
    assert found.value == 3
    assert any("margin 3.990 nats" in fault for one in report.failures for fault in one.faults)


def test_equal_replies_pass_the_comparison_and_near_ties_do_too() -> None:
    assert check(verified(reference={}), "greedy equality").passed
    near = spoiled(lambda asked: not asked.body.get("tools"), lambda said: replace(said, text=f"x{said.text}"))
    report = verified(reference={"lead": 0.04}, **near)
    found = check(report, "greedy equality")
    assert found.passed
    assert "3 differ at a near tie (less than 0.05 nats), 0 are wrong" in found.said


def test_a_model_that_cannot_call_tools_is_skipped_with_the_reason_and_not_passed() -> None:
    report = verified(no_tools="m cannot call tools: its model file names no tool_call_parser")
    assert [one.passed for one in report.checks] == [None, None, None, True, None]
    assert "names no tool_call_parser" in check(report, "tool calls").said


def test_a_server_that_refuses_tools_is_skipped_with_what_it_said() -> None:
    def refuse(asked: Asked) -> tuple[int, str] | None:
        return (400, '"auto" tool choice requires --enable-auto-tool-choice') if asked.body.get("tools") else None

    report = verified(refuse=staticmethod(refuse))
    assert check(report, "tool calls").passed is None
    assert "requires --enable-auto-tool-choice" in check(report, "tool calls").said


def test_nothing_that_could_be_checked_is_no_pass() -> None:
    report = verified(replace(SMALL, context_tokens=200), no_tools="it cannot")
    assert [one.passed for one in report.checks] == [None] * 5
    assert not report.passed


def test_a_reply_that_the_server_refuses_is_a_failure_and_the_suite_goes_on() -> None:
    def refuse(asked: Asked) -> tuple[int, str] | None:
        return (500, "EngineCore died") if asks_for_call(asked) and asked.streams else None

    report = verified(refuse=staticmethod(refuse))
    assert "tool calls" in failed(report)
    assert any("HTTP 500: EngineCore died" in fault for one in report.failures for fault in one.faults)
    assert not isinstance(report.tools, Skipped)
    assert report.tools.hows["whole"].rate == 1.0
    assert report.tools.hows["streamed"].right == 0


def test_another_server_than_vllm_gets_no_fields_of_vllm_and_lengths_come_from_its_usage() -> None:
    asked: list[Asked] = []
    report = verified(owner="someone", has_tokenize=False, asked=asked)
    assert report.passed
    fields = {field for one in asked for field in one.body}
    assert not fields & {"chat_template_kwargs", "return_token_ids"}
    assert not isinstance(report.needles, Skipped)
    assert report.needles.climbed


def test_a_server_that_is_gone_ends_the_run() -> None:
    with served() as url, Connection(url) as connection:
        target = target_of(connection, None)
    with Connection(f"http://127.0.0.1:{unused_port()}") as gone, pytest.raises(Unreachable):
        verify(replace(target, connection=gone), SMALL, Silent([]))


def test_the_quick_check_asks_little() -> None:
    asked: list[Asked] = []
    report = verified(quick(1, 8192), asked=asked)
    assert report.passed
    assert len([one for one in asked if one.body["max_tokens"] > 1]) < 25


@pytest.mark.parametrize(
    ("right", "total", "bound"),
    [(0, 5, 0.0), (1, 1, 0.05), (120, 120, 0.9753), (119, 120, 0.9611), (5990, 5990, 0.9995)],
)
def test_the_bound_is_that_of_clopper_and_pearson(right: int, total: int, bound: float) -> None:
    assert lower_bound(right, total) == pytest.approx(bound, abs=5e-5)
    assert Share(right, total).at_least == lower_bound(right, total)


def test_the_replies_that_show_the_acceptance_number_are_told() -> None:
    assert needed_without_failure(0.9995) == 5990
    assert lower_bound(5990, 5990) >= 0.9995 > lower_bound(5989, 5989)
    assert "to show 99.95 %, 5,990 in a row must be right" in check(verified(), "tool calls").said


# The command.


@dataclass(frozen=True)
class Ended:
    """How the command ended."""

    exit_code: int
    out: str
    err: str


Graft = Callable[..., Ended]


@pytest.fixture
def graft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Graft:
    monkeypatch.setenv("GRAFT_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("GRAFT_API_KEY", raising=False)

    def run(*arguments: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["graft", "verify", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        return Ended(code, *capsys.readouterr())

    return run


def test_the_command_says_what_it_found_and_writes_report_and_picture(graft: Graft, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "report"
    with served() as url:
        ended = graft("--url", f"{url}/v1", "--quick", "--seed", "3", "--out", folder)
    assert (ended.exit_code, "PASSED obedient at" in ended.out) == (0, True), ended
    document = json.loads((folder / "verify.json").read_text(encoding="utf-8"))
    assert (document["passed"], document["settings"]["seed"]) == (True, 3)
    picture = ElementTree.parse(folder / "needles.svg").getroot()
    assert [text for text in picture.itertext() if text == "found"] == ["found"] * 2


def test_a_failed_check_ends_with_1_and_json_has_the_raw_text(graft: Graft) -> None:
    wrong = spoiled(asks_for_call, lambda said: Said(text="<tool_call>\n<function=", finish_reason="stop"))
    with served(**wrong) as url:
        ended = graft("--url", url, "--quick", "--json")
        shown = graft("--url", url, "--quick")
    assert (ended.exit_code, shown.exit_code) == (1, 1)
    document = json.loads(ended.out)
    assert document["tools"]["failures"][0]["raw"] == "<tool_call>\n<function="
    assert "tool calls, shared prefix" in ended.err
    assert re.search(r"FAIL\s+tool calls", shown.out)
    assert r"wrote <tool_call>\n<function=" in shown.out


def test_the_same_seed_asks_the_same(graft: Graft) -> None:
    first: list[Asked] = []
    second: list[Asked] = []
    for asked in (first, second):
        with served(asked=asked) as url:
            graft("--url", url, "--quick", "--seed", "9", "--concurrency", "1")
    assert [one.body for one in first] == [one.body for one in second]


def test_an_api_key_is_read_from_a_file_or_from_the_environment(
    graft: Graft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n", encoding="utf-8")
    with served(api_key="secret") as url:
        assert "API key" in graft("--url", url, "--quick").err
        assert graft("--url", url, "--quick", "--api-key-file", file).exit_code == 0
        monkeypatch.setenv("GRAFT_API_KEY", "secret")
        assert graft("--url", url, "--quick").exit_code == 0


def test_a_reference_is_asked_with_a_key_of_its_own(graft: Graft, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("other", encoding="utf-8")
    with served() as url, served(api_key="other") as reference:
        ended = graft("--url", url, "--quick", "--against", reference, "--against-api-key-file", file)
        assert graft("--url", url, "--quick", "--against", reference).exit_code == 1
    assert ended.exit_code == 0
    assert "of 4 replies 4 equal the reference's" in ended.out


def test_wrong_options_are_told(graft: Graft, tmp_path: Path) -> None:
    with served(max_model_len=4096) as url, served(max_model_len=None) as silent:
        cases: list[tuple[tuple[str | Path, ...], str]] = [
            (("--url", "here"), "write http://HOST:PORT"),
            (("--url", url, "--model", "other"), "serves obedient"),
            (("--url", url, "--context", "5000"), "serves at most 4096 tokens"),
            (("--url", silent), "name it with --context"),
            (("--url", url, "--api-key-file", tmp_path / "none"), "No such file"),
            (("--model", "other"), "go with --url"),
            (("--url", url, "--restart-without-speculation"), "is for a profile's service"),
            (("--url", url, "--against", "there"), "there: is no URL"),
            (("no-such-profile",), "not started; `make up PROFILE=no-such-profile` starts it"),
            ((), "nothing runs"),
        ]
        for arguments, said in cases:
            ended = graft(*arguments)
            assert (ended.exit_code, said in ended.err) == (2, True), (arguments, ended)
