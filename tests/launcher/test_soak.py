"""A soak of a stand-in service: what it records, that it resumes, and that each threshold can fail."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launcher.ask import Connection
from launcher.cli import base as cli
from launcher.errors import CheckFailed, UsageError
from launcher.measure import html_report, soak_record, soak_report
from launcher.measure.load_mix import SHARES, SIZES
from launcher.measure.load_sample import HttpSource, Sample
from launcher.measure.load_stats import Spread
from launcher.measure.load_verdict import Thresholds, changed, soak_checks
from launcher.measure.soak import Soak, refusal_of_tools
from launcher.measure.soak_record import Outcome, Record, Settings
from launcher.measure.target import Target, target_of
from launcher.measure.verdict import passed
from tests.launcher.fake_model import Asked, FakeModel, Said, served

GPU = "GPU-0"
TOKENS_A_REPLY = 9


def show_metrics(handler: FakeModel) -> None:
    """Answer /metrics as vLLM does; the attribute `starts` says how often the server was started."""
    if handler.path != "/metrics":
        FakeModel.do_GET(handler)
        return
    lines = ("vllm:num_requests_running 2", "vllm:num_requests_waiting 0", "vllm:kv_cache_usage_perc 0.5")
    generated = f"vllm:generation_tokens_total {TOKENS_A_REPLY * len(handler.asked)}"
    started = f"process_start_time_seconds {1000 + len(handler.starts)}"  # type: ignore[attr-defined]
    handler._send(200, ("\n".join((*lines, generated, started)) + "\n").encode(), "text/plain")


def service(**attributes: Any) -> Any:
    return served(**{"do_GET": show_metrics, "starts": [], **attributes})


def settings(url: str = "http://127.0.0.1:1", **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "url": url,
        "model": "obedient",
        "profile": None,
        "duration_s": 0.5,
        "concurrency": 4,
        "context_tokens": 4096,
        "has_tools": True,
        "no_tools_reason": None,
        "seed": 0,
    }
    return Settings(**{**values, **changes})


def soaked(
    folder: Path, url: str, record: Record | None = None, on_tick: Callable[[Record], None] = lambda record: None
) -> Record:
    record = record or Record(settings(url))
    with Connection(url) as connection:
        Soak(record, target_of(connection, None), HttpSource(url), folder / "state.json").run(on_tick)
    return record


def checked(record: Record, **thresholds: float) -> dict[str, bool | None]:
    return {check.name: check.passed for check in soak_checks(record, replace(Thresholds(), **thresholds))}


class Enough(Exception):
    """Ends a soak before its time."""


def until(is_enough: Callable[[Record], bool]) -> Callable[[Record], None]:
    def look(record: Record) -> None:
        if is_enough(record):
            raise Enough

    return look


LOOSE = {"first_token_s": 60.0, "p99_first_token_s": 60.0, "p99_gap_s": 60.0, "tokens_a_second": 0.0}
"""For a machine that is busy with other tests."""


def test_a_service_that_does_what_it_is_told_passes(tmp_path: Path) -> None:
    with service() as url:
        record = Record(settings(url, duration_s=60.0))
        with pytest.raises(Enough):
            soaked(tmp_path, url, record, until(lambda record: record.replies >= 60 and "kv_usage" in record.peaks))
    asked = sum(record.asked[size] for size in SIZES)
    assert {size: record.asked[size] / asked for size in SIZES} == pytest.approx(dict(SHARES), abs=0.08)
    assert record.asked["agent"] / asked == pytest.approx(0.5, abs=0.25)
    assert record.right("calls").rate == record.right("answers").rate == 1
    assert record.sums["reply_tokens"] == TOKENS_A_REPLY * record.replies
    assert record.peaks["kv_usage"] == 0.5
    assert passed(soak_checks(record, replace(Thresholds(), **LOOSE)))


def test_a_wrong_call_is_counted_and_shown(tmp_path: Path) -> None:
    def spoil(said: Said, asked: Asked) -> Said:
        return replace(said, calls=(("wrong_tool", "{}"),)) if said.calls and len(asked.body["messages"]) == 2 else said

    with service(spoil=staticmethod(spoil)) as url:
        record = Record(settings(url, duration_s=60.0))
        with pytest.raises(Enough):
            soaked(tmp_path, url, record, until(lambda record: bool(record.wrong) and record.right("calls").right > 0))
    calls = record.right("calls")
    assert 0 < calls.right < calls.total
    assert checked(record)["tool calls"] is False
    assert "wrong_tool" in record.wrong[0]


def test_a_refused_request_is_an_error_and_a_full_gateway_is_none(tmp_path: Path) -> None:
    def refuse(asked: Asked) -> tuple[int, str] | None:
        kind = len(asked.body["messages"][-1]["content"]) % 7
        return {0: (500, "EngineCore died"), 1: (429, "the KV cache is full")}.get(kind)

    with service(refuse=staticmethod(refuse)) as url:
        record = Record(settings(url, duration_s=60.0))
        with pytest.raises(Enough):
            soaked(tmp_path, url, record, until(lambda record: bool(record.errors and record.turned_away)))
    assert set(record.errors) == {"HTTP 500"}
    assert record.turned_away > 0
    assert checked(record)["errors"] is False
    assert any("EngineCore died" in event.said for event in record.events)


def test_a_restart_of_the_server_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.measure.soak.SAMPLE_INTERVAL_S", 0.05)
    starts: list[int] = []

    def restart(record: Record) -> None:
        if record.last_sample is not None and not starts:
            starts.append(1)
        if record.restarts:
            raise Enough

    with service(starts=starts) as url:
        record = Record(settings(url, duration_s=20.0))
        with pytest.raises(Enough):
            soaked(tmp_path, url, record, restart)
    assert record.restarts == 1
    assert checked(record)["no interruption"] is False


def test_a_gateway_without_its_engine_is_an_outage_that_ends(tmp_path: Path) -> None:
    def refuse(asked: Asked) -> tuple[int, str] | None:
        return (503, "the engine restarts") if asked.before == 0 and len(asked.body["messages"]) == 1 else None

    with service(refuse=staticmethod(refuse)) as url:
        record = Record(settings(url, duration_s=60.0, concurrency=8))
        with pytest.raises(Enough):
            soaked(tmp_path, url, record, until(lambda record: record.outage_s > 0))
    assert record.errors.total() == 0
    assert record.events[0].said == "the service does not answer"
    assert checked(record)["no interruption"] is False


def test_a_service_that_goes_away_is_an_outage_and_no_heap_of_errors(tmp_path: Path) -> None:
    record = Record(settings(duration_s=0.3))
    with service() as url, Connection(url) as connection:
        served_model = target_of(connection, None).served
    with Connection("http://127.0.0.1:1") as connection:
        Soak(record, Target(connection, served_model), None, tmp_path / "state.json").run(lambda record: None)
    assert record.errors.total() == 0
    assert [event.said for event in record.events] == ["the service does not answer"]
    assert checked(record)["no interruption"] is False
    assert checked(record)["errors"] is False
    assert not passed(soak_checks(record, Thresholds()))


def test_an_interrupted_soak_goes_on_where_it_was(tmp_path: Path) -> None:
    def interrupt(record: Record) -> None:
        if record.replies:
            raise KeyboardInterrupt

    with service() as url:
        with pytest.raises(KeyboardInterrupt):
            soaked(tmp_path, url, Record(settings(url, duration_s=60.0)), interrupt)
        kept = soak_record.load(tmp_path / "state.json")
        assert kept is not None
        assert not kept.is_finished
        before_s, replies, sessions = kept.elapsed_s, kept.replies, kept.sessions
        assert replies > 0
        with pytest.raises(Enough):
            soaked(tmp_path, url, kept, until(lambda record: record.replies > replies + 5))
    assert kept.elapsed_s > before_s
    assert kept.sessions > sessions


def test_what_breaks_off_when_a_soak_is_interrupted_does_not_count(tmp_path: Path) -> None:
    holds = threading.Event()

    def hold(asked: Asked) -> None:
        holds.wait(20)

    def interrupt(record: Record) -> None:
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    with service(refuse=staticmethod(hold)) as url:
        record = Record(settings(url, duration_s=60.0))
        with pytest.raises(KeyboardInterrupt):
            soaked(tmp_path, url, record, interrupt)
        workers = [one for one in threading.enumerate() if one not in before and one.name.endswith("(_guarded)")]
        assert len(workers) > 1
        holds.set()
        for worker in workers:
            worker.join(20)
    assert (record.replies, record.errors, record.events) == (0, {}, [])


def test_a_server_that_was_started_anew_between_two_runs_was_not_interrupted() -> None:
    record = good_record()
    record.resume()
    record.sample(Sample(running=1, started_s=2, kv_usage=0.5, resident_bytes=2**30), {}, 1201.0)
    assert (record.restarts, record.runs) == (0, 2)
    assert checked(record)["no interruption"]
    record.unreachable(1201.0)
    record.elapsed_s = 1210.0
    record.resume()
    assert record.outage_s == 9.0
    assert checked(record)["no interruption"] is False


def test_the_record_is_the_same_after_its_file(tmp_path: Path) -> None:
    record = Record(settings(gpu_uuids=(GPU,), gpu_bound_bytes=10))
    record.sample(Sample(running=1, kv_usage=0.5, started_s=1), {GPU: 5}, 1.0)
    record.add(Outcome("short", True, True, None, "", 0.1, (0.01, 0.02), 0.5, 100, 9, True), 1.5, 250)
    record.add(Outcome("long", False, False, "broken off", "the answer broke off"), 2.0, 0)
    soak_record.save(record, tmp_path / "state.json")
    again = soak_record.load(tmp_path / "state.json")
    assert again is not None
    assert soak_report.as_json(again, Thresholds()) == soak_report.as_json(record, Thresholds())
    assert again.timeline.to_json() == record.timeline.to_json()
    assert soak_record.load(tmp_path / "absent.json") is None


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 1}', '{"schema": 2}'])
def test_a_file_that_is_no_record_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"not the record of a soak.*--new begins anew"):
        soak_record.load(path)


# Each threshold, by a record that misses it alone.


def good_record() -> Record:
    """Twenty minutes of a service that keeps to everything."""
    record = Record(settings(gpu_uuids=(GPU,), gpu_bound_bytes=22 * 2**30, duration_s=1200, concurrency=16))
    for minute in range(20):
        at_s = 60.0 * minute + 1
        record.sample(
            Sample(running=16, kv_usage=0.5, started_s=1, resident_bytes=2**30, generated_tokens=6000 * minute),
            {GPU: 20 * 2**30},
            at_s,
        )
        for size in ("short", "medium", "long"):
            record.add(Outcome(size, True, True, None, "", 0.2, (0.02,) * 50, 2.0, 500, 700, True), at_s, 1200)
    record.elapsed_s = 1200.0
    record.is_finished = True
    return record


def late_first_token(record: Record) -> None:
    record.spreads["first_token short"] = spread_of(0.8)


def late_tail(record: Record) -> None:
    record.spreads["first_token"] = spread_of(*[0.2] * 50, *[30.0] * 5)


def slow_gaps(record: Record) -> None:
    record.spreads["gap"] = spread_of(*[0.02] * 50, *[2.0] * 5)


def slow(record: Record) -> None:
    record.sums["reply_tokens"] = 20 * 1200


def full_gpu(record: Record) -> None:
    record.sample(None, {GPU: 23 * 2**30}, 600.0)


def growing(record: Record) -> None:
    for minute in range(14, 20):
        for _ in range(5):
            record.sample(None, {GPU: 21 * 2**30}, 60.0 * minute + 2)


def leaking_server(record: Record) -> None:
    for minute in range(14, 20):
        record.sample(Sample(running=1, started_s=1, resident_bytes=4 * 2**30), {}, 60.0 * minute + 2)


def restarted(record: Record) -> None:
    record.sample(Sample(running=1, started_s=2), {}, 700.0)


def away(record: Record) -> None:
    record.unreachable(700.0)
    record.up(730.0)


def still_away(record: Record) -> None:
    record.unreachable(1190.0)


def failing(record: Record) -> None:
    record.add(Outcome("short", False, False, "HTTP 500", "died"), 700.0, 0)


def wrong_call(record: Record) -> None:
    record.add(Outcome("short", True, True, None, "wrong", 0.2, (), 2.0, 500, 0, False), 700.0, 1200)


def spread_of(*values: float) -> Spread:
    spread = Spread()
    spread.add(values)
    return spread


def test_the_good_record_passes_every_check() -> None:
    assert set(checked(good_record()).values()) == {True}


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (late_first_token, "first token"),
        (late_tail, "first token, p99"),
        (slow_gaps, "between tokens, p99"),
        (slow, "tokens a second"),
        (full_gpu, "GPU memory"),
        (growing, "memory growth"),
        (leaking_server, "memory growth"),
        (restarted, "no interruption"),
        (away, "no interruption"),
        (still_away, "no interruption"),
        (failing, "errors"),
        (wrong_call, "tool calls"),
    ],
)
def test_each_threshold_fails_by_what_it_is_for_and_alone(spoil: Callable[[Record], None], name: str) -> None:
    record = good_record()
    spoil(record)
    found = checked(record)
    assert [check for check, answer in found.items() if answer is not True] == [name]
    assert not passed(soak_checks(record, Thresholds()))


def test_nothing_measured_is_nothing_passed() -> None:
    assert not passed(soak_checks(Record(settings()), Thresholds()))


def test_what_a_service_cannot_do_is_not_asked_of_it() -> None:
    record = Record(settings(has_tools=False, no_tools_reason="no tool_call_parser"))
    assert checked(record)["tool calls"] is None
    assert checked(record)["GPU memory"] is None
    assert checked(record)["memory growth"] is None


def test_thresholds_are_set_by_name() -> None:
    assert changed(Thresholds(), ["first_token_s=2", "gpu_gib=20"]) == Thresholds(first_token_s=2, gpu_gib=20)
    with pytest.raises(UsageError, match="no_such=1: write NAME=VALUE; names are first_token_s"):
        changed(Thresholds(), ["no_such=1"])
    with pytest.raises(UsageError, match="'fast' is no number"):
        changed(Thresholds(), ["first_token_s=fast"])


# Reports and the command.


def test_the_page_shows_every_chart_that_there_is_data_for() -> None:
    record = good_record()
    record.sample(Sample(running=1, started_s=1, drafted_tokens=0, accepted_tokens=0), {}, 1100.0)
    record.sample(Sample(running=1, started_s=1, drafted_tokens=90, accepted_tokens=60), {}, 1110.0)
    text = html_report.html(soak_report.page(record, Thresholds()))
    for title in ("Tokens a second", "First token", "KV cache in use", "Accepted drafts", "GPU memory"):
        assert f"<h2>{title}</h2>" in text
    assert "Prompt tokens found in the prefix cache" not in text


def run(*arguments: str) -> tuple[str, BaseException | None]:
    result = CliRunner().invoke(cli.app, ["soak", *arguments], standalone_mode=False)
    return result.output, result.exception


def test_the_command_writes_both_reports_and_ends_with_the_verdict(tmp_path: Path) -> None:
    with service() as url:
        loose = (part for name, bound in LOOSE.items() for part in ("--threshold", f"{name}={bound}"))
        arguments = ("--url", url, "--duration", "0.4s", "--concurrency", "4", "--out", str(tmp_path), *loose)
        output, error = run(*arguments, "--json")
        assert error is None
        _, failed = run(*arguments, "--threshold", "tokens_a_second=1e9")
    document = json.loads((tmp_path / "soak.json").read_text(encoding="utf-8"))
    assert json.loads(output[output.index("{") : output.rindex("}") + 1])["passed"]
    assert isinstance(failed, CheckFailed)
    assert str(failed) == "tokens a second"
    assert not document["passed"]
    assert document["settings"]["has_tools"]
    assert (tmp_path / "soak.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_an_interrupted_soak_is_neither_forgotten_nor_mixed_with_another(tmp_path: Path) -> None:
    with service() as url:
        record = Record(settings(url, duration_s=0.3), elapsed_s=0.1)
        soak_record.save(record, tmp_path / "state.json")
        loose = (part for name, bound in LOOSE.items() for part in ("--threshold", f"{name}={bound}"))
        arguments = ("--url", url, "--duration", "0.5s", "--out", str(tmp_path), *loose)
        assert "--resume goes on with it" in str(run(*arguments)[1])
        assert run(*arguments, "--resume")[1] is None
        assert json.loads((tmp_path / "soak.json").read_text())["events"][0]["kind"] == "resumed"
        assert "no interrupted soak is there" in str(run(*arguments, "--resume")[1])
        elsewhere = Record(settings("http://127.0.0.1:1"), elapsed_s=0.1)
        soak_record.save(elsewhere, tmp_path / "state.json")
        assert "the soak was of http://127.0.0.1:1" in str(run(*arguments, "--resume")[1])


@pytest.mark.parametrize("text", ["10", "0s", "ten minutes", "-1m"])
def test_a_duration_is_a_number_with_a_unit(text: str) -> None:
    error = run("--url", "http://127.0.0.1:1", f"--duration={text}")[1]
    assert isinstance(error, UsageError)
    assert "write a number and a unit, such as 90s, 10m or 72h" in str(error)


def test_a_service_that_refuses_tools_is_loaded_without_them() -> None:
    def refuse(asked: Asked) -> tuple[int, str] | None:
        return (400, "tool choice requires --enable-auto-tool-choice") if asked.body.get("tools") else None

    with service(refuse=staticmethod(refuse)) as url, Connection(url) as connection:
        reason = refusal_of_tools(target_of(connection, None))
    assert reason is not None
    assert "--enable-auto-tool-choice" in reason
    with service() as url, Connection(url) as connection:
        assert refusal_of_tools(target_of(connection, None)) is None
