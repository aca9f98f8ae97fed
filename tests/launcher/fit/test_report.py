"""What people read: tables, sentences, and the picture."""

from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from launcher.fit import report as rendering
from launcher.fit.advice import advise, alternatives
from launcher.fit.calibration import LoggedBoot, compare
from launcher.fit.check import check_boots
from launcher.fit.planner import fit
from launcher.fit.request import FitRequest

Ask = Callable[..., FitRequest]
SVG = "{http://www.w3.org/2000/svg}"


def shown(renderable: Any) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    with console.file:
        console.print(renderable)
    return console.export_text()


def test_the_waterfall_shows_every_term_with_basis_and_error(ask_27b: Ask) -> None:
    report = fit(ask_27b())
    text = shown(rendering.waterfall_table(report))
    for term in report.waterfall:
        assert term.name in text
    assert "fitted" in text
    assert "assumed" in text
    assert "23.52" in text


def test_the_verdict_says_the_number_that_decides_and_both_contexts(ask_27b: Ask) -> None:
    text = shown(rendering.verdict_text(fit(ask_27b())))
    assert text.startswith("LIKELY: 0.55 GiB")
    assert "20,800" in text
    assert "36,800" in text


def test_no_context_is_printed_when_nothing_starts(ask_27b: Ask) -> None:
    text = shown(rendering.verdict_text(fit(ask_27b(language_model_only=False))))
    assert text.startswith("NO: 0.74 GiB are left")
    assert "ongest" not in text


def test_alternatives_and_advice_are_readable(ask_27b: Ask) -> None:
    text = shown(rendering.alternatives_table(alternatives(ask_27b())))
    assert "2 such cards" in text
    assert "262,144" in text
    safe = rendering.advice_text(advise(ask_27b()), "profiles/rtx4090.yaml")
    assert "safe" in safe
    unsafe = shown(rendering.advice_text(advise(ask_27b(max_model_len=262_144)), "profiles/rtx4090.yaml"))
    assert "profiles/rtx4090.yaml: unsafe by" in unsafe
    assert "serve.max_model_len: 262144 -> " in unsafe


def test_models_are_listed_best_first(ask_27b: Ask) -> None:
    rows = [
        rendering.ModelRow("one-card", "", fit(ask_27b()), False, ""),
        rendering.ModelRow("refused", "", None, True, "config.json: head_dim is missing"),
        rendering.ModelRow("two-cards", "", fit(ask_27b(cards=2)), False, ""),
        rendering.ModelRow("not-here", "", None, False, "its config.json is not here yet"),
    ]
    assert [row.model for row in rendering.ranked_models(rows)] == ["two-cards", "one-card", "not-here", "refused"]
    assert [row.verdict for row in rows] == ["LIKELY", "NO", "FITS", "UNKNOWN"]
    text = shown(rendering.models_table(rows, "24 GiB"))
    assert "head_dim is missing" in text


def test_comparisons_and_recorded_boots_are_shown(ask_27b: Ask, kv_logs: dict[str, Any]) -> None:
    report = fit(ask_27b())
    comparison = compare(report, LoggedBoot(available_gib=1.2, model_loading_gib=17.7))
    text = shown(rendering.comparison_table(comparison))
    assert "blocks" in text
    assert "Off: weights" in text
    table = shown(rendering.check_table(check_boots(kv_logs, "kv_logs.json")))
    assert "1,212 / 1,212" in table
    assert "within rounding" in table


@pytest.mark.parametrize("changes", [{}, {"gpu_memory_utilization": 0.99, "kv_cache_dtype": "turboquant_3bit_nc"}])
def test_the_picture_stacks_to_the_card(ask_27b: Ask, changes: dict[str, object]) -> None:
    report = fit(ask_27b(**changes))
    root = ElementTree.fromstring(rendering.waterfall_svg(report, 'A <model> & "card"'))
    assert root.findtext(f"{SVG}title") == 'A <model> & "card"'
    bars = root.findall(f"{SVG}rect")[1:]
    assert len(bars) == len(report.waterfall)
    starts = [float(bar.attrib["x"]) for bar in bars]
    widths = [float(bar.attrib["width"]) for bar in bars]
    for start, width, following in zip(starts[:-2], widths[:-2], starts[1:-1], strict=True):
        assert following == pytest.approx(start + width, abs=1.1)
    line = root.find(f"{SVG}line")
    assert line is not None
    room_end = starts[-1] + widths[-1]
    total = float(line.attrib["x1"])
    expected = room_end if report.waterfall[-1].size_bytes >= 0 else starts[-1]
    assert total == pytest.approx(expected, abs=1.1)
