"""What the server and the GPU say of themselves while it is under load."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

METRICS = {
    "kv_usage": "vllm:kv_cache_usage_perc",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "generated_tokens": "vllm:generation_tokens_total",
    "drafted_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
    "started_s": "process_start_time_seconds",
    "resident_bytes": "process_resident_memory_bytes",
}
"""What is read from /metrics, by its name here."""
EXEC_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Sample:
    """One look at /metrics; None for what it does not have. Counters count from the server's start."""

    kv_usage: float | None = None
    """Share of the KV cache in use, 0 to 1."""
    running: float | None = None
    waiting: float | None = None
    generated_tokens: float | None = None
    drafted_tokens: float | None = None
    """None without speculation."""
    accepted_tokens: float | None = None
    prefix_queries: float | None = None
    """Tokens looked up in the prefix cache."""
    prefix_hits: float | None = None
    preemptions: float | None = None
    started_s: float | None = None
    """Unix time at which the server's process started: another one is a restart."""
    resident_bytes: float | None = None
    """Memory of the API server's process."""


COUNTERS = ("generated_tokens", "drafted_tokens", "accepted_tokens", "prefix_queries", "prefix_hits", "preemptions")


def parse(text: str) -> Sample | None:
    """Read a /metrics page; None for one that is not of vLLM.

    Several engines are summed, but for the KV cache, of which the fullest counts.
    """
    from prometheus_client.parser import text_string_to_metric_families

    wanted = {metric: name for name, metric in METRICS.items()}
    found: dict[str, list[float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in wanted:
                    found.setdefault(wanted[sample.name], []).append(sample.value)
    except ValueError:
        return None
    if "running" not in found:
        return None
    return Sample(**{name: max(values) if name == "kv_usage" else sum(values) for name, values in found.items()})


def gained(before: Sample, after: Sample) -> dict[str, float]:
    """Return how much each counter grew; after a restart it began anew."""
    grown = {}
    restarted = before.started_s != after.started_s
    for name in COUNTERS:
        old, new = getattr(before, name), getattr(after, name)
        if new is not None:
            grown[name] = new if restarted or old is None else max(new - old, 0.0)
    return grown


class Source(Protocol):
    """Where /metrics can be read."""

    def read(self) -> str | None:
        """Return the page; None where there is no answer."""


@dataclass(frozen=True)
class HttpSource:
    """The page by HTTP."""

    base_url: str

    def read(self) -> str | None:
        import httpx

        try:
            answer = httpx.get(f"{self.base_url}/metrics", timeout=5, trust_env=False)
        except httpx.HTTPError:
            return None
        return answer.text if answer.is_success else None


@dataclass(frozen=True)
class ContainerSource:
    """The page from inside the server's container, where a gateway lets no one through to it."""

    container: str

    def read(self) -> str | None:
        url = "http://127.0.0.1:8000/metrics"
        argv = ("docker", "exec", self.container, "curl", "--fail", "--silent", "--max-time", "5", url)
        try:
            done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=EXEC_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None


def first_that_answers(sources: Sequence[Source]) -> Source | None:
    """Return the first source whose page is one of vLLM."""
    return next((source for source in sources if parse(source.read() or "") is not None), None)


def gpu_used_bytes(uuids: Sequence[str]) -> dict[str, int]:
    """Return the memory in use on each of these GPUs, other programs' included; nothing where NVML cannot tell."""
    from launcher.host import nvml

    if not uuids:
        return {}
    return {
        gpu.uuid: (gpu.total_mib - gpu.free_mib) * 2**20
        for gpu in nvml.read().gpus
        if gpu.uuid is not None and gpu.uuid in uuids and gpu.total_mib is not None and gpu.free_mib is not None
    }
