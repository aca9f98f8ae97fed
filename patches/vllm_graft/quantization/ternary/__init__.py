"""Weights of -1, 0 and +1: formats on disk, layout in memory, kernels, and the method that vLLM serves them by."""
