"""A bench and the comparison of two: what the client is asked, what becomes of its result, which checks can fail."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launcher.cli import base as cli
from launcher.errors import CheckFailed, UsageError
from launcher.measure import bench, bench_report, compare, html_report
from launcher.measure.bench import LOADS, SWEEP, ContainerClient, HostClient, Result, Settings, Step, arguments, figures
from launcher.measure.load_sample import Sample
from launcher.measure.load_verdict import Thresholds
from launcher.measure.soak_record import Record
from launcher.measure.soak_record import Settings as RecordSettings
from tests.launcher.fake_model import served

KEY = "a-key-that-must-not-leak"
SETTINGS = Settings("http://127.0.0.1:8000", "small", "cpu", "0.33.0", 512, 128, 16, LOADS, 0)
RAW = {
    **{"completed": 16, "failed": 0, "duration": 8.0, "request_throughput": 2.0, "output_throughput": 256.0},
    **{f"p{percent}_{name}_ms": 100.0 + percent for name in bench.TIMES for percent in bench.PERCENTILES},
}
FAKE = """\
import json, os, sys
print("warming up", file=sys.stderr)
arguments = sys.argv[1:]
value = lambda name: arguments[arguments.index(name) + 1]
raw = json.loads(os.environ["FAKE_RESULT"])
raw["seen"] = {"argv": arguments, "key": os.environ.get("OPENAI_API_KEY"), "offline": os.environ["HF_HUB_OFFLINE"]}
if os.environ.get("FAKE_FAILS"):
    sys.exit("RuntimeError: no tokenizer")
