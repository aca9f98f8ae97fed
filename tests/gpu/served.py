"""A real `vllm serve` for measurements: its arguments, its plugins, its start, its metrics, and its end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from paths import ROOT

from launcher.ask import is_healthy

REFERENCE_MODEL = ROOT / "tests/reference_model/weights"
SERVED_NAME = "reference"
VLLM = f"{shlex.quote(sys.executable)} -m vllm.entrypoints.cli.main"
FIX = "tq-spec-decode"
DRAFTS = 3
MAX_MODEL_LEN = 10_240
"""Holds the longest conversation of agents.py, some 8,900 tokens, and its reply."""
MAX_SEQS = 8
CAPTURE_SIZES = (1, 2, 4, 8, 12, 16, 24, 32)
BOOT_TIMEOUT_S = 420.0
STOP_S = 15.0
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_running: dict[int, subprocess.Popen[bytes]] = {}
"""Servers that this program has started and not stopped, by process id."""

Engine = Literal["gpu", "cpu"]


class Died(Exception):
    """The server ended, or was not healthy in time; the message has the end of its log."""


@dataclass(frozen=True)
class Setup:
    """What one server is."""

    graft: bool
    """With vllm_graft, its fix for TurboQuant and speculation required; else vLLM as it is."""
    kv_cache_dtype: str
    speculates: bool = True
    prefix_caching: bool = False
    older_card: bool = False
    """The kernels' path below compute capability 8.9 (older_card.py)."""


@dataclass(frozen=True)
class Bench:
    """Where and how servers are started."""

    model: Path = REFERENCE_MODEL
    engine: Engine = "gpu"
    vllm: str = VLLM
    port: int = 8765
    memory: float = 0.2
    """--gpu-memory-utilization: a share of the card, beside whatever else runs on it."""
    kv_mib: int = 4096
    """KV pool: given, since memory profiling breaks where another engine starts beside it."""
    dummy_weights: bool = False
    """Random weights: replies mean nothing, for trying out the script."""


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    boot_s: float
    log: Path
    reports: Path

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name, summed over their labels.

        Raises:
            Died: the server is gone.
        """
        import httpx

        try:
            return parsed_metrics(httpx.get(f"{self.url}/metrics", timeout=10, trust_env=False, verify=False).text)
        except httpx.HTTPError as error:
            raise Died(f"{self.url}/metrics: {error}; {end_of_log(self.log)}") from error

    def fixes(self) -> dict[str, list[str]]:
        """Return what became of each fix: the outcomes that the server's processes reported."""
        found: dict[str, set[str]] = {}
        for path in self.reports.glob("graft-*.json"):
            for fix in json.loads(path.read_text(encoding="utf-8"))["fixes"]:
                found.setdefault(fix["id"], set()).add(fix["outcome"])
        return {name: sorted(outcomes) for name, outcomes in sorted(found.items())}

    def observed(self) -> dict[str, Any]:
        """Return what the log says of graphs, attention backends and blocks."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return {
            "cudagraph_mode": _last(r"(?:'cudagraph_mode': <CUDAGraphMode\.|setting cudagraph_mode=)(\w+)", text),
            "attention_backends": sorted(
                set(re.findall(r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend", text))
            ),
            "block_size": _last(r"[Ss]etting attention block size to (\d+)", text),
        }


def arguments_of(setup: Setup, bench: Bench) -> list[str]:
    """Return the arguments of `vllm serve` behind the model."""
    found = [
        *("--host", "127.0.0.1", "--port", str(bench.port), "--served-model-name", SERVED_NAME),
        *("--seed", "0", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_SEQS)),
        *("--max-num-batched-tokens", "4128", "--kv-cache-memory-bytes", str(bench.kv_mib * 2**20)),
        *("--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder", "--reasoning-parser", "qwen3"),
        "--enable-prefix-caching" if setup.prefix_caching else "--no-enable-prefix-caching",
    ]
    if setup.speculates:
        found += ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": DRAFTS})]
    if bench.dummy_weights:
        found += ["--load-format", "dummy"]
    if bench.engine == "cpu":
        return [*found, "--dtype", "bfloat16", "--enforce-eager"]
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0, "cudagraph_capture_sizes": CAPTURE_SIZES}
    return [
        *found,
        *("--dtype", "bfloat16", "--gpu-memory-utilization", str(bench.memory)),
        *("--kv-cache-dtype", setup.kv_cache_dtype, "--compilation-config", json.dumps(graphs)),
        *("--additional-config", json.dumps({"gdn_prefill_backend": "triton"}), "--async-scheduling"),
    ]


def environment(setup: Setup, work: Path, kept: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment: the plugins that it may load, and what vllm_graft is told."""
    plugins = [*(["graft"] if setup.graft else []), *(["older_card"] if setup.older_card else [])]
    paths = [str(work / "plugins"), str(ROOT / "patches"), str(Path(__file__).parent), *_paths(kept)]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_PLUGINS": ",".join(plugins),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "GRAFT_FACTS": str(work / "facts.json"),
        "GRAFT_REPORTS": str(work / "reports"),
        "GRAFT_REQUIRE": FIX if setup.kv_cache_dtype.startswith("turboquant") and setup.speculates else "",
        "GRAFT_DISABLE": "",
    }


