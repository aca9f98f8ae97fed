"""The generated tables of README.md and tests/gpu/README.md: `python -m tests.launcher.readme` writes them again."""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from vllm_graft.fixes import FIXES

from launcher.images.pins import load_pins
from launcher.planner import Inputs, make
from launcher.prepare import Options, shipped_and_own
from launcher.profile import load_model
from launcher.survey import pinned_versions
from launcher.views import fixes_markdown, profiles_markdown
from tests.launcher import (
    fit_boots_table,
    headline_table,
    kv_dtypes_table,
    packed_attention_table,
    ternary_tables,
)
from tests.launcher.proof import attention_markdown, proof_markdown
from tests.launcher.turboquant_speed import end_to_end_markdown, prefill_markdown

README = Path(__file__).parents[2] / "README.md"
GPU_README = README.parent / "tests/gpu/README.md"
RESULTS = README.parent / "tests/gpu/results"
NOT_MEASURED = "Not measured yet."


def tables() -> dict[str, str]:
    """Return the tables by the names of their marks; planned from what is shipped, whatever lies on this machine."""
    pins = load_pins(lock=Path("no-digests-recorded.json"))
    compact = partial(packed_attention_table.markdown, compact=True)
    plans = [make(Inputs(one, load_model(one.model), pins.of(one.vllm))) for one in shipped_and_own(Options())]
    return {
        "profiles": profiles_markdown(plans),
        "fixes": fixes_markdown(FIXES, pinned_versions()),
        "proof": proof_markdown(),
        "attention": attention_markdown(),
        "attention_speed": _measured("attention_speed", compact),
        "end_to_end": _measured("end_to_end", end_to_end_markdown),
        "headline": _measured("headline", headline_table.markdown),
        "prefix_probe": _measured("prefix_probe", headline_table.probe_markdown),
    }


def gpu_tables() -> dict[str, str]:
    """Return the tables of what was measured on a GPU, from the result files."""
    return {
        "fit_boots": _measured("fit_boots", fit_boots_table.markdown),
        "headline": _measured("headline", headline_table.markdown),
        "prefix_probe": _measured("prefix_probe", headline_table.probe_markdown),
        "attention_speed": _measured("attention_speed", packed_attention_table.markdown),
        "attention_counters": _measured("attention_counters", packed_attention_table.counters_markdown),
        "prefill_speed": _measured("prefill_speed", prefill_markdown),
        "end_to_end": _measured("end_to_end", end_to_end_markdown),
        "reference_model": _measured("reference_model", headline_table.reference_markdown),
        "ternary_speed": _measured("ternary_speed", ternary_tables.speed_markdown),
        "ternary_engine": _measured("ternary_engine", ternary_tables.engine_markdown),
        "kv_dtypes": _measured("reconcile_kv", kv_dtypes_table.markdown),
    }


def _measured(name: str, markdown: Callable[[Mapping[str, Any]], str]) -> str:
    path = RESULTS / f"{name}.json"
    return markdown(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else NOT_MEASURED


def with_tables(text: str, named: Mapping[str, str]) -> str:
    """Return a text with its tables as they should be."""
    for name, table in named.items():
        marks = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text, count = marks.subn(partial(_between, table), text)
        assert count == 1, f"the marks of {name} are not there once"
    return text


def _between(table: str, marks: re.Match[str]) -> str:
    return f"{marks[1]}{table}\n{marks[2]}"


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text(encoding="utf-8"), tables()), encoding="utf-8")
    GPU_README.write_text(with_tables(GPU_README.read_text(encoding="utf-8"), gpu_tables()), encoding="utf-8")
