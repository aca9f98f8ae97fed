"""Graft's own Triton kernels over TurboQuant's packed KV: they import torch and Triton only."""
