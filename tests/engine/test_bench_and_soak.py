"""A short bench and a short soak of a real engine, and the metrics that it shows meanwhile."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from launcher.ask import is_healthy
from launcher.cli import base as cli
from launcher.ready import follow
from tests.engine.conftest import Bench, Running
from tests.monitoring.conftest import METRICS, names_in
from tests.monitoring.queries import all_metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]
OF_SPECULATION = "vllm:spec_decode_"
LOOSE = ("first_token_s=60", "p99_first_token_s=120", "p99_gap_s=60", "tokens_a_second=0.1")
"""A CPU is no card; that each bound can fail is shown elsewhere."""


@pytest.fixture(scope="module")
def url(server: Running, bench: Bench) -> Iterator[str]:
    """Yield the shared server, or one of its own where a test has stopped that."""
    if is_healthy(server.service.base_url):
        yield server.service.base_url
        return
    plan = bench.plan()
    service = bench.start("load", plan)
    try:
        list(follow(service, plan.served_name))
        yield service.base_url
    finally:
        service.stop()


def run(folder: Path, *arguments: str) -> Any:
    bounds = (part for bound in LOOSE for part in ("--threshold", bound))
    result = CliRunner().invoke(cli.app, [*arguments, *bounds, "--out", str(folder)], standalone_mode=False)
    assert result.exception is None, result.exception
    assert (folder / f"{arguments[0]}.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    return json.loads((folder / f"{arguments[0]}.json").read_text(encoding="utf-8"))


def test_a_soak_of_a_real_engine_measures_it(url: str, tmp_path: Path) -> None:
    report = run(tmp_path, "soak", "--url", url, "--duration", "12s", "--concurrency", "4", "--context", "512")
    figures = report["figures"]
    assert report["passed"]
    assert report["is_finished"]
    assert figures["replies"] >= 4
    assert figures["first_token_short_p50_s"] > 0
    assert figures["gap_p50_s"] > 0
    assert 0 < figures["kv_usage_peak"] <= 1
    assert report["settings"]["no_tools_reason"].startswith("the service refuses requests with tools")


def test_a_bench_of_a_real_engine_measures_it(url: str, model_dir: Path, tmp_path: Path) -> None:
    sizes = ("--input-tokens", "16", "--output-tokens", "8", "--requests", "4")
    client = ("--url", url, "--tokenizer", str(model_dir), "--load", "batch16")
    report = run(tmp_path, "bench", *client, *sizes)
    figures = report["figures"]
    assert report["passed"]
    assert figures["batch16: replies"] == 16
    assert figures["batch16: failed"] == 0
    assert figures["batch16: tokens_a_second"] > 0
    assert figures["batch16: first_token_p99_s"] >= figures["batch16: first_token_p50_s"] > 0
    assert report["steps"][0]["client"]["total_output_tokens"] == 128


def test_a_real_engine_shows_every_metric_that_is_read(url: str) -> None:
    httpx.get(f"{url}/v1/models", trust_env=False)
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    names = names_in(text)
    wanted = {name for prefix in ("vllm:", "graft_", "process_", "http_") for name in all_metrics(prefix)}
    missing = wanted - names - all_metrics("graft_relay_")
    # This one decodes without drafts.
    assert all(name.startswith(OF_SPECULATION) for name in missing), missing
    recorded = names_in((METRICS / "vllm.txt").read_text(encoding="utf-8"))
    assert {name for name in recorded - names if not name.startswith(OF_SPECULATION)} == set()
    processes = ("MainProcess", "EngineCore", "VllmWorker-0")
    assert all(f'graft_info{{graft="0.1.0",process="{process}"' in text for process in processes)
