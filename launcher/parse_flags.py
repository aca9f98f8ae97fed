"""Run inside an environment with vLLM: parse command lines from standard input with `vllm serve`'s own parser.

Run it with `python -P`: modules beside it have names of the standard library.
Input: a JSON list of argument lists. Output, as the last line: a JSON list of null, or of the parser's complaint.
"""

import contextlib
import io
import json
import sys

import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

# The parser asks the platform for defaults; a wheel for CUDA finds none on a machine without a GPU.
vllm.platforms._current_platform = CpuPlatform()

from vllm.entrypoints.cli.serve import cmd_init  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

parser = FlexibleArgumentParser()
commands = parser.add_subparsers(dest="subparser")
for command in cmd_init():
    command.subparser_init(commands)


def complaint(argv: list[str]) -> str | None:
    """Return what the parser says against the arguments; None when it takes them."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_args(["serve", "model", *argv])
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    return None


print(json.dumps([complaint(argv) for argv in json.load(sys.stdin)]))
