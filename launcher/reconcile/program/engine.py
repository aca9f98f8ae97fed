"""vLLM in this process: each prompt is read at once but for its end, which is decoded token by token as given.

Logits are taken where vLLM computes them: with prompt_logprobs it does so for all positions, whether or not the model
is compiled. What a layer computes is seen only with enforce_eager, since hooks do not run in compiled code.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from launcher.reconcile.program.points import recording
from launcher.reconcile.program.problems import Problem
from launcher.reconcile.program.recorder import Recorder
from launcher.reconcile.program.tokens import layers_of

KV_BYTES_ON_CPU = 1 << 28
LEAST_READ = 3
LOGITS_AT_ONCE = 1024
"""A model runner of vLLM 0.33 computes a prompt's logits in such pieces; one of one row would look like decoding."""


def capture(model_path: Path, options: dict[str, Any], rows: list[list[int]], decoded: int, recorder: Recorder) -> str:
    """Start vLLM, record the points of every prompt, and return the dtype that it computes in.

    Raises:
        Problem: vLLM does not start with these options.

    """
    llm = start(model_path, options, max(map(len, rows)))
    run(llm, layers_of(model_path), rows, decoded, recorder)
    return str(llm.llm_engine.vllm_config.model_config.dtype).removeprefix("torch.")


def start(model_path: Path, options: dict[str, Any], most_tokens: int) -> Any:
    """An engine of one process, for prompts of so many tokens, one at a time.

    Raises:
        Problem: vLLM does not start with these options.

    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    given = dict(options)
    if not given.pop("fixes", True):
        os.environ["VLLM_PLUGINS"] = ""
    else:
        _tell_plugin(model_path, given.get("kv_cache_dtype", "auto"))
    from vllm import LLM

    if not torch.cuda.is_available():
        given.setdefault("kv_cache_memory_bytes", KV_BYTES_ON_CPU)
    settings = {
        "enforce_eager": True,
        "max_model_len": most_tokens + 1,
        "max_num_batched_tokens": max(most_tokens + 1, 2048),
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "limit_mm_per_prompt": {"image": 0, "video": 0},
    }
    try:
        return LLM(str(model_path), **(settings | given))
    except Exception as error:  # vLLM refuses by every class of error, and says what
        raise Problem(f"vllm:{model_path}: vLLM does not start with {options or 'its defaults'}: {error}") from error


def _tell_plugin(model_path: Path, kv_cache_dtype: str) -> None:
    """Give the plugin, if it is there, the facts that fixes ask for; a fix that the KV dtype needs must be applied."""
    if find_spec("vllm_graft") is None:
        return
    from vllm_graft.facts import EngineFacts, ModelFacts, RunFacts
    from vllm_graft.records import to_json

    config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    model = ModelFacts(tuple(config.get("architectures", ())), None, None, None, None, None)
    facts = RunFacts(1, "reconcile", model, EngineFacts(kv_cache_dtype, None, 0, 1, "host"))
    file = Path("facts.json").resolve()
    file.write_text(to_json(facts), encoding="utf-8")
    os.environ["GRAFT_FACTS"] = str(file)
    if kv_cache_dtype.startswith("turboquant"):
        os.environ["GRAFT_REQUIRE"] = "tq-spec-decode"


def run(llm: Any, layers: int, rows: list[list[int]], decoded: int, recorder: Recorder) -> None:
    """Record the points of every prompt in an engine that runs, of which the last `decoded` tokens are decoded."""
    from vllm import SamplingParams

    is_eager = bool(llm.llm_engine.vllm_config.model_config.enforce_eager)
    (model,) = llm.apply_model(lambda model: model)
    steps = _Steps(recorder)
    with ExitStack() as stack:
        if is_eager:
            stack.enter_context(recording(model, layers, recorder))
        stack.enter_context(_forced(model, steps))
        for row in rows:
            read = max(len(row) - decoded, LEAST_READ)
            read -= read % LOGITS_AT_ONCE == 1
            steps.begin(row, read)
            sampling = SamplingParams(
                temperature=0,
                max_tokens=len(row) - read + 1,
                ignore_eos=True,
                detokenize=False,
                prompt_logprobs=1,
            )
            llm.generate([{"prompt_token_ids": row[:read]}], sampling, use_tqdm=False)
            steps.end()


class _Steps:
    """Which positions vLLM is at, told from the logits it computes: a prompt's last, its others, then each next.

    The others come at once, or in pieces and with the last again, as vLLM's model runner likes.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._row: list[int] = []
        self._read = self._prompt_rows = self._sampled = 0
        self._last: torch.Tensor | None = None

    def begin(self, row: list[int], read: int) -> None:
        self._row, self._read, self._prompt_rows, self._sampled, self._last = row, read, 0, 0, None
        self._recorder.rows_now = read

    def take(self, logits: torch.Tensor) -> torch.Tensor:
        """Record logits; return those that vLLM goes on with: where it samples, only the given token is possible."""
        others = self._read - 1 - self._prompt_rows
        if self._sampled == 1 and others > 0:
            self._write(logits[:others])
            self._prompt_rows += logits.shape[0]
            if self._last is not None and self._prompt_rows >= self._read - 1:
                self._write(self._last)
            return logits
        if logits.shape[0] != 1:
            raise Problem(f"vLLM computed logits of {logits.shape[0]} rows where one token is sampled")
        if self._sampled == 0:
            self._last = logits.detach().clone()
        else:
            self._write(logits)
        self._sampled += 1
        position = self._read - 1 + self._sampled
        forced = torch.full_like(logits, float("-inf"))
        forced[0, self._row[position] if position < len(self._row) else 0] = 0
        return forced

    def end(self) -> None:
        wanted = len(self._row) - self._read + 1
        if self._sampled != wanted or self._prompt_rows < self._read - 1:
            raise Problem(f"vLLM sampled {self._sampled} times for {wanted} tokens; leave speculation out")

    def _write(self, logits: torch.Tensor) -> None:
        self._recorder.rows_now = logits.shape[0]
        self._recorder.write("logits", logits.float())
        self._recorder.rows_now = 1


@contextmanager
def _forced(model: Any, steps: _Steps) -> Iterator[None]:
    """Let `steps` see and replace the logits; the model's own method is back afterwards, also after an error."""
    original: Callable[..., torch.Tensor] = model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> torch.Tensor:
        return steps.take(original(*args, **kwargs))

    model.compute_logits = compute_logits
    try:
        yield
    finally:
        del model.compute_logits
