"""How long the commands take that start nothing: `python tests/launcher/bench_cli.py [RUNS]`, on a machine at rest."""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

COMMANDS = (
    ("plan", "rtx4090", "--card", "rtx4090"),
    ("plan", "rtx4090"),
    ("plan", "rtx4090", "--json"),
    ("render", "rtx4090"),
    ("explain", "rtx4090"),
    ("profiles",),
    ("models", "--card", "24GiB"),
)
LIMIT_S, LIMIT_MB = 0.4, 100.0


def environment(folder: str) -> dict[str, str]:
    """An installed launcher's: byte code is kept, whatever this shell says, and services' state is empty."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": f"{folder}/bytecode", "GRAFT_STATE": f"{folder}/state"}


def measured(arguments: Sequence[str], variables: dict[str, str]) -> tuple[float, float, float]:
    """Run a command once; return seconds on the clock, seconds of CPU, and its largest resident size in MB."""
    start = time.perf_counter()
    child = os.fork()
    if child == 0:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        os.execve(sys.executable, [sys.executable, "-m", "launcher", *arguments], variables)
    _, status, used = os.wait4(child, 0)
    seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"graft {' '.join(arguments)}: exit code {os.waitstatus_to_exitcode(status)}")
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main(runs: int) -> int:
    """Print medians; 1 where one is above a limit."""
    slow = False
    print(f"median of {runs} runs; limits {LIMIT_S} s, {LIMIT_MB:.0f} MB")
    with tempfile.TemporaryDirectory() as folder:
        variables = environment(folder)
        for arguments in COMMANDS:
            measured(arguments, variables)  # writes the byte code
            seconds, cpu, size = zip(*(measured(arguments, variables) for _ in range(runs)), strict=True)
            median, largest = statistics.median(seconds), max(size)
            slow |= median > LIMIT_S or largest > LIMIT_MB
            name = f"graft {' '.join(arguments)}"
            print(f"{name:40} {median:.2f} s, fastest {min(seconds):.2f}, CPU {min(cpu):.2f}; {largest:.0f} MB")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 7))