open(os.path.join(value("--result-dir"), value("--result-filename")), "w").write(json.dumps(raw))
"""


class FakeClient:
    """Returns one result for every run, and keeps what it was asked."""

    def __init__(self, **changes: Any) -> None:
        self.raw = {**RAW, **changes}
        self.asked: list[tuple[str, ...]] = []

    def run(self, arguments: tuple[str, ...], api_key: str | None, on_line: Callable[[str], None]) -> dict[str, Any]:
        self.asked.append(arguments)
        return self.raw


def record() -> Record:
    values = RecordSettings("http://127.0.0.1:8000", "small", "cpu", 0.0, 16, 640, False, None, 0, (), 22 * 2**30)
    return Record(values)


def measured(settings: Settings = SETTINGS, client: FakeClient | None = None) -> tuple[Result, ...]:
    return bench.run(settings, client or FakeClient(), None, record(), None, lambda step: None, lambda line: None)


def value(asked: tuple[str, ...], name: str) -> str:
    return asked[asked.index(name) + 1]


# What the client is asked.


def test_one_stream_sixteen_at_a_time_and_rates_around_what_that_gave() -> None:
    client = FakeClient()
    results = measured(client=client)
    assert [one.step.name for one in results] == ["single", "batch16", *(f"sweep {share:g}" for share in SWEEP)]
    assert [value(asked, "--max-concurrency") for asked in client.asked[:2]] == ["1", "16"]
    assert [float(value(asked, "--request-rate")) for asked in client.asked[2:]] == [2.0 * share for share in SWEEP]
    assert [value(asked, "--num-prompts") for asked in client.asked[:3]] == ["16", "64", "32"]


@pytest.mark.parametrize(("loads", "names"), [(("single",), ["single"]), (("batch16",), ["batch16"])])
def test_only_the_loads_that_are_wanted_are_run(loads: Any, names: list[str]) -> None:
    assert [one.step.name for one in measured(replace(SETTINGS, loads=loads))] == names


def test_the_arguments_are_the_whole_load() -> None:
    asked = arguments(SETTINGS, Step("single", 16, concurrency=1))
    assert value(asked, "--base-url") == SETTINGS.url
    assert value(asked, "--random-input-len") == "512"
    assert value(asked, "--random-output-len") == "128"
    assert value(asked, "--metric-percentiles") == "50,95,99"
    assert "--ignore-eos" in asked


def test_the_key_is_in_no_command(tmp_path: Path) -> None:
    client = ContainerClient("graft-vllm:1", tmp_path)
    argv = client.argv(arguments(SETTINGS, Step("single", 16, concurrency=1)))
    assert "OPENAI_API_KEY" in argv
    assert not any(KEY in part for part in argv)
    assert argv[argv.index("--network") + 1] == "host"
    assert {"--read-only", "no-new-privileges:true", "2000:0"} <= set(argv)
    assert f"{tmp_path}:/model:ro" in argv


@pytest.fixture
def host_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostClient:
    vllm = tmp_path / "vllm"
    (tmp_path / "fake.py").write_text(FAKE, encoding="utf-8")
    vllm.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path / "fake.py"}" "$@"\n', encoding="utf-8")
    vllm.chmod(0o755)
    monkeypatch.setenv("FAKE_RESULT", json.dumps(RAW))
    return HostClient(vllm, tmp_path / "model")


def test_the_client_gets_the_key_by_its_environment_and_stays_offline(host_client: HostClient) -> None:
    lines: list[str] = []
    raw = host_client.run(("--x", "1"), KEY, lines.append)
    assert raw["seen"]["key"] == KEY
    assert raw["seen"]["offline"] == "1"
    assert not any(KEY in part for part in raw["seen"]["argv"])
    assert value(tuple(raw["seen"]["argv"]), "--tokenizer") == str(host_client.tokenizer)
    assert lines == ["warming up"]
    assert "OPENAI_API_KEY" not in os.environ


def test_a_client_that_fails_says_why(host_client: HostClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAILS", "1")
    with pytest.raises(CheckFailed, match="RuntimeError: no tokenizer"):
        host_client.run((), None, lambda line: None)
    with pytest.raises(CheckFailed, match="not there; `make up` installs"):
        replace(host_client, vllm=Path("/no/such/vllm")).run((), None, lambda line: None)


def test_a_service_that_answers_nothing_is_no_result() -> None:
    with pytest.raises(CheckFailed, match="single: no request was answered"):
        measured(client=FakeClient(completed=0))


def test_the_clients_figures_get_our_names_and_seconds() -> None:
    found = figures({**RAW, "spec_decode_acceptance_rate": 62.5})
    assert found["first_token_p50_s"] == pytest.approx(0.15)
    assert found["gap_p99_s"] == pytest.approx(0.199)
    assert found["acceptance"] == 0.625
    assert figures(RAW)["acceptance"] is None


# The verdict.


def checked(seen: Record | None = None, **changes: Any) -> dict[str, bool | None]:
    seen = seen or record()
    seen.sample(Sample(running=1, started_s=1), {"GPU-0": 20 * 2**30}, 0.5)
    results = measured(client=FakeClient(**changes))
    return {check.name: check.passed for check in bench_report.checks(results, seen, Thresholds())}


def test_a_good_service_passes_every_check() -> None:
    assert set(checked().values()) == {True}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"p50_ttft_ms": 800.0}, "first token"),
        ({"p99_ttft_ms": 20_000.0}, "first token, p99"),
        ({"p99_itl_ms": 900.0}, "between tokens, p99"),
        ({"output_throughput": 12.0}, "tokens a second"),
        ({"failed": 3}, "errors"),
    ],
)
def test_each_threshold_fails_by_what_it_is_for_and_alone(changes: dict[str, Any], name: str) -> None:
    assert [check for check, answer in checked(**changes).items() if answer is not True] == [name]


def test_a_full_gpu_and_a_restart_fail_too() -> None:
    full = record()
    full.sample(None, {"GPU-0": 23 * 2**30}, 0.1)
    assert checked(full)["GPU memory"] is False
    again = record()
    again.sample(Sample(running=1, started_s=0), {}, 0.1)
    assert checked(again)["no interruption"] is False


def test_the_page_has_the_sweep_and_every_run() -> None:
    text = html_report.html(bench_report.page(SETTINGS, measured(), record(), Thresholds()))
    assert "First token, by requests sent a second" in text
    assert all(f"<td>{name}" in text for name in ("single", "batch16", "sweep 0.25"))


# The commands.


def run(*arguments: str) -> tuple[str, BaseException | None]:
    result = CliRunner().invoke(cli.app, arguments, standalone_mode=False)
    return result.output, result.exception


def test_another_service_needs_the_models_files(tmp_path: Path) -> None:
    assert "--url needs --tokenizer FOLDER" in str(run("bench", "--url", "http://127.0.0.1:1")[1])
    error = run("bench", "--url", "http://127.0.0.1:1", "--tokenizer", str(tmp_path))[1]
    assert f"{tmp_path}: no model is there" in str(error)


def test_the_command_writes_both_reports(
    tmp_path: Path, host_client: HostClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.cli.load._client", lambda service, tokenizer: (host_client, "0.33.0"))
    with served() as url:
        arguments = ("bench", "--url", url, "--load", "single", "--out", str(tmp_path))
        assert run(*arguments)[1] is None
        assert "no such load; there are single, batch16, sweep" in str(run("bench", "--url", url, "--load", "x")[1])
        too_long = run(*arguments, "--input-tokens", "16384")[1]
    assert isinstance(too_long, UsageError)
    assert "serves 16384 tokens; write smaller ones" in str(too_long)
    document = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert document["passed"]
    assert document["figures"]["single: tokens_a_second"] == 256.0
    assert (tmp_path / "bench.html").is_file()


# Comparing.


def report(**changes: Any) -> dict[str, Any]:
    return bench_report.as_json(SETTINGS, measured(client=FakeClient(**changes)), record(), Thresholds())


def test_a_comparison_says_what_is_better() -> None:
    slower = {"output_throughput": 128.0, "p50_ttft_ms": 300.0}
    found = {one.name: one for one in compare.ratios(report(), report(**slower))}
    assert found["single: tokens_a_second"].ratio == 0.5
    assert found["single: tokens_a_second"].is_better is False
    assert found["single: first_token_p50_s"].ratio == 2.0
    assert found["single: first_token_p50_s"].is_better is False
    assert found["single: duration_s"].is_better is None
    assert found["single: failed"].ratio is None
    back = {one.name: one for one in compare.ratios(report(**slower), report())}
    assert back["single: tokens_a_second"].is_better is True


def test_unlike_loads_are_compared_only_when_told(tmp_path: Path) -> None:
    first, second, soak = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "soak.json"
    other = report()
    other["settings"] = {**other["settings"], "input_tokens": 64, "url": "http://elsewhere:1"}
    first.write_text(json.dumps(report()))
    second.write_text(json.dumps(other))
    soak.write_text(json.dumps({**report(), "kind": "soak"}))
    error = run("compare", str(first), str(second))[1]
    assert isinstance(error, UsageError)
    assert "input_tokens: 512 and 64" in str(error)
    assert "url" not in str(error)
    assert "the second of a soak" in str(run("compare", str(first), str(soak))[1])
    output, failed = run("compare", str(first), str(second), "--force", "--json")
    assert failed is None
    assert json.loads(output)["unlike"] == ["input_tokens: 512 and 64"]
    assert "1.000" in run("compare", str(first), str(first))[0]


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not JSON"), ("[]", "not a report"), ('{"kind": "bench"}', "not a")]
)
def test_a_file_that_is_no_report_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    error = run("compare", str(path), str(path))[1]
    assert isinstance(error, UsageError)
    assert str(path) in str(error)
    assert message in str(error)


def test_every_figure_that_is_compared_has_a_direction_or_none_on_purpose() -> None:
    names = {name.rpartition(": ")[2] for name in report()["figures"]}
    undirected = {name for name in names if compare._direction(name) is None}
    assert undirected == {"replies", "duration_s"}
