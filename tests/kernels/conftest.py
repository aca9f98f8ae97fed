"""The tests of the kernels need torch and Triton, which the launcher's environment lacks: test_kernels.py runs them."""

import importlib.util
from pathlib import Path

FOLDER = Path(__file__).parent
NEEDS_TRITON = tuple(
    sorted(path.name for path in FOLDER.glob("test_*.py") if 'importorskip("triton' in path.read_text())
)
"""The files that test_kernels.py runs with the Python of vLLM 0.33.0."""
COMPILED = tuple(name for name in NEEDS_TRITON if name.startswith("test_compiled"))
"""Those of them that compile; the others are interpreted."""
collect_ignore = () if importlib.util.find_spec("triton") else NEEDS_TRITON
