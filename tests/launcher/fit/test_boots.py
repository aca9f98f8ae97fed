"""Every recorded boot against the block arithmetic."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from launcher.fit.check import CheckError, CheckReport, check_boots

KV_LOGS = Path(__file__).parents[2] / "data" / "kv_logs.json"
BOOTS: list[dict[str, Any]] = json.loads(KV_LOGS.read_text(encoding="utf-8"))["boots"]


@pytest.fixture(scope="module")
def report(kv_logs: dict[str, Any]) -> CheckReport:
    return check_boots(kv_logs, "kv_logs.json")


def _named(boot: dict[str, Any]) -> str:
    return f"{boot['id']} [{boot['source']}]"


@pytest.mark.parametrize("index", [pytest.param(i, id=_named(b)) for i, b in enumerate(BOOTS) if b["exact"]])
def test_a_boot_marked_exact_is_reproduced_to_the_block(report: CheckReport, index: int) -> None:
    row = report.rows[index]
    blocks = row.figure("blocks")
    assert row.id == BOOTS[index]["id"]
    assert row.status == "exact"
    assert blocks is not None
    assert blocks.predicted == BOOTS[index]["expected_num_blocks"]
    assert all(figure.agrees for figure in row.figures)
    assert any(figure.reported is not None for figure in row.figures if figure.name != "blocks")


@pytest.mark.parametrize("index", [pytest.param(i, id=_named(b)) for i, b in enumerate(BOOTS) if not b["exact"]])
def test_a_boot_that_is_not_marked_exact_agrees_within_what_was_printed(report: CheckReport, index: int) -> None:
    row, boot = report.rows[index], BOOTS[index]
    assert row.status in ("exact", "within rounding")
    if row.status == "within rounding":
        blocks = row.figure("blocks")
        assert boot["available_kv_gib"] is not None
        assert blocks is not None
        assert blocks.predicted is not None
        assert abs(blocks.predicted - boot["expected_num_blocks"]) == 1


def test_the_published_boots_pass_as_a_whole(report: CheckReport) -> None:
    assert report.ok
    assert len(report.rows) == len(BOOTS)
    assert sum(boot["exact"] for boot in BOOTS) >= 17


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("num_speculative_tokens", lambda value: value + 1),
        ("tp", lambda value: value * 2),
        ("prefix_caching", lambda value: not value),
        ("gdn_prefill_checkpoint_blocks", lambda value: 1 - value),
        ("reported_tokens", lambda value: value + 1),
    ],
)
def test_an_exact_boot_with_a_wrong_figure_fails_the_check(kv_logs: dict[str, Any], field: str, change: Any) -> None:
    document = copy.deepcopy(kv_logs)
    boot = next(one for one in document["boots"] if one["id"] == "27b-int4-4x3090-fp8-n3-256k")
    boot[field] = change(boot[field])
    report = check_boots(document, "changed.json")
    assert not report.ok
    assert [row.id for row in report.rows if row.status == "off"] == [boot["id"]]


def test_an_exact_boot_that_reports_nothing_fails_the_check(kv_logs: dict[str, Any]) -> None:
    document = copy.deepcopy(kv_logs)
    for field in list(document["boots"][0]):
        if field.startswith(("reported_", "expected_")):
            document["boots"][0][field] = None
    assert not check_boots(document, "changed.json").ok


@pytest.mark.parametrize("field", ["tp", "kv_cache_dtype", "kernel_block_alignment", "exact"])
def test_a_boot_without_a_field_is_refused_by_boot_and_field(kv_logs: dict[str, Any], field: str) -> None:
    document = copy.deepcopy(kv_logs)
    del document["boots"][3][field]
    with pytest.raises(CheckError, match=rf"mine\.json: boots\[3\] \(27b-int4-2x3090-int8pth-n4-256k\): {field}"):
        check_boots(document, "mine.json")


def test_an_unknown_model_dtype_or_token_rule_is_refused(kv_logs: dict[str, Any]) -> None:
    for field, value in (("model", "gpt-5"), ("kv_cache_dtype", "turboquant_4bit"), ("reported_tokens_rule", "guess")):
        document = copy.deepcopy(kv_logs)
        document["boots"][0][field] = value
        with pytest.raises(CheckError, match=r"35b-nvfp4-5090-fp8-131k-a.*" + value):
            check_boots(document, "mine.json")
