"""What stands in the way of a start: one cause from a closed vocabulary, and one remedy."""

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict

Cause = Literal[
    "cdi-device-missing",
    "compile-cache-stale",
    "compose-missing",
    "compute-capability-too-low",
    "context-too-long",
    "cuda-compat-libraries",
    "cudagraph-capture-oom",
    "disk-full",
    "disk-space-low",
    "docker-missing",
    "docker-too-old",
    "driver-library-mismatch",
    "driver-too-old",
    "engine-core-died",
    "engine-hang",
    "fixes-inactive",
    "gpu-detached-from-container",
    "gpu-ecc-errors",
    "gpu-lost",
    "gpu-memory-busy",
    "gpu-memory-changed",
    "gpu-memory-tight",
    "gpu-memory-too-small",
    "gpu-memory-unknown",
    "gpu-not-visible",
    "gpu-too-few",
    "health-start-period-too-short",
    "hf-auth",
    "host-memory-low",
    "host-oom-killed",
    "image-pull-failed",
    "kv-cache-dtype-unsupported",
    "kv-cache-too-small",
    "max-num-seqs-too-high",
    "mig-device",
    "mixed-gpus",
    "model-download-stalled",
    "model-files-incomplete",
    "model-geometry-unknown",
    "model-path-missing",
    "nccl-p2p",
    "no-kernel-for-arch",
    "no-kv-cache-memory",
    "no-p2p",
    "nvidia-driver-missing",
    "nvidia-runtime-missing",
    "patch-drifted",
    "permission-cache-dir",
    "port-in-use",
    "serving-oom",
    "shm-too-small",
    "system-package-missing",
    "tool-call-broken",
    "triton-ptxas-too-old",
    "unknown-vllm-flag",
    "weights-do-not-fit",
    "wrong-answer",
    "wrong-gpu-selected",
    "wsl-gpu-missing",
    "wsl-host-memory",
    "wsl-pinned-memory",
]
"""The one vocabulary of the check before a start and of the diagnosis after one."""

CAUSES: frozenset[str] = frozenset(get_args(Cause))


class Problem(BaseModel):
    """One problem found before the start; `refuse` needs --force, `warn` is told and goes on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cause: Cause
    severity: Literal["refuse", "warn"]
    message: str
    """What was found and where, with its numbers."""
    remedy: str
    """What to do, one sentence."""
