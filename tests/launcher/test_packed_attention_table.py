"""The table of attention over packed KV."""

from typing import Any

from tests.launcher.packed_attention_table import markdown

REPORT: dict[str, Any] = {
    "device": "NVIDIA H200",
    "versions": {"vllm": "0.33.0"},
    "copy_bytes_per_s": 4.0e12,
    "times": [
        {
            "preset": "turboquant_k8v4",
            "shape": "1x262144",
            "queries": 1,
            "stock_us": 3312.0,
            "graft_us": 184.0,
            "packed_bytes": 400_000_000,
        }
    ],
    "flash": [{"shape": "1x262144", "queries": 1, "flash_us": 291.0, "bytes": 1}],
    "verdicts": [
        {"target": "k8v4 decode 1x262144, us", "found": 184.0, "allowed": 300.0, "met": True},
        {"target": "4bit_nc decode, times of k8v4", "found": 1.5, "allowed": 1.3, "met": False},
    ],
}


def test_a_shape_is_a_row_with_its_ratio_and_floor() -> None:
    row = "| turboquant_k8v4 | 1 x 262144 | 1 | 3,312 | 184 | 18.0 times | 100 | 291 |"
    assert row in markdown(REPORT).splitlines()


def test_what_missed_its_target_is_said() -> None:
    lines = markdown(REPORT).splitlines()
    assert "- Missed: 4bit_nc decode, times of k8v4: 1.5, where 1.3 was aimed at." in lines
    assert not any("262144, us" in line for line in lines)


def test_a_compact_table_has_few_shapes_and_counts_what_missed() -> None:
    (shown,) = REPORT["times"]
    others = [{**shown, "shape": "8x128"}, {**shown, "preset": "turboquant_3bit_nc"}]
    lines = markdown({**REPORT, "times": [shown, *others]}, compact=True).splitlines()
    assert [line.split(" | ")[:2] for line in lines[4:-2]] == [["| turboquant_k8v4", "1 x 262144"]]
    assert lines[-1] == "1 of 2 targets missed: `tests/gpu/README.md` lists them."
