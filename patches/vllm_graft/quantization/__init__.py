"""Quantization methods that the plugin registers with vLLM."""
