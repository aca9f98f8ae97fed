"""Attention backends that take the place of vLLM's, registered by the fixes."""
