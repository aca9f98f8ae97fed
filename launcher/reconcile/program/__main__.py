"""`python -m launcher.reconcile.program REQUEST`: does what the file says and writes an answer beside it.

A process captures one side or compares two; each ends with its engine, so that memory is free for the next.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from launcher.reconcile.program.problems import Problem


def main() -> None:
    """Run a request; the answer is what it found, or {"error": ...} for what is the user's to change."""
    request_file = Path(sys.argv[1])
    # Libraries print what they like; nobody reads it unless this process breaks.
    os.dup2(2, 1)
    request = json.loads(request_file.read_text(encoding="utf-8"))
    try:
        answer = {"capture": _capture, "compare": _compare}[request["do"]](request)
    except Problem as problem:
        answer = {"error": str(problem)}
    except OSError as error:
        if not error.filename and not error.errno:
            raise
        answer = {"error": f"{request_file.parent}: {error}; --work names a folder with more room"}
    request_file.with_suffix(".answer.json").write_text(json.dumps(answer), encoding="utf-8")


def _capture(request: dict[str, Any]) -> dict[str, Any]:
    from launcher.reconcile.program.tokens import layers_of, text_config, tokens_of

    model = Path(request["model"])
    rows = tokens_of(request["prompts"], model, request["tokens"], request["passages"])
    if request["rows"] is not None and rows != request["rows"]:
        raise Problem(f"{request['side']}: its tokenizer cuts the prompts into other tokens than A's does")
    # After the refusals, which need not wait for torch.
    from launcher.reconcile.program import engine, reference
    from launcher.reconcile.program.recorder import Recorder

    recorder = Recorder(Path(request["out"]))
    if request["engine"] == "vllm":
        dtype = engine.capture(model, request["options"], rows, request["decoded"], recorder)
    else:
        dtype = reference.capture(model, request["options"], rows, recorder)
    config = text_config(model)
    facts = {
        "side": request["side"],
        "layers": layers_of(model),
        "dtype": dtype,
        "head_dim": config.get("head_dim") or _head_dim(config),
    }
    recorder.finish(facts, sum(map(len, rows)))
    return {"rows": rows, "points": len(recorder.points)}


def _head_dim(config: dict[str, Any]) -> int | None:
    """What config.json implies; None where it says nothing of heads."""
    if "hidden_size" in config and "num_attention_heads" in config:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return None


def _compare(request: dict[str, Any]) -> dict[str, Any]:
    from launcher.reconcile.program.compare import compare

    return compare(Path(request["a"]), Path(request["b"]), request["rows"], request["scale"])


if __name__ == "__main__":
    main()
