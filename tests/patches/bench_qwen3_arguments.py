"""What the fix qwen3-arguments-lost costs: 1 MiB of arguments in deltas of 4 characters, against vLLM's parser.

    .venv-vllm-0.33/bin/python -m tests.patches.bench_qwen3_arguments
    .venv-engine/bin/python -m tests.patches.bench_qwen3_arguments 8192     # 0.32.0's own takes quadratic time

Prints JSON with the CPU seconds of each and their ratio; exit code 1 when the ratio is not below 2.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "patches"))

from vllm_graft.engine import Engine
from vllm_graft.facts import vllm_version
from vllm_graft.fixes.qwen3_arguments_lost import PATCH
from vllm_graft.patch import Outcome

from tests.patches.qwen3_serving import Case, Server

ARGUMENT_CHARS = 2**20
DELTA_CHARS = 4
ROUNDS = 3
LIMIT = 2.0
LINE = '    row = table[i] if i < n else "x"  # <b> \\ \n'
TOOL = {
    "type": "function",
    "function": {
        "name": "write_file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}},
    },
}


def cpu_seconds(server: Server, chars: int) -> float:
    """The least CPU time of some rounds, in seconds."""
    content = LINE * (chars // len(LINE))
    text = (
        "<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n"
        f"<parameter=content>\n{content}\n</parameter>\n</function>\n</tool_call>"
    )
    case = Case("bench", text, [TOOL], False, ())
    deltas: list[tuple[str, list[int]]] = [
        (text[start : start + DELTA_CHARS], []) for start in range(0, len(text), DELTA_CHARS)
    ]
    times = []
    for _ in range(ROUNDS):
        start_s = time.process_time()
        result = server.stream(case, deltas)
        times.append(time.process_time() - start_s)
        if json.loads(result.calls[0][1])["content"] != content:
            raise SystemExit("the streamed argument is not the one that was generated")
    return min(times)


def main() -> int:
    """Measure vLLM's parser, then the fix."""
    chars = int(sys.argv[1]) if len(sys.argv) > 1 else ARGUMENT_CHARS
    stock_s = cpu_seconds(Server(), chars)
    attempt = Engine().apply(PATCH, vllm_version() or "")
    if attempt.outcome is not Outcome.APPLIED:
        raise SystemExit(attempt.reason)
    fixed_s = cpu_seconds(Server(), chars)
    ratio = fixed_s / stock_s
    print(
        json.dumps(
            {
                "vllm": vllm_version(),
                "argument_chars": chars,
                "delta_chars": DELTA_CHARS,
                "stock_cpu_s": round(stock_s, 2),
                "fixed_cpu_s": round(fixed_s, 2),
                "ratio": round(ratio, 2),
            }
        )
    )
    return 0 if ratio < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
