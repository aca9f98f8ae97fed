"""The programs of a service: `python -m launcher.operate keep|watch|gateway ...`; in the image it is one zip file."""

import sys
from importlib import import_module

PROGRAMS = {
    "keep": "launcher.operate.keeper",
    "watch": "launcher.operate.watchdog",
    "p2p": "launcher.operate.p2p",
    "gateway": "launcher.operate.gateway.main",
}
"""Each module has `main(argv: Sequence[str]) -> int`."""


def main() -> int:
    """Run the program that the first argument names, and return its exit code."""
    name, *argv = sys.argv[1:] or [""]
    if name not in PROGRAMS:
        print(f"operate: {name!r}: no such program; there are {', '.join(PROGRAMS)}", file=sys.stderr)
        return 2
    return int(import_module(PROGRAMS[name]).main(argv))


if __name__ == "__main__":
    sys.exit(main())
