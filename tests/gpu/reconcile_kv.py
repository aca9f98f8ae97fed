#!/usr/bin/env python3
"""What each KV cache dtype costs on the bundled text: perplexity and KL against bfloat16, stock and fixed.

    python3 tests/gpu/reconcile_kv.py --results tests/gpu/results/reconcile_kv.json
    python3 tests/gpu/reconcile_kv.py --python .venv-engine/bin/python --kv fp8 --model FOLDER --results FILE   # no GPU

Needs a Python with vLLM; this checkout's plugin is made a distribution for it. TurboQuant presets need a GPU: vLLM's
CPU backend has fp8 alone. Half of each passage is decoded token by token, since a prompt that is read at once does not
go through the cache. A preset that does not run ends the script; one that is in the results file is not run again. The
GPU may be shared: the KV pool is given. How large a cost is too large is the reader's to say.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measured
import spec_decode
from paths import ROOT

from launcher.reconcile import prompts, report
from launcher.reconcile.run import Settings, reconcile
from launcher.reconcile.sides import parse

RESULTS = Path(__file__).parent / "results" / "reconcile_kv.json"
MODEL = ROOT / "tests" / "reference_model" / "weights"
PRESETS = ("fp8", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
ENGINE = "dtype=bfloat16&gdn_prefill_backend=triton&gpu_memory_utilization=0.05&kv_cache_memory_bytes=1073741824"
"""Both sides of each pair; a linear attention that every host has, so that figures of hosts compare."""
FIXED = "turboquant"
"""Presets whose attention the plugin replaces: measured with and without it."""


def main() -> int:
    """Measure what is asked for, and write and print each preset's cost as it is known."""
    arguments = _arguments()
    if arguments.python == Path(sys.executable):
        spec_decode.install_plugin(arguments.work / "plugin")
    base = f"vllm:{arguments.model}?{ENGINE}"
    settings = Settings(arguments.tokens, arguments.passages, arguments.tokens // 2)
    result: dict[str, Any] = {
        "host": _host(arguments.model, arguments.python),
        "text": prompts.BUNDLED.name,
        "settings": vars(settings),
        "presets": {},
    }
    if arguments.results.is_file():
        result["presets"] = json.loads(arguments.results.read_text(encoding="utf-8"))["presets"]
    names = [name for name in _sides(arguments.kv) if name not in result["presets"]]
    if not names:
        return 0
    sides = [parse(f"{base}&kv_cache_dtype={name}") for name in names]
    pairs = reconcile(parse(base), sides, prompts.read(None), settings, arguments.python, _say, arguments.work)
    for name, pair in zip(names, pairs, strict=True):
        first = pair.found["first"]
        logits = {key: value for key, value in pair.found["logits"].items() if key != "kl"}
        result["presets"][name] = logits | {"first": first and first["name"]}
        arguments.results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        for row in report.quality_rows([pair]):
            _say("  ".join(row))
    return 0


def _sides(presets: Sequence[str]) -> list[str]:
    """The presets as they follow kv_cache_dtype=; those whose attention the plugin replaces also without it."""
    return [name for preset in presets for name in _with_stock(preset)]


def _with_stock(preset: str) -> tuple[str, ...]:
    return (f"{preset}&fixes=off", preset) if preset.startswith(FIXED) else (preset,)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _host(model: Path, python: Path) -> dict[str, str]:
    """The card or the processor and the model, and the versions of the Python that runs the engines."""
    engine = "gpu" if shutil.which("nvidia-smi") else "cpu"
    program = (str(python), str(Path(__file__).with_name("versions.py")))
    versions: dict[str, str] = json.loads(subprocess.run(program, capture_output=True, text=True, check=True).stdout)
    return measured.host(engine, model) | versions


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--model", type=lambda text: Path(text).resolve(), default=MODEL)
    parser.add_argument("--kv", nargs="+", default=PRESETS)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--passages", type=int, default=4)
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="of an environment with vLLM")
    parser.add_argument("--work", type=lambda text: Path(text).resolve(), default=Path("/tmp/reconcile-kv"))
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
