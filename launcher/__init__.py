"""Graft's launcher: plan, render, start and follow vLLM on the GPUs people own."""

from importlib.metadata import version

__version__ = version("graft-launcher")
