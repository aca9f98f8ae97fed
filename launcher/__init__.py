"""Graft's launcher: plan, render, start and follow vLLM on the GPUs people own."""
