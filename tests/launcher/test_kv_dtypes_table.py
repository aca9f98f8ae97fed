"""The table of KV cache dtypes says what the result file holds."""

from tests.launcher.kv_dtypes_table import markdown

FOUND = {"kl_mean": 0.0183, "kl_max": 0.115, "top1_agreement": 0.9258, "perplexity_a": 31.7, "perplexity_b": 32.1}
DOCUMENT = {
    "host": {"model": "a-model", "gpu": "a card", "compute_capability": "9.0", "vllm": "0.33.0", "date": "2026-11-30"},
    "text": "alice.txt",
    "settings": {"tokens": 256, "passages": 4, "decoded": 128},
    "presets": {
        "fp8": {**FOUND, "first": None},
        "turboquant_k8v4&fixes=off": {**FOUND, "first": "layers.0.mlp"},
        "turboquant_k8v4": {**FOUND, "first": None},
        "turboquant_3bit_nc&fixes=off": {**FOUND, "perplexity_b": None, "kl_mean": None, "kl_max": None, "first": None},
    },
}


def test_a_preset_is_a_row_beside_bfloat16_with_the_attention_that_ran() -> None:
    text = markdown(DOCUMENT)
    assert text.startswith(
        "a card (compute capability 9.0), vLLM 0.33.0, 2026-11-30. `a-model` on `alice.txt`: 4 passages"
    )
    assert text.splitlines()[4:] == [
        "| bfloat16 | vLLM's own | 31.7 | - | - | - | - |",
        "| `fp8` | vLLM's own | 32.1 (+1.3 %) | 0.0183 | 0.115 | 92.6 % | none |",
        "| `turboquant_k8v4` | vLLM's own | 32.1 (+1.3 %) | 0.0183 | 0.115 | 92.6 % | `layers.0.mlp` |",
        "| `turboquant_k8v4` | with the fix | 32.1 (+1.3 %) | 0.0183 | 0.115 | 92.6 % | none |",
        "| `turboquant_3bit_nc` | vLLM's own | infinite | infinite | infinite | 92.6 % | none |",
    ]