def facts(setup: Setup, model: Path) -> str:
    """Return the facts file that tells the fixes which model and engine they are in."""
    from vllm_graft.facts import EngineFacts, ModelFacts, RunFacts
    from vllm_graft.records import to_json

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    kinds = list(config.get("layer_types", ()))
    described = ModelFacts(
        architectures=tuple(config["architectures"]),
        attention_layers=kinds.count("full_attention"),
        gdn_layers=kinds.count("linear_attention"),
        experts=config.get("num_experts"),
        mtp_layers=config.get("num_nextn_predict_layers", 0),
        head_dim=config["head_dim"],
    )
    engine = EngineFacts(
        kv_cache_dtype=setup.kv_cache_dtype,
        speculative_method="mtp" if setup.speculates else None,
        num_speculative_tokens=DRAFTS if setup.speculates else 0,
        tensor_parallel_size=1,
        runtime="host",
    )
    return to_json(RunFacts(schema=1, run_id="measurement", model=described, engine=engine))


class Serve(Protocol):
    """Starts a server; a stand-in in tests."""

    def __call__(self, setup: Setup, bench: Bench, work: Path) -> contextlib.AbstractContextManager[Server]: ...


@contextlib.contextmanager
def served(setup: Setup, bench: Bench, work: Path) -> Iterator[Server]:
    """Start a server in a folder of its own, wait until it is healthy, and stop it behind the block.

    Raises:
        Died: it ended or hangs.
    """
    (work / "reports").mkdir(parents=True, exist_ok=True)
    for old in (work / "reports").iterdir():
        old.unlink()
    (work / "facts.json").write_text(facts(setup, bench.model), encoding="utf-8")
    _write_plugins(work / "plugins")
    log = work / "log"
    command = [*shlex.split(bench.vllm), "serve", str(bench.model), *arguments_of(setup, bench)]
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            env=environment(setup, work, os.environ),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    _running[process.pid] = process
    try:
        url = f"http://127.0.0.1:{bench.port}"
        _wait(process, url, started, log)
        yield Server(url, round(time.monotonic() - started, 1), log, work / "reports")
    finally:
        stop(process)


def stop_all() -> None:
    """End every server that runs."""
    for process in list(_running.values()):
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and all of its processes."""
    _running.pop(process.pid, None)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    # Workers that outlive their leader still hold the card.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def parsed_metrics(text: str) -> dict[str, float]:
    """Return the samples of a Prometheus text by name, summed over their labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        sample = re.fullmatch(r"([\w:]+)(?:\{.*\})? ([-+\d.eE]+)", line)
        if sample:
            found[sample[1]] = found.get(sample[1], 0.0) + float(sample[2])
    return found


def acceptance_length(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Return the mean tokens of a verification, 1 + accepted drafts; None where nothing was drafted."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    drafts = grown("vllm:spec_decode_num_drafts_total")
    return round(1 + grown("vllm:spec_decode_num_accepted_tokens_total") / drafts, 3) if drafts else None


def _end_with_parent() -> None:
    """Have the kernel end the server when this program is killed: it is in a session of its own."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(process: subprocess.Popen[bytes], url: str, started: float, log: Path) -> None:
    while not is_healthy(url):
        if process.poll() is not None:
            raise Died(f"vLLM ended with {process.returncode}: {end_of_log(log)}")
        if time.monotonic() - started > BOOT_TIMEOUT_S:
            raise Died(f"not healthy after {BOOT_TIMEOUT_S:.0f} s: {end_of_log(log)}")
        time.sleep(0.5)


def end_of_log(log: Path) -> str:
    """Return the errors that a server logged, else its last words, cut to what can be read."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    errors = [line for line in text.splitlines() if re.search(r"^(?:.* ERROR .*)?\b\w*(?:Error|Exception): ", line)]
    return "\n".join(errors[:5]) or text[-2000:]


def _write_plugins(folder: Path) -> None:
    """Make the two plugins distributions with entry points, as installed wheels are, in a folder for PYTHONPATH."""
    import vllm_graft

    plugins = {"vllm_graft": ("graft", "vllm_graft:register"), "older_card": ("older_card", "older_card:register")}
    for name, (plugin, target) in plugins.items():
        metadata = folder / f"{name}-{vllm_graft.__version__}.dist-info"
        metadata.mkdir(parents=True, exist_ok=True)
        about = f"Metadata-Version: 2.4\nName: {name.replace('_', '-')}\nVersion: {vllm_graft.__version__}\n"
        (metadata / "METADATA").write_text(about, encoding="utf-8")
        entry = f"[vllm.general_plugins]\n{plugin} = {target}\n"
        (metadata / "entry_points.txt").write_text(entry, encoding="utf-8")


def _paths(kept: Mapping[str, str]) -> Sequence[str]:
    return [path for path in kept.get("PYTHONPATH", "").split(os.pathsep) if path]


def _last(pattern: str, text: str) -> str | None:
    found = re.findall(pattern, text)
    return found[-1] if found else None
