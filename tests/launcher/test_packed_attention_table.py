"""The tables of attention over packed KV."""

from typing import Any

from tests.launcher.packed_attention_table import counters_markdown, markdown

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
        {"target": "4bit_nc decode, times of k8v4", "found": 1.50349, "allowed": 1.3, "met": False},
    ],
}


def test_a_shape_is_a_row_with_its_ratio_and_floor() -> None:
    row = "| `turboquant_k8v4` | 1 x 256K | 1 | 3,312 | 184 | 18.0 times | 100 | 291 |"
    text = markdown(REPORT)
    assert row in text.splitlines()
    assert text.startswith("NVIDIA H200, vLLM 0.33.0. Microseconds of one attention call")


def test_shapes_are_in_the_order_of_their_sizes_and_a_tiny_floor_is_not_nothing() -> None:
    (shown,) = REPORT["times"]
    small = {**shown, "shape": "1x128", "packed_bytes": 100_000}
    rows = markdown({**REPORT, "times": [{**shown, "shape": "8x8192"}, shown, {**shown, "queries": 4}, small]})
    cells = [line.split(" | ") for line in rows.splitlines()[4:8]]
    assert [(one[1], one[2], one[6]) for one in cells] == [
        ("1 x 128", "1", "< 1"),
        ("1 x 256K", "1", "100"),
        ("1 x 256K", "4", "100"),
        ("8 x 8K", "1", "100"),
    ]


def test_what_missed_its_target_is_said() -> None:
    lines = markdown(REPORT).splitlines()
    assert "- Missed: 4bit_nc decode, times of k8v4: 1.503, where 1.3 was aimed at." in lines
    assert not any("262144, us" in line for line in lines)


def test_a_compact_table_has_few_shapes_and_counts_what_missed() -> None:
    (shown,) = REPORT["times"]
    others = [{**shown, "shape": "8x128"}, {**shown, "preset": "turboquant_3bit_nc"}]
    lines = markdown({**REPORT, "times": [shown, *others]}, compact=True).splitlines()
    assert [line.split(" | ")[:2] for line in lines[4:-2]] == [["| `turboquant_k8v4`", "1 x 256K"]]
    assert lines[-1] == "1 of 2 targets missed: `tests/gpu/README.md` lists them."


def test_a_kernels_counters_are_a_row() -> None:
    counted = {
        "Duration (us)": 72.93,
        "DRAM Throughput (%)": 62.83,
        "L2 Cache Throughput (%)": 82.43,
        "Compute (SM) Throughput (%)": 34.03,
        "Registers Per Thread (register/thread)": 238.0,
        "Active Warps Per Scheduler (warp)": 1.91,
        "Issued Warp Per Scheduler": 0.38,
    }
    document = {"card": "a card", "vllm": "0.33.0", "date": "2026-11-30", "tool": "a tool", "shape": "1x131072"}
    text = counters_markdown({**document, "kernels": {"k8v4 decode": counted}})
    assert text.startswith("a card, vLLM 0.33.0, 2026-11-30. a tool; 1 x 128K;")
    assert text.splitlines()[-1] == "| `k8v4 decode` | 73 | 63 | 82 | 34 | 238 | 7.6 | 2.6 |"
