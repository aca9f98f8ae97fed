"""The long drill of the gateway, in front of a stand-in for the engine.

    python -m tests.gateway.drill --minutes 10 --out tests/gateway/results/drill.json

Short ones run in the tests (`test_drills.py`); those with a real engine are in `tests/engine/`.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.gateway import steps
from tests.gateway.drilling import Drill
from tests.gateway.fake_engine import EngineProcess
from tests.gateway.stack import Stack, free_port

HOLD_S = 20.0


def main() -> int:
    """Run the long drill and write its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    with (
        EngineProcess(free_port()) as engine,
        tempfile.TemporaryDirectory() as folder,
        Stack(Path(folder), engine.port) as stack,
    ):
        with Drill(stack, engine, asked.streams, HOLD_S) as drill:
            drill.run(steps.ALL, asked.minutes * 60)
        report = drill.judged()
    text = json.dumps(report.document(), indent=1)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if report.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
