"""Guarded fixes for vLLM, loaded by vLLM itself as a general plugin.

vLLM logs and ignores an error raised while it imports a plugin, so nothing that can fail is imported here; an error
raised by `register()` ends the process.
"""

__version__ = "0.1.0"


def register() -> None:
    """Apply the fixes that this process needs and register the quantization methods; again is the same as once.

    vLLM calls it in each of its processes.

    Raises:
        vllm_graft.facts.GraftError: a setting is wrong, or a required fix is not applied.

    """
    from vllm_graft import quantization
    from vllm_graft.plugin import PLUGIN

    PLUGIN.register()
    quantization.register()
