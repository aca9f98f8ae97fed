"""Percentiles in bounded memory, the mix of requests, what /metrics says, and the page with plots."""

import random
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from launcher.host import nvml
from launcher.host.facts import Gpu, Nvml
from launcher.measure import html_report, load_mix, load_sample
from launcher.measure.html_report import Chart, Mark, Page, Table
from launcher.measure.load_mix import SHARES, SIZES, next_size, prompt_tokens, session
from launcher.measure.load_sample import HttpSource, Sample, gained, parse
from launcher.measure.load_stats import MOST_BUCKETS, Spread, Timeline
from launcher.measure.verdict import Check

METRICS = Path(__file__).parent.parent / "data" / "metrics" / "vllm.txt"


# Percentiles and the timeline.


def test_percentiles_of_many_values_are_near_the_true_ones() -> None:
    rng, spread = random.Random(1), Spread()
    for _ in range(100):
        spread.add(rng.expovariate(1) for _ in range(1000))
    assert spread.count == 100_000
    for share, true in ((0.5, 0.6931), (0.95, 2.9957), (0.99, 4.6052)):
        assert spread.quantile(share) == pytest.approx(true, rel=0.03)


def test_a_spread_survives_its_file_and_takes_in_another() -> None:
    one, other = Spread(), Spread()
    one.add([1.0, 2.0])
    other.add([3.0, 9.0])
    again = Spread.from_json(one.to_json())
    again.take(other)
    again.take(Spread())
    assert (again.count, again.largest) == (4, 9.0)
    assert Spread.from_json(Spread().to_json()).summary() == {
        "count": 0,
        "p50": None,
        "p95": None,
        "p99": None,
        "max": None,
    }


def test_three_days_fit_into_few_buckets_and_lose_nothing() -> None:
    timeline = Timeline()
    for second in range(0, 72 * 3600, 60):
        bucket = timeline.at(second)
        bucket.count("replies")
        bucket.gauge("kv", second / (72 * 3600))
        bucket.spread("gap", [0.1])
    assert len(timeline.buckets) <= MOST_BUCKETS
    assert sum(bucket.sums["replies"] for bucket in timeline.buckets) == 72 * 60
    assert sum(bucket.spreads["gap"].count for bucket in timeline.buckets) == 72 * 60
    means = [value for _, value in timeline.series(lambda bucket: bucket.mean("kv"))]
    assert means == sorted(means, key=lambda value: value or 0)
    assert Timeline.from_json(timeline.to_json()).to_json() == timeline.to_json()


def test_a_stretch_without_a_look_has_no_value() -> None:
    timeline = Timeline(width_s=1.0)
    timeline.at(0.5).gauge("kv", 0.3)
    timeline.at(3.5).gauge("kv", 0.5)
    timeline.at(4.5)
    assert timeline.series(lambda bucket: bucket.mean("kv")) == [(0.5, 0.3), (1.5, None), (2.5, None), (3.5, 0.5)]


# The mix.


def test_sizes_keep_their_shares_from_the_first_request_on() -> None:
    asked: Counter[str] = Counter()
    for _ in range(1000):
        asked[next_size(asked)] += 1
    assert {size: asked[size] / 1000 for size in SIZES} == pytest.approx(dict(SHARES), abs=0.002)


@pytest.mark.parametrize("context", [2048, 32768, 262144])
def test_sizes_are_apart_and_leave_room_for_the_reply(context: int) -> None:
    rng = random.Random(0)
    drawn = {size: [prompt_tokens(size, context, rng) for _ in range(200)] for size in SIZES}
    assert max(drawn["short"]) < min(drawn["medium"]) <= max(drawn["medium"]) < min(drawn["long"])
    assert max(drawn["long"]) + load_mix.REPLY_TOKENS["long"] < context


def test_an_agents_history_grows_with_right_replies_in_it() -> None:
    turns = list(session("medium", "seed", 8192, 2.5, is_agent=True, has_tools=True))
    assert len(turns) >= 6
    assert all(turn.is_agent and turn.is_judged and turn.task.tools for turn in turns)
    lengths = [len(turn.task.messages) for turn in turns]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) == len(lengths)
    for before, after in pairwise(turns):
        assert after.task.messages[: len(before.task.messages)] == before.task.messages
    last = turns[-1].task.messages
    assert {"role": "assistant", "content": "Done."} in last
    offered = {tool["function"]["name"] for tool in turns[-1].task.tools}
    called = {call["function"]["name"] for message in last for call in message.get("tool_calls", ())}
    assert called <= offered


def test_without_tools_an_agent_is_a_conversation() -> None:
    turns = list(session("short", "seed", 8192, 2.5, is_agent=True, has_tools=False))
    assert len(turns) >= 2
    assert all(not turn.task.tools and not turn.is_judged for turn in turns)
    assert len(turns[-1].task.messages) == 2 * len(turns) - 1


