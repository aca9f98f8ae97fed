"""Imported for its effect: `launcher` and `vllm_graft` of this checkout can be imported behind it, installed or not."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

for folder in (ROOT, ROOT / "patches"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
