"""Measure a service by `vllm bench serve`: one stream, sixteen at a time, and a sweep of request rates.

The client is vLLM's own: it is in the image and in the engine environment already, so it works offline and counts
tokens as the server does. GuideLLM would be a second large environment to lock, carry and keep beside each vLLM.
"""

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from launcher.errors import CheckFailed
from launcher.measure.load_sample import Source, gpu_used_bytes, parse
from launcher.measure.soak_record import Record

LoadName = Literal["single", "batch16", "sweep"]
LOADS: tuple[LoadName, ...] = get_args(LoadName)
BATCH = 16
SWEEP = (0.25, 0.5, 0.75, 1.0, 1.25)
"""Request rates, as shares of what sixteen at a time get through."""
SAMPLE_INTERVAL_S = 1.0
PERCENTILES = (50, 95, 99)
TIMES = {"ttft": "first_token", "tpot": "token", "itl": "gap", "e2el": "request"}
"""vLLM's names of the times, and ours: first token, each token after it, between two pieces, whole request."""


@dataclass(frozen=True)
class Settings:
    """What is asked of which service; two benches with the same can be compared."""

    url: str
    model: str
    profile: str | None
    vllm: str
    """Release of the client."""
    input_tokens: int
    output_tokens: int
    requests: int
    """Of the single stream; sixteen at a time ask four times, each rate of the sweep twice as many."""
    loads: tuple[LoadName, ...]
    seed: int


@dataclass(frozen=True)
class Step:
    """One run of the client."""

    name: str
    requests: int
    concurrency: int | None = None
    """None: as many as the rate brings."""
    rate: float | None = None
    """Requests a second, at random times; None: the next as soon as one ends."""


@dataclass(frozen=True)
class Result:
    """What one run measured; times in seconds."""

    step: Step
    figures: dict[str, float | None]
    began_s: float
    """On the axis of the timeline."""
    raw: dict[str, Any]
    """The client's own result."""


class Client(Protocol):
    """Something that runs `vllm bench serve`."""

    def run(self, arguments: tuple[str, ...], api_key: str | None, on_line: Callable[[str], None]) -> dict[str, Any]:
        """Return the client's result.

        Raises:
            CheckFailed: it ended without one.
        """


def arguments(settings: Settings, step: Step) -> tuple[str, ...]:
    """Return the arguments of `vllm bench serve`, without tokenizer and result file; the key is never among them."""
    bounds = ("--max-concurrency", str(step.concurrency)) if step.concurrency else ()
    rate = ("--request-rate", f"{step.rate:g}") if step.rate else ()
    return (
        *("--backend", "openai-chat", "--base-url", settings.url, "--endpoint", "/v1/chat/completions"),
        *("--model", settings.model, "--served-model-name", settings.model),
        *("--dataset-name", "random", "--random-input-len", str(settings.input_tokens)),
        *("--random-output-len", str(settings.output_tokens), "--ignore-eos", "--temperature", "0"),
        *("--num-prompts", str(step.requests), *bounds, *rate, "--seed", str(settings.seed)),
        *("--percentile-metrics", ",".join(TIMES), "--metric-percentiles", ",".join(map(str, PERCENTILES))),
        *("--ready-check-timeout-sec", "0", "--disable-tqdm", "--save-result"),
    )


