"""Ternary weights as tables: ternary_speed.json has the kernels, ternary_engine.json vLLM's engine."""

from collections.abc import Mapping
from typing import Any

from tests.launcher.result_tables import about, broken, parts, table, whole

FEW_TOKENS = 16
"""Up to so many a product reads its weights at the speed of memory; beyond, it computes."""
_SPEED = ("tokens", "weight", "us", "copy", "cuBLAS, bfloat16", "Marlin, int4", "times cuBLAS", "times Marlin", "rate")
_ENGINES = {
    "bf16": "bfloat16",
    "marlin-int4": "int4, GPTQ by Marlin",
    "int4": "int4, GPTQ by what vLLM chooses",
    "ternary": "ternary, a scale a row",
    "ternary-g128": "ternary, groups of 128",
}
_ENGINE = (
    "weights",
    "GB",
    "tokens/s, 1 request",
    "tokens/s, 8",
    "tokens/s, 16",
    "prefill tokens/s",
    "times bfloat16, 1 request",
    "times Marlin, 1 request",
    "times vLLM's int4, 1 request",
)
_NO_KL = "The KL of ternary weights has not been measured yet."


def speed_markdown(document: Mapping[str, Any]) -> str:
    """Return the time of each product with the configuration that is served, beside the same one of other kernels."""
    copy = document["ceilings"]["copy_bytes_per_s"]
    found = document["us"]
    rows = []
    for product, config in document["chosen"].items():
        us = found.get(f"{product} {config}")
        if us is not None:
            others = [found.get(f"{product} {other}") for other in ("copy", "bf16", "marlin")]
            rows.append(_product(product, us, others, copy))
    rows.sort(key=lambda row: int(row[0].replace(",", "")))
    correct = document["correct"].values()
    said = (
        f"{about(document['host'])} Outputs x inputs of a weight; copy bandwidth {copy / 1e12:.2f} TB/s. "
        f"{sum(one['right'] for one in correct)} of {len(correct)} products at odd sizes are right against float64. "
        f"The rate of up to {FEW_TOKENS} tokens is that of the weight's bytes, as a share of that bandwidth; copy is "
        "the time of a copy that moves as many bytes, half read and half written. Times cuBLAS or Marlin: how many "
        "times as fast as they."
    )
    return parts(said, table(_SPEED, rows))


def _product(product: str, us: float, others: list[float | None], copy: float) -> tuple[str, ...]:
    tokens, _, weight = product.partition(" x ")
    outputs, inputs = (int(size) for size in weight.split("x"))
    few = int(tokens) <= FEW_TOKENS
    reached = f"{outputs * inputs / 4 / us * 1e6 / copy:.0%}".replace("%", " %")
    rate = f"{2 * int(tokens) * outputs * inputs / us / 1e6:,.0f} TFLOP/s"
    return (
        f"{int(tokens):,}",
        weight.replace("x", " x "),
        f"{us:,.2f}",
        *("-" if other is None else f"{other:,.2f}" for other in others),
        *("-" if other is None else f"{other / us:.2f}" for other in others[1:]),
        reached if few else rate,
    )


def engine_markdown(document: Mapping[str, Any]) -> str:
    """Return size and speed of a 7B model in vLLM's engine by its weights, and the KL of ternary weights."""
    cases = whole(document["cases"])
    kl = cases.pop("kl", None)
    rows = [_engine(title, cases[name], cases) for name, title in _ENGINES.items() if name in cases]
    said = (
        f"{about(document['host'])} The geometry of a 7B Llama with dummy weights; tokens/s of all requests together. "
        "On 9.0 vLLM chooses Machete for int4, on consumer cards Marlin."
    )
    return parts(said, table(_ENGINE, rows), _NO_KL if kl is None else _kl(kl), broken(document["cases"]))


def _engine(title: str, case: Mapping[str, Any], cases: Mapping[str, Any]) -> tuple[str, ...]:
    rates = case["decode_tokens_per_s"]
    return (
        title,
        f"{case['weight_bytes'] / 1e9:.2f}",
        *(f"{rates[requests]:,.0f}" for requests in ("1", "8", "16")),
        f"{case['prefill_tokens_per_s']:,.0f}",
        *(
            f"{rates['1'] / cases[other]['decode_tokens_per_s']['1']:.2f}" if other in cases else "-"
            for other in ("bf16", "marlin-int4", "int4")
        ),
    )


def _kl(found: Mapping[str, Any]) -> str:
    return (
        f"KL of a small random model's ternary weights from the same weights in bfloat16, over {found['positions']:,} "
        f"positions: largest {found['largest_kl']:.2g} nats, mean {found['mean_kl']:.2g}; the first choice is the "
        f"same at {100 * found['top_1_agreement']:.1f} %."
    )
