"""How long `register()` takes when no fix applies, in a process in which vLLM calls it (milliseconds, median of runs).

Run it with the Python of a vLLM environment: PYTHONPATH=patches .venv-engine/bin/python tests/patches/bench_register.py
"""

import statistics
import subprocess
import sys

RUNS = 7
MEASURED = """
import sys, time
import vllm.plugins
started = time.perf_counter()
import vllm_graft
vllm_graft.register()
print((time.perf_counter() - started) * 1e3)
"""


def main() -> None:
    times_ms = []
    for _ in range(RUNS):
        done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True)
        times_ms.append(float(done.stdout.splitlines()[-1]))
    print(f"register(): median {statistics.median(times_ms):.1f} ms, slowest {max(times_ms):.1f} ms of {RUNS} starts")


if __name__ == "__main__":
    main()