def test_the_same_seed_asks_the_same() -> None:
    first, again, other = (
        list(session("long", seed, 4096, 2.5, is_agent=False, has_tools=True)) for seed in ("0-1", "0-1", "0-2")
    )
    assert first == again
    assert first != other


# What the server says.


def test_a_real_metrics_page_is_read() -> None:
    sample = parse(METRICS.read_text(encoding="utf-8"))
    assert sample is not None
    assert (sample.drafted_tokens, sample.accepted_tokens) == (52, 41)
    assert sample.started_s == pytest.approx(1796031309.09)
    assert sample.generated_tokens == 128


@pytest.mark.parametrize("text", ["", "not metrics {", "up 1\n"])
def test_another_page_is_no_answer(text: str) -> None:
    assert parse(text) is None


def test_counters_begin_anew_after_a_restart() -> None:
    before = Sample(generated_tokens=100, drafted_tokens=None, started_s=1)
    assert gained(before, Sample(generated_tokens=130, started_s=1)) == {"generated_tokens": 30}
    assert gained(before, Sample(generated_tokens=5, started_s=2)) == {"generated_tokens": 5}


def test_a_server_that_is_away_gives_no_page() -> None:
    assert HttpSource("http://127.0.0.1:1").read() is None
    assert load_sample.first_that_answers([HttpSource("http://127.0.0.1:1")]) is None


def test_the_memory_of_the_services_gpus_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu(index=number, uuid=f"GPU-{number}", total_mib=24000, free_mib=4000) for number in range(2))
    monkeypatch.setattr(nvml, "read", lambda: Nvml(gpus=(*gpus, Gpu(index=2, uuid="GPU-x", error="lost"))))
    assert load_sample.gpu_used_bytes(["GPU-1", "GPU-x"]) == {"GPU-1": 20000 * 2**20}
    assert load_sample.gpu_used_bytes([]) == {}


# The page.

CHART = Chart(
    "A <title>",
    {"one": [(0, 1.0), (1, None), (2, 3.0), (3, 2.0)], "nothing": [(0, None)]},
    x=html_report.clock,
    marks=[Mark(2, "restart & more")],
)
PAGE = Page(
    title="Soak of <model>",
    facts={"Service": "http://127.0.0.1:8000"},
    passed=False,
    checks=[Check("errors", False, 0.1, 0.01, "10 % < 1"), Check("GPU memory", None, None, None, "no GPU")],
    charts=[CHART, Chart("Empty", {"nothing": [(0, None)]})],
    tables=[Table("Times", ("what",), [["first token"]]), Table("No rows", ("what",), [])],
)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.references += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href", "action")]


def test_the_page_needs_nothing_beside_it() -> None:
    text = html_report.html(PAGE)
    reader = _Reader()
    reader.feed(text)
    assert reader.references == []
    assert reader.tags["script"] == reader.tags["link"] == reader.tags["img"] == 0
    assert "url(" not in text
    assert "@import" not in text


def test_the_page_says_what_failed_and_draws_what_there_is() -> None:
    text = html_report.html(PAGE)
    assert '<span class="failed">failed</span>' in text
    assert "Soak of &lt;model&gt;" in text
    assert "10 % &lt; 1" in text
    assert "not asked" in text
    assert text.count("<svg") == 1
    assert "No rows" not in text


def test_a_gap_breaks_the_line_and_a_mark_has_its_words() -> None:
    tree = ElementTree.fromstring(html_report.svg(CHART))
    lines = [len(line.attrib["points"].split()) for line in tree.iter("polyline")]
    assert lines == [1, 2]
    titles = [title.text for title in tree.iter("title")]
    assert "0:00:02: restart & more" in titles
    assert "one, 0:00:03: 2" in titles


def test_everything_is_drawn_inside_the_picture() -> None:
    high = Chart("t", {"one": [(0, 0.0), (5, 1e9)], "two": [(5, 2.0)]}, highest=1.0)
    for chart in (CHART, high, Chart("t", {"zero": [(0, 0.0), (1, 0.0)]})):
        text = html_report.svg(chart)
        for x, y in re.findall(r"([\d.]+),([\d.]+)", " ".join(re.findall(r'points="([^"]*)"', text))):
            assert 0 <= float(x) <= html_report.WIDTH
            assert 0 <= float(y) <= html_report.HEIGHT


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.0003), (0, 7), (0, 123456), (0, 0.95)])
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    found = html_report.ticks(low, high)
    assert 2 <= len(found) <= 7
    assert low <= found[0]
    assert found[-1] <= high


@pytest.mark.parametrize(("seconds", "last"), [(8, 8), (600, 600), (259200, 259200)])
def test_times_have_round_ticks(seconds: float, last: float) -> None:
    found = html_report.time_ticks(seconds)
    assert 2 <= len(found) <= 8
    assert found[-1] == last
