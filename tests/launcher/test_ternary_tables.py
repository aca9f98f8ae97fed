"""The tables of ternary weights say what the result files hold."""

from typing import Any

from tests.launcher.ternary_tables import engine_markdown, speed_markdown

HOST = {"gpu": "a card", "vllm": "0.33.0", "torch": "2.14.0", "triton": "3.8.0", "date": "2026-11-30"}


def test_a_product_is_shown_with_the_configuration_that_is_served() -> None:
    speed = {
        "host": HOST,
        "ceilings": {"copy_bytes_per_s": 4.0e12, "launch_us": 1.5},
        "correct": {"odd": {"relative_error": 1e-4, "right": True}, "wrong": {"relative_error": 1.0, "right": False}},
        "chosen": {"2048 x 4096x4096": "gemm a", "1 x 4096x4096": "gemv a", "8 x 4096x4096": "gemv c"},
        "us": {
            "2048 x 4096x4096 bf16": 100.0,
            "2048 x 4096x4096 gemm a": 200.0,
            "1 x 4096x4096 bf16": 10.0,
            "1 x 4096x4096 copy": 1.5,
            "1 x 4096x4096 marlin": 4.0,
            "1 x 4096x4096 gemv a": 2.0,
            "1 x 4096x4096 gemv b": 1.0,
            "8 x 4096x4096 gemv c": None,
        },
    }
    text = speed_markdown(speed)
    assert text.startswith("a card, vLLM 0.33.0, torch 2.14.0, Triton 3.8.0, 2026-11-30.")
    assert "1 of 2 products at odd sizes are right" in text
    assert text.splitlines()[-2:] == [
        "| 1 | 4096 x 4096 | 2.00 | 1.50 | 10.00 | 4.00 | 5.00 | 2.00 | 52 % |",
        "| 2,048 | 4096 x 4096 | 200.00 | - | 100.00 | - | 0.50 | - | 344 TFLOP/s |",
    ]


def engine(size: float, rate: float) -> dict[str, Any]:
    rates = {"1": rate, "8": 8 * rate, "16": 16 * rate}
    return {"weight_bytes": size, "decode_tokens_per_s": rates, "prefill_tokens_per_s": 20_000.0}


def test_an_engine_is_compared_with_bfloat16_and_int4_and_what_broke_is_named() -> None:
    kl = {"positions": 504, "largest_kl": 0.0021, "mean_kl": 0.0004, "top_1_agreement": 0.9861}
    cases = {"ternary": engine(2.1e9, 400.0), "bf16": engine(13.5e9, 200.0), "marlin-int4": {"error": "died"}, "kl": kl}
    cases["int4"] = engine(3.9e9, 320.0)
    lines = engine_markdown({"host": HOST, "cases": cases}).splitlines()
    assert "| ternary, a scale a row | 2.10 | 400 | 3,200 | 6,400 | 20,000 | 2.00 | - | 1.25 |" in lines
    assert any(
        "504 positions: largest 0.0021 nats, mean 0.0004; the first choice is the same at 98.6 %" in x for x in lines
    )
    assert lines[-1] == "Without a result: `marlin-int4`."
    del cases["kl"]
    assert "The KL of ternary weights has not been measured yet." in engine_markdown({"host": HOST, "cases": cases})
