"""The plan: every vLLM flag with its value and its reason, the fixes it needs, and the problems found.

`make` is pure: the same profile, model, pins and facts give the same plan. Everything that is rendered or started is
read from the plan, so that `graft explain` and the running service cannot differ.
"""

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from launcher.problems import Problem
from launcher.profile import CanaryQuestion, Monitoring

Runtime = Literal["docker", "host"]
GpuMode = Literal["nvidia", "cdi", "none"]
"""How a container gets its GPUs: Compose's nvidia driver, CDI device names, or no GPU at all."""


class PlanPart(BaseModel):
    """Base of the plan's values."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Flag(PlanPart):
    """One argument of `vllm serve`."""

    name: str
    """With its dashes, such as `--max-num-seqs`."""
    value: str | None
    """None for a flag without a value."""
    reason: str
    source: str
    """Where the value comes from, such as `profiles/rtx4090.yaml: serve.max_num_seqs`."""


class EnvironmentVariable(PlanPart):
    """One environment variable of the server; never a secret."""

    name: str
    value: str
    reason: str


class SelectedGpu(PlanPart):
    """A GPU that the service gets; None where the plan is made for a machine without it."""

    uuid: str
    name: str | None
    compute_capability: tuple[int, int] | None
    total_mib: int | None


class Image(PlanPart):
    """The image that the service runs, built from a pinned base."""

    base: str
    """Reference of the base image, with its digest where one was resolved."""
    vllm: str
    cuda: str | None
    min_driver: str | None
    python: str


class Gateway(PlanPart):
    """What stands between clients and the server."""

    max_request_bytes: int
    max_waiting: int
    max_in_flight: int
    """Requests that run and wait."""
    silence_timeout_s: int
    tls_certificate: str | None
    """PEM file on this machine; None: no TLS."""
    tls_port: int
    choices: tuple[Flag, ...]
    """The values above with their reasons."""

    def plain_host(self, host: str) -> str:
        """Return where the port without TLS listens: beside TLS it is for this machine alone."""
        return "127.0.0.1" if self.tls_certificate else host


class Watch(PlanPart):
    """How the engine is watched and started again."""

    every_s: int
    strikes: int
    idle_probe_s: int
    restarts: int
    within_s: int
    choices: tuple[Flag, ...]
    """The values above with their reasons."""


class Degraded(PlanPart):
    """Smaller settings, for an engine that ended for lack of memory with the planned ones."""

    flags: tuple[Flag, ...]
    """All of them, in the order of the planned ones."""
    max_model_len: int
    summary: str
    """What is smaller, with numbers."""

    def argv(self) -> tuple[str, ...]:
        """Return the flags as arguments of `vllm serve`."""
        return argv_of(self.flags)


class Plan(PlanPart):
    """All decisions of one start."""

    profile: str
    model: str
    model_repo: str
    model_revision: str | None
    served_name: str
    runtime: Runtime
    gpu_mode: GpuMode
    gpus: tuple[SelectedGpu, ...]
    vllm: str
    image: Image | None
    """None for the host runtime."""
    host: str
    port: int
    gateway: Gateway | None = None
    """None: clients reach the server itself."""
    watch: Watch | None = None
    """None: what ends stays ended, but for what Docker starts again."""
    degraded: Degraded | None = None
    """None: there are none that start, or they are not wanted."""
    monitoring: Monitoring = Monitoring()
    max_model_len: int | None
    """Planned context in tokens; None where the geometry is not known yet and vLLM decides."""
    recall_tokens: int | None = None
    """Longest prompt in which the model itself finds a needle reliably; None: any that fits."""
    right_replies: float | None = None
    """Share of right replies that a verification asks of the model; None: that of real models."""
    canary: CanaryQuestion | None = None
    """None: the usual question."""
    tensor_parallel_size: int
    flags: tuple[Flag, ...]
    """In order, without the model's path, --host and --port: those belong to the runtime."""
    environment: tuple[EnvironmentVariable, ...]
    required_fixes: tuple[str, ...]
    disabled_fixes: tuple[str, ...]
    processes: tuple[tuple[str, ...], ...]
    """The processes that must report, each with its roles (`vllm_graft.patch.Process`)."""
    facts: dict[str, Any]
    """What `vllm_graft` is told: the content of facts.json, run id included."""
    fit: dict[str, Any] | None
    """The memory plan (`launcher.fit`), as JSON."""
    problems: tuple[Problem, ...]

    @property
    def refusals(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.severity == "refuse")

    @property
    def run_id(self) -> str:
        """Digest of the plan that every fix report carries."""
        return str(self.facts["run_id"])

    @property
    def can_call_tools(self) -> bool:
        """Whether the server reads tool calls from the model's text."""
        return any(flag.name == "--enable-auto-tool-choice" for flag in self.flags)

    def argv(self) -> tuple[str, ...]:
        """Return the flags as arguments of `vllm serve`, without model path, --host and --port."""
        return argv_of(self.flags)


def argv_of(flags: Iterable[Flag]) -> tuple[str, ...]:
    """Return flags as arguments."""
    return tuple(part for flag in flags for part in ((flag.name,) if flag.value is None else (flag.name, flag.value)))
