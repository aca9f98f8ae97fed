"""What this machine, this model and these versions are: the facts behind the decision on each fix."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_graft.decide import Situation, refusal
from vllm_graft.facts import GpuFacts, ModelFacts, RunFacts, gpu_facts, vllm_version
from vllm_graft.patch import Patch
from vllm_graft.records import RecordError, from_json

_ATTENTION = ("attention", "full_attention", "sliding_attention", "chunked_attention")
_DISTRIBUTIONS = ("torch", "triton", "transformers", "flashinfer-python", "vllm-graft")
_PROBE_TIMEOUT_S = 300


class ModelError(ValueError):
    """A config.json that does not describe a model."""


@dataclass(frozen=True)
class Fp8Cast:
    """Whether a kernel with this FP8 format of Triton compiled, ran and rounded as it should; if not, why."""

    format: str
    works: bool
    reason: str


@dataclass(frozen=True)
class Fp8Probe:
    """The casts that were tried; `reason` says why none was, empty when they were."""

    casts: tuple[Fp8Cast, ...]
    reason: str


@dataclass(frozen=True)
class Installed:
    """One distribution and its version, None when it is absent."""

    name: str
    version: str | None


@dataclass(frozen=True)
class Candidate:
    """One fix, and why it would not be wanted here; `refusal` is empty when it would."""

    id: str
    refusal: str


@dataclass(frozen=True)
class Detection:
    """Everything that `detect` found."""

    hardware: GpuFacts
    fp8: Fp8Probe
    model: ModelFacts | None
    versions: tuple[Installed, ...]
    fixes: tuple[Candidate, ...]


def detect(fixes: Sequence[Patch], run: RunFacts | None, config: Path | None) -> Detection:
    """Look at the GPUs, the FP8 kernels, the model of a config.json (else the run's) and the versions.

    Raises:
        ModelError: the config.json cannot be read or describes no model.

    """
    hardware = gpu_facts(os.environ)
    model = read_model(config) if config else run.model if run else None
    return Detection(
        hardware=hardware,
        fp8=probe_fp8() if hardware.gpus else Fp8Probe((), hardware.unknown or "no GPU is visible"),
        model=model,
        versions=_versions(),
        fixes=_candidates(fixes, run, hardware),
    )


def read_model(config: Path) -> ModelFacts:
    """Read what matters here from a config.json, or from the one in a directory.

    Raises:
        ModelError: it cannot be read, or describes no model.

    """
    path = config / "config.json" if config.is_dir() else config
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return describe_model(document)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error


def describe_model(config: Mapping[str, Any]) -> ModelFacts:
    """Layers by kind, experts, MTP layers and head size of a Hugging Face configuration, with or without text_config.

    Raises:
        ModelError: there are no architectures.

    """
    if not isinstance(config, Mapping) or not config.get("architectures"):
        raise ModelError("no architectures are named; this is not the config.json of a model")
    text = config.get("text_config") or config
    attention, gdn = _layers(text)
    return ModelFacts(
        architectures=tuple(config["architectures"]),
        attention_layers=attention,
        gdn_layers=gdn,
        experts=_first(text, "num_experts", "n_routed_experts", "num_local_experts") or 0,
        mtp_layers=_first(text, "mtp_num_hidden_layers", "num_nextn_predict_layers"),
        head_dim=_head_dim(text),
    )


def _layers(text: Mapping[str, Any]) -> tuple[int | None, int | None]:
    kinds, total = text.get("layer_types"), text.get("num_hidden_layers")
    if kinds is not None:
        return sum(kind in _ATTENTION for kind in kinds), kinds.count("linear_attention")
    if total is None or not any(key.startswith("linear_") for key in text):
        return total, None if total is None else 0
    interval = text.get("full_attention_interval")
    return (None, None) if interval is None else (total // interval, total - total // interval)


def _head_dim(text: Mapping[str, Any]) -> int | None:
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    return text.get("head_dim") or (hidden // heads if heads and hidden else None)


def _first(text: Mapping[str, Any], *names: str) -> int | None:
    return next((text[name] for name in names if text.get(name) is not None), None)


def probe_fp8() -> Fp8Probe:
    """Run the FP8 kernels in a process of its own, so that this one never starts CUDA."""
    command = [sys.executable, "-m", "vllm_graft.probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Fp8Probe((), f"the probe did not end within {_PROBE_TIMEOUT_S} s")
    if done.returncode != 0:
        return Fp8Probe((), f"the probe failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    try:
        return from_json(Fp8Probe, done.stdout.splitlines()[-1])
    except (IndexError, RecordError) as error:
        return Fp8Probe((), f"the probe gave no result: {error}")


def _versions() -> tuple[Installed, ...]:
    found = [Installed("python", platform.python_version()), Installed("vllm", vllm_version())]
    for name in _DISTRIBUTIONS:
        try:
            found.append(Installed(name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append(Installed(name, None))
    return tuple(found)


def _candidates(fixes: Sequence[Patch], run: RunFacts | None, hardware: GpuFacts) -> tuple[Candidate, ...]:
    vllm = vllm_version()
    if vllm is None:
        return tuple(Candidate(patch.id, "vLLM is not installed here") for patch in fixes)
    capabilities = None if hardware.unknown else tuple(gpu.capability for gpu in hardware.gpus)
    refusals = [(patch.id, refusal(patch, Situation(vllm, run, capabilities))) for patch in fixes]
    return tuple(Candidate(name, refused.reason if refused else "") for name, refused in refusals)
