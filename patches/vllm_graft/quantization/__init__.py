"""Quantization methods that the plugin registers with vLLM."""

import sys


def register() -> None:
    """Make vLLM of this process know them; again is the same as once.

    A vLLM that has moved what they are made of serves everything else, and the log says why it does not know them.
    """
    if "ternary" in _registered():
        return
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config

        from vllm_graft.quantization.ternary.config import NAME, TernaryConfig
    except ImportError as error:
        sys.stderr.write(f"vllm_graft: the quantization method ternary is not there in this vLLM: {error}\n")
        return
    register_quantization_config(NAME)(TernaryConfig)


def _registered() -> list[str]:
    module = sys.modules.get("vllm.model_executor.layers.quantization")
    return getattr(module, "QUANTIZATION_METHODS", [])
