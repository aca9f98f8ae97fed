"""Parsers of model output that take the place of vLLM's; only `qwen3` here imports vLLM."""
