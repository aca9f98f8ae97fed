"""How long `register()` takes when no fix applies, in a process in which vLLM calls it (milliseconds, median of runs).

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

RUNS = 7
MEASURED = """
import time
import vllm.plugins
wall, cpu = time.perf_counter(), time.process_time()
import vllm_graft
vllm_graft.register()
print((time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # With its bytecode, as pip installs it.
        package = Path(folder) / "vllm_graft"
        shutil.copytree(Path(vllm_graft.__file__).parent, package)
        compileall.compile_dir(package, quiet=1)
        environ = {key: value for key, value in os.environ.items() if not key.startswith("GRAFT_")}
        environ["PYTHONPATH"] = folder
        times = []
        for _ in range(RUNS):
            command = [sys.executable, "-c", MEASURED]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
            times.append([float(part) for part in done.stdout.split()])
    wall_ms, cpu_ms = zip(*times, strict=True)
    print(f"register(): median of {RUNS} starts {statistics.median(wall_ms):.1f} ms, slowest {max(wall_ms):.1f} ms")
    print(f"of that on the processor: median {statistics.median(cpu_ms):.1f} ms")


if __name__ == "__main__":
    main()