def figures(raw: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the client's result by our names, times in seconds."""
    times = {
        f"{ours}_p{percentile}_s": _seconds(raw.get(f"p{percentile}_{theirs}_ms"))
        for theirs, ours in TIMES.items()
        for percentile in PERCENTILES
    }
    acceptance = raw.get("spec_decode_acceptance_rate")
    return {
        "replies": float(raw["completed"]),
        "failed": float(raw.get("failed", 0)),
        "duration_s": float(raw["duration"]),
        "requests_a_second": float(raw["request_throughput"]),
        "tokens_a_second": float(raw["output_throughput"]),
        "acceptance": None if acceptance is None else float(acceptance) / 100,
        **times,
    }


def steps(settings: Settings) -> Iterator[tuple[Step, Callable[[Result], None]]]:
    """Yield each run with who is told its result: the rates of the sweep follow from sixteen at a time."""
    throughput: list[float] = []

    def keep(result: Result) -> None:
        throughput.append(result.figures["requests_a_second"] or 0.0)

    def ignore(result: Result) -> None:
        """No other run follows from it."""

    if "single" in settings.loads:
        yield Step("single", settings.requests, concurrency=1), ignore
    if "batch16" in settings.loads or "sweep" in settings.loads:
        yield Step("batch16", 4 * settings.requests, concurrency=BATCH), keep
    if "sweep" in settings.loads:
        for share in SWEEP:
            yield Step(f"sweep {share:g}", 2 * settings.requests, rate=share * throughput[0]), ignore


def run(
    settings: Settings,
    client: Client,
    api_key: str | None,
    record: Record,
    source: Source | None,
    on_step: Callable[[Step], None],
    on_line: Callable[[str], None],
) -> tuple[Result, ...]:
    """Run every step; the server and its GPUs are looked at meanwhile, into the record's timeline.

    Raises:
        CheckFailed: the client ended without a result, or nothing was answered.
    """
    results = []
    began_s = time.monotonic()
    with _Watch(record, source, began_s):
        for step, tell in steps(settings):
            on_step(step)
            at_s = time.monotonic() - began_s
            record.tell(at_s, "step", step.name)
            raw = client.run(arguments(settings, step), api_key, on_line)
            if not raw.get("completed"):
                raise CheckFailed(f"{step.name}: no request was answered; `make logs` says why")
            result = Result(step, figures(raw), at_s, raw)
            tell(result)
            results.append(result)
    record.elapsed_s = time.monotonic() - began_s
    record.is_finished = True
    return tuple(results)


class _Watch:
    """Looks at the server while a `with` block runs."""

    def __init__(self, record: Record, source: Source | None, began_s: float) -> None:
        self._record, self._source, self._began_s = record, source, began_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.is_set():
            sample = parse(self._source.read() or "") if self._source is not None else None
            used = gpu_used_bytes(self._record.settings.gpu_uuids)
            self._record.sample(sample, used, time.monotonic() - self._began_s)
            self._stop.wait(SAMPLE_INTERVAL_S)


OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""}
"""Nothing is fetched, and the client is no server: it needs no fix."""
KEY_VARIABLE = "OPENAI_API_KEY"
"""Where the client looks for the key."""
IN_CONTAINER = 'vllm bench serve "$@" --result-dir /tmp --result-filename r.json >&2 && cat /tmp/r.json'


@dataclass(frozen=True)
class HostClient:
    """The client of an environment of this machine."""

    vllm: Path
    tokenizer: Path

    def run(self, arguments: tuple[str, ...], api_key: str | None, on_line: Callable[[str], None]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="graft-bench-") as folder:
            place = ("--result-dir", folder, "--result-filename", "r.json")
            argv = (str(self.vllm), "bench", "serve", *arguments, "--tokenizer", str(self.tokenizer), *place)
            _run(argv, api_key, on_line)
            return _read((Path(folder) / "r.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class ContainerClient:
    """The client of the service's image, in a container of its own that reaches what users of this machine reach."""

    image: str
    model_dir: Path

    def run(self, arguments: tuple[str, ...], api_key: str | None, on_line: Callable[[str], None]) -> dict[str, Any]:
        return _read(_run(self.argv(arguments), api_key, on_line))

    def argv(self, arguments: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command; of the key only the variable's name is in it."""
        variables = {**OFFLINE, "HOME": "/tmp"}
        return (
            *("docker", "run", "--rm", "--network", "host", "--user", "2000:0", "--read-only", "--cap-drop", "ALL"),
            *("--security-opt", "no-new-privileges:true", "--tmpfs", "/tmp:exec,mode=1777", "--env", KEY_VARIABLE),
            *(part for name, value in variables.items() for part in ("--env", f"{name}={value}")),
            *("--volume", f"{self.model_dir}:/model:ro", "--entrypoint", "/bin/sh", self.image),
            *("-c", IN_CONTAINER, "bench", *arguments, "--tokenizer", "/model"),
        )


def _run(argv: tuple[str, ...], api_key: str | None, on_line: Callable[[str], None]) -> str:
    """Run the client; its standard error is passed on line by line, its standard output returned."""
    environ = {**os.environ, **OFFLINE, **({KEY_VARIABLE: api_key} if api_key else {})}
    said: list[str] = []
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
        )
    except FileNotFoundError as error:
        raise CheckFailed(f"{argv[0]}: not there; `make up` installs what runs the client") from error
    with process:
        reader = threading.Thread(target=_pass_on, args=(process, said, on_line), daemon=True)
        reader.start()
        assert process.stdout is not None
        output = process.stdout.read()
        reader.join()
    if process.returncode != 0:
        raise CheckFailed("\n".join(["`vllm bench serve` failed:", *said[-15:]]))
    return output


def _pass_on(process: "subprocess.Popen[str]", said: list[str], on_line: Callable[[str], None]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        said.append(line.rstrip())
        on_line(line.rstrip())
        del said[:-100]


def _read(text: str) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise CheckFailed(f"`vllm bench serve` left no result: {text[:200]!r}") from error
    return document


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
