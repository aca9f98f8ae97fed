"""Download a snapshot: `python hub_download.py` with the arguments of `snapshot_download` as JSON on stdin.

A process of its own, since a download that hangs can only be ended from outside.
"""

import json
import sys

from huggingface_hub import snapshot_download

if __name__ == "__main__":
    try:
        snapshot_download(**json.load(sys.stdin))
    except KeyboardInterrupt:
        sys.exit(130)
