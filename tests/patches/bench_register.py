"""How long `register()` takes when no fix applies, in a process in which vLLM calls it (milliseconds, median of runs).

That is an engine core whose KV cache is not TurboQuant's; the goal is less than 30 ms.  Where a fix applies, importing
the parts of vLLM that it changes takes seconds, which vLLM would import itself a little later.
Run it with the Python of a vLLM environment: PYTHONPATH=patches .venv-engine/bin/python tests/patches/bench_register.py
"""

import compileall
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import vllm_graft
from vllm_graft.facts import EngineFacts, ModelFacts, RunFacts
from vllm_graft.records import to_json

GOAL_MS = 30
RUNS = 7
FACTS = RunFacts(
    schema=1,
    run_id="benchmark",
    model=ModelFacts(("LlamaForCausalLM",), 30, 0, 0, 0, 64),
    engine=EngineFacts("auto", None, 0, 1, "host"),
)
MEASURED = """
import multiprocessing, time
import vllm.plugins
import vllm.model_executor.layers.quantization  # the model's config needs it in every process
multiprocessing.current_process().name = "EngineCore"
wall, cpu = time.perf_counter(), time.process_time()
import vllm_graft
vllm_graft.register()
times = ((time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3)
from vllm_graft.plugin import PLUGIN
assert {fix.outcome for fix in PLUGIN.report.fixes} == {"not-applicable"}
print(*times)
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        # With its bytecode, as pip installs it.
        package = Path(folder) / "vllm_graft"
        shutil.copytree(Path(vllm_graft.__file__).parent, package)
        compileall.compile_dir(package, quiet=1)
        environ = {key: value for key, value in os.environ.items() if not key.startswith("GRAFT_")}
        facts = Path(folder) / "facts.json"
        facts.write_text(to_json(FACTS))
        environ |= {"PYTHONPATH": folder, "GRAFT_FACTS": str(facts)}
        times = []
        for _ in range(RUNS):
            command = [sys.executable, "-c", MEASURED]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
            times.append([float(part) for part in done.stdout.split()])
    wall_ms, cpu_ms = zip(*times, strict=True)
    print(f"register(): median of {RUNS} starts {statistics.median(wall_ms):.1f} ms, slowest {max(wall_ms):.1f} ms")
    print(f"of that on the processor: median {statistics.median(cpu_ms):.1f} ms (goal: less than {GOAL_MS} ms)")
    return int(statistics.median(cpu_ms) >= GOAL_MS)


if __name__ == "__main__":
    raise SystemExit(main())
