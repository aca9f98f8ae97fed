"""Versions of what runs a model, as an environment's packages say them; run as a program it prints them as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import sys


def versions(*more: str) -> dict[str, str]:
    """Return the versions of Python, vLLM, torch, Triton and further distributions."""
    found = {"python": sys.version.split()[0]}
    for name in ("vllm", "torch", "triton", *more):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


if __name__ == "__main__":
    print(json.dumps(versions()))
