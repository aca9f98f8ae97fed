"""Compare the installed vLLM with the sources that the fixes were written against. Run it with that vLLM's Python.

Exit code 0: every fingerprint is the one recorded for the newest known release; 1: some are not, or cannot be read.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from packaging.version import Version
from vllm_graft.engine import Engine, Unresolved
from vllm_graft.facts import vllm_version
from vllm_graft.fixes import FIXES
from vllm_graft.patch import Patch


@dataclass(frozen=True)
class Drift:
    """One fix against the installed vLLM."""

    id: str
    state: Literal["same", "changed", "gone"]
    known: str
    """Newest release whose source was read, with its fingerprint."""
    found: str
    """Fingerprint of the installed source, or why there is none."""
    target: str
    remove_when: str


def compare(fixes: Sequence[Patch]) -> tuple[Drift, ...]:
    """Return each fix with its fingerprint in the installed vLLM."""
    engine = Engine()
    return tuple(_compare(engine, fix) for fix in fixes)


def _compare(engine: Engine, fix: Patch) -> Drift:
    newest = max(fix.fingerprints, key=Version)
    known = fix.fingerprints[newest]
    state: Literal["same", "changed", "gone"]
    try:
        found = engine.found_fingerprint(fix)
        state = "same" if found == known else "changed"
    except (Unresolved, ImportError, OSError, TypeError) as error:
        found, state = " ".join(str(error).split()) or type(error).__name__, "gone"
    return Drift(fix.id, state, f"{newest} {known}", found, fix.target.path, fix.remove_when)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; as Markdown for a job's summary, or as JSON."""
    parser = argparse.ArgumentParser(description="Compare the installed vLLM with what the fixes were written against.")
    parser.add_argument("--json", action="store_true", help="answer as JSON")
    options = parser.parse_args(arguments)
    # vLLM logs to standard output, where the answer goes.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    vllm = vllm_version()
    if vllm is None:
        print("drift: vLLM is not installed for this Python", file=sys.stderr)
        return 1
    found = compare(FIXES)
    if options.json:
        print(json.dumps({"vllm": vllm, "fixes": [asdict(one) for one in found]}, indent=2))
    else:
        print(_markdown(vllm, found))
    return 0 if all(one.state == "same" for one in found) else 1


def _markdown(vllm: str, found: Sequence[Drift]) -> str:
    rows = (f"| `{one.id}` | {one.state} | {one.known} | {one.found} | `{one.target}` |" for one in found)
    head = (f"vLLM {vllm}", "", "| fix | state | recorded | found | target |", "| --- | --- | --- | --- | --- |")
    return "\n".join((*head, *rows))


if __name__ == "__main__":
    raise SystemExit(main())
