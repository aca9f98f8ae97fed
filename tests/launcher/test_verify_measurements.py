"""The measurements on a GPU (tests/gpu) around a stand-in: what they ask, keep, resume, and hold to be right."""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import agents
import headline
import prefix_probe
import score_in_vllm
import served as serving
from reference_rows import prompt_and_reply
from served import Bench, Died, Server, Setup, arguments_of, environment, parsed_metrics

from launcher.measure.replies import Share
from launcher.measure.verdict import percent
from tests.launcher import headline_table
from tests.launcher.fake_model import Asked, Said, served

Entry = dict[str, Any]
Spoil = Callable[[Setup, Said, Asked], Said]
LONGEST_PREFIX = max(prefix_probe.PREFIX_TOKENS)
FULL = {"cudagraph_mode": "FULL_DECODE_ONLY", "attention_backends": ["TURBOQUANT"]}


class StandIn(Server):
    """A server that says of itself what a right one says."""

    setup: Setup

    def fixes(self) -> dict[str, list[str]]:
        return {"tq-spec-decode": ["applied", "not-applicable"]} if self.setup.graft else {}

    def observed(self) -> Entry:
        return {**FULL, "block_size": "672"}


def serve(spoil: Spoil = lambda setup, said, asked: said, booted: list[Setup] | None = None) -> Any:
    """Start stand-ins, each spoiled as its set-up says."""

    @contextmanager
    def start(setup: Setup, bench: Bench, work: Path) -> Iterator[Server]:
        if booted is not None:
            booted.append(setup)
        with served(spoil=staticmethod(lambda said, asked: spoil(setup, said, asked))) as url:
            server = StandIn(url, 1.0, work, work)
            object.__setattr__(server, "setup", setup)
            yield server

    return start


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask less."""
    monkeypatch.setattr(headline, "REPLIES", {1: 9, 8: 9})
    monkeypatch.setattr(headline, "LENGTHS", (512, 600))
    monkeypatch.setattr(headline, "DEPTHS", (0.5,))
    monkeypatch.setattr(prefix_probe, "PREFIX_TOKENS", (600, 300))
    monkeypatch.setattr(prefix_probe, "INTERVAL_S", 0.1)
    monkeypatch.setattr(sys.modules["measured"], "host", lambda engine, model: {"gpu": "none", "date": "2026-11-30"})


def read(path: Path) -> Entry:
    found: Entry = json.loads(path.read_text(encoding="utf-8"))
    return found


def broken_stock(setup: Setup, said: Said, asked: Asked) -> Said:
    """What vLLM as it is does to a TurboQuant cache."""
    if setup.graft or setup.kv_cache_dtype == "auto" or not said.calls:
        return said
    return Said("of of of of", finish_reason="length")


def test_the_headline_counts_every_case_and_holds_where_the_fixes_and_the_control_are_right(tmp_path: Path) -> None:
    results = tmp_path / "headline.json"
    assert headline.main(["--results", str(results), "--work", str(tmp_path)], serve(broken_stock)) == 0
    cases = read(results)["cases"]
    assert set(cases) == {case.id for case in headline.CASES}
    for name, entry in cases.items():
        for batch in entry["batches"].values():
            assert batch["needles"] == {"right": 2, "total": 2}
            assert (batch["tools"]["right"] == batch["tools"]["total"]) == (not name.startswith("stock"))
    first = cases["stock-k8v4"]["batches"]["1"]["failures"][0]
    assert first["raw"] == "of of of of"

    host = {"gpu": "NVIDIA H200", "compute_capability": "9.0", "vllm": "0.33.0", "date": "2026-11-30"}
    table = headline_table.markdown({**read(results), "host": host})
    assert table.startswith("NVIDIA H200 (compute capability 9.0), vLLM 0.33.0, 2026-11-30.")
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(headline.CASES)
    assert "| vLLM's own | `turboquant_k8v4` | as on this card |" in table
    assert "| with the fixes | `turboquant_k8v4` | as on an RTX 3090 | 10 of 10 | 10 of 10 |" in table


def test_every_case_is_asked_the_same(tmp_path: Path) -> None:
    asked: dict[str, set[str]] = {}

    def spy(setup: Setup, said: Said, request: Asked) -> Said:
        asked.setdefault(f"{asdict(setup)}", set()).add(json.dumps(request.body["messages"]))
        return said

    headline.main(["--results", str(tmp_path / "r.json"), "--work", str(tmp_path)], serve(spy))
    first, *others = asked.values()
    assert len(others) == 4
    assert all(other == first for other in others)


def test_a_fixed_case_that_is_wrong_fails_the_headline(tmp_path: Path) -> None:
    def spoil(setup: Setup, said: Said, asked: Asked) -> Said:
        return said if said.calls or not setup.older_card else Said("551204")

    arguments = ["--results", str(tmp_path / "r.json"), "--work", str(tmp_path)]
    assert headline.main(arguments, serve(spoil)) == 1


def test_what_is_in_the_file_is_not_run_again_and_what_broke_is(tmp_path: Path) -> None:
    results, booted = tmp_path / "r.json", list[Setup]()

    @contextmanager
    def breaks(setup: Setup, bench: Bench, work: Path) -> Iterator[Server]:
        raise Died("vLLM ended with 1: out of memory")
        yield

    options = ["--results", str(results), "--work", str(tmp_path)]
    assert headline.main([*options, "--only", "control"], serve(booted=booted)) == 3
    assert headline.main([*options, "--only", "graft-k8v4"], breaks) == 1
    assert "out of memory" in read(results)["cases"]["graft-k8v4"]["error"]
    assert headline.main(options, serve(booted=booted)) == 0
    assert [one.kv_cache_dtype for one in booted].count("auto") == 1
    assert len(booted) == len(headline.CASES)


def test_a_case_that_ends_behind_its_first_batch_is_kept_and_run_again(tmp_path: Path) -> None:
    first, last = headline.execute(headline.CASES[0], Bench(), tmp_path, serve())
    assert (first["error"], list(first["batches"])) == ("ended behind batch 1", ["1"])
    assert ("error" in last, list(last["batches"])) == (False, ["1", "8"])


def test_no_case_is_started_that_would_end_behind_the_budget(tmp_path: Path) -> None:
    booted: list[Setup] = []
    options = ["--results", str(tmp_path / "r.json"), "--work", str(tmp_path), "--budget-s", "10"]
    assert headline.main(options, serve(booted=booted)) == 3
    assert booted == []


def test_a_server_that_is_not_the_cases_is_refused() -> None:
    cases = {case.id: case for case in headline.CASES}
    fixed, stock = cases["graft-k8v4"], cases["stock-k8v4"]
    bench = Bench()
    right = {"fixes": {"tq-spec-decode": ["applied"]}, "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert headline.unlike(fixed, bench, right) == []
    assert headline.unlike(fixed, bench, {**right, "fixes": {"tq-spec-decode": ["drifted"]}})
    assert headline.unlike(fixed, bench, {**right, "cudagraph_mode": "PIECEWISE"})
    assert headline.unlike(stock, bench, right)


def test_caching_that_changes_replies_fails_the_comparison(tmp_path: Path) -> None:
    def spoil(setup: Setup, said: Said, asked: Asked) -> Said:
        if setup.prefix_caching and setup.speculates and asked.before > 0:
            return replace(said, text="changed")
        return said

    results = tmp_path / "r.json"
    options = ["--results", str(results), "--work", str(tmp_path), "--at-once", "3"]
    assert prefix_probe.main(options, serve()) == 0
    results.unlink()
    assert prefix_probe.main(options, serve(spoil)) == 1
    cases = read(results)["cases"]
    against = prefix_probe.against_reference(cases)
    assert against["caching-on-mtp-off"] == {"equal": 24, "near-tie": 0, "wrong": 0}
    assert against["caching-on-mtp-on"] == {"equal": 6, "near-tie": 0, "wrong": 18}
    assert len(cases["caching-on-mtp-on"]["changed"]) == 18
    said = prefix_probe.line(cases["caching-on-mtp-on"], against["caching-on-mtp-on"])
    assert said.endswith("18 changed; against the reference 6 equal, 0 near ties, 18 wrong")
    table = headline_table.probe_markdown(read(results))
    assert "| on | on | none | 0 of 24 | 18 | 18 of 24 |" in table
    assert "| off | off | none | 0 of 24 | 0 | 0 of 24 |" in table


def test_a_soak_counts_wrong_and_changed_replies_over_time_and_stops_by_itself(tmp_path: Path) -> None:
    results = tmp_path / "r.json"
    options = ["--results", str(results), "--work", str(tmp_path), "--only", "soak", "--soak-s", "0.6"]
    assert prefix_probe.main(options, serve()) == 3
    entry = read(results)["cases"]["soak"]
    assert f"{entry['soak']['totals']['asked']} replies, 0 wrong" in headline_table.probe_markdown(read(results))
    assert entry["done"]
    assert entry["prefix_caching"]
    assert entry["speculates"]
    assert len(entry["soak"]["buckets"]) > 1
    assert entry["soak"]["totals"]["asked"] > 0
    assert prefix_probe.soak_holds(entry)
    assert not prefix_probe.soak_holds({**entry, "done": False})


@pytest.mark.parametrize("spoiled", ["wrong", "changed"])
def test_a_soak_that_goes_bad_at_its_end_does_not_hold(spoiled: str) -> None:
    quiet = {"asked": 1000, "wrong": 0, "changed": 0}

    def holds(*last: int) -> bool:
        buckets = [*[quiet] * 6, *({**quiet, spoiled: count} for count in last)]
        return prefix_probe.soak_holds({"done": True, "soak": {"buckets": buckets}})

    assert holds(0, 10, 20)
    assert not holds(0, 0, 31)
    assert not holds(100, 0, 0)


def test_a_soak_finds_replies_that_go_bad_when_their_prefix_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "AGAIN", 1.0)

    def spoil(setup: Setup, said: Said, asked: Asked) -> Said:
        return Said("of of of") if asked.before else said

    results = tmp_path / "r.json"
    options = ["--results", str(results), "--work", str(tmp_path), "--only", "soak", "--soak-s", "1", "--agents", "1"]
    assert prefix_probe.main(options, serve(spoil)) == 1
    soak = read(results)["cases"]["soak"]["soak"]
    assert 0 < soak["totals"]["wrong"] == soak["totals"]["changed"] < soak["totals"]["asked"]
    assert any(one["raw"] == "of of of" for one in soak["failures"])


def test_a_conversation_shares_its_beginning_and_carries_the_right_calls() -> None:
    texts = ("One. " * 50, "Two. " * 50)
    turns = agents.conversation("7", texts)
    assert turns == agents.conversation("7", texts)
    assert len(turns) == agents.TURNS
    for before, after in itertools.pairwise(turns):
        assert after.messages[: len(before.messages)] == before.messages
        assert after.tools == before.tools
        (call,) = before.calls
        assert after.messages[len(before.messages)]["tool_calls"][0]["function"]["name"] == call.name


def scored(tmp_path: Path, *arguments: str, spoil: Spoil = lambda setup, said, asked: said) -> tuple[int, Entry]:
    """Score a stand-in in a few requests of the held-out set; return the exit status and the cases."""
    results = tmp_path / "score.json"
    options = ["--results", str(results), "--work", str(tmp_path), "--every", "57", *arguments]
    return score_in_vllm.main(options, serve(spoil)), read(results)["cases"]


def test_a_score_counts_replies_as_a_client_receives_them(tmp_path: Path) -> None:
    found, cases = scored(tmp_path, "--case", "plain")
    assert found == 0
    assert cases["plain"]["right"] == {"right": 20, "total": 20}
    assert {"single", "chain", "needle"} <= set(cases["plain"]["by_kind"])


def test_wrong_replies_fail_a_score_and_are_kept(tmp_path: Path) -> None:
    def spoil(setup: Setup, said: Said, asked: Asked) -> Said:
        return replace(said, text="123456") if said.text.isdigit() else said

    found, cases = scored(tmp_path, "--case", "plain", spoil=spoil)
    assert found == 1
    assert cases["plain"]["right"] == {"right": 18, "total": 20}
    assert [one["kind"] for one in cases["plain"]["failures"]] == ["needle", "needle"]


@pytest.mark.parametrize(("accepted", "status"), [(18, 1), (19, 0)])
def test_three_drafts_of_five_are_too_few_for_a_score(
    accepted: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = {"vllm:spec_decode_num_drafts_total": 10.0, "vllm:spec_decode_num_accepted_tokens_total": float(accepted)}
    counted = iter([{}, behind])
    monkeypatch.setattr(StandIn, "metrics", lambda server: next(counted))
    found, cases = scored(tmp_path, "--case", "mtp")
    assert (found, cases["mtp"]["right"]["right"]) == (status, 20)


def test_a_score_with_a_plugin_in_the_server_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "fixes", lambda server: {"none-not-null": ["applied"]})
    found, cases = scored(tmp_path, "--case", "plain")
    assert (found, cases["plain"]["error"]) == (1, "fixes reported: none-not-null")


def test_the_longest_conversation_and_its_reply_fit_into_the_context() -> None:
    # The last sentence of a prefix may end behind its length.
    text = "x" * (LONGEST_PREFIX + 100)
    for seed in range(100):
        last = agents.conversation(str(seed), [text])[-1]
        prompt, _ = prompt_and_reply(last)
        assert len(prompt) + last.max_tokens <= serving.MAX_MODEL_LEN


def test_stock_servers_load_no_plugin_and_fixed_ones_require_the_fix(tmp_path: Path) -> None:
    stock = environment(Setup(False, "turboquant_k8v4"), tmp_path, {"PATH": "/bin"})
    assert (stock["VLLM_PLUGINS"], stock["PATH"]) == ("", "/bin")
    older = environment(Setup(True, "turboquant_k8v4", older_card=True), tmp_path, {"PYTHONPATH": "/mine"})
    assert older["VLLM_PLUGINS"] == "graft,older_card"
    assert older["GRAFT_REQUIRE"] == "tq-spec-decode"
    assert older["PYTHONPATH"].endswith("/mine")
    plain = arguments_of(Setup(True, "auto", speculates=False, prefix_caching=True), Bench())
    assert "--speculative-config" not in plain
    assert "--enable-prefix-caching" in plain


def test_metrics_are_summed_over_labels() -> None:
    text = '# HELP x y\nvllm:a_total{engine="0"} 3.0\nvllm:a_total{engine="1"} 1e2\nvllm:b 4\n'
    assert parsed_metrics(text) == {"vllm:a_total": 103.0, "vllm:b": 4.0}
    before = {"vllm:spec_decode_num_drafts_total": 10.0, "vllm:spec_decode_num_accepted_tokens_total": 20.0}
    after = {"vllm:spec_decode_num_drafts_total": 30.0, "vllm:spec_decode_num_accepted_tokens_total": 60.0}
    assert serving.acceptance_length(before, after) == 3.0
    assert serving.acceptance_length(before, before) is None


def test_a_share_is_shown_as_its_two_counts_and_a_percentage_below_all_never_as_all() -> None:
    assert headline_table.share(asdict(Share(99_999, 100_000))) == "99,999 of 100,000"
    assert percent(99_999 / 100_000) == "99.99 %"


def test_tables_name_the_cases_that_did_not_end() -> None:
    host = {"gpu": "a card", "vllm": "0.33.0", "date": "2026-11-30"}
    cut = {"host": host, "cases": {"soak": {"error": "the soak is under way"}}, "against_reference": {}}
    for markdown in (headline_table.markdown, headline_table.probe_markdown, headline_table.reference_markdown):
        assert markdown(cut).endswith("|\n\nWithout a result: `soak`.")


def test_the_reference_models_score_is_a_row_for_each_way_to_draft() -> None:
    plain = {"speculates": False, "right": {"right": 1137, "total": 1140}, "same_tokens": 1130, "accepted_drafts": None}
    cases = {"plain": plain, "mtp": {**plain, "speculates": True, "accepted_drafts": 0.8135}}
    host = {"gpu": "a card", "vllm": "0.33.0", "date": "2026-11-30"}
    rows = headline_table.reference_markdown({"host": host, "cases": cases}).splitlines()[4:]
    assert rows == ["| none | 1,137 of 1,140 | 1,130 | - |", "| MTP | 1,137 of 1,140 | 1,130 | 81.35 % |"]
