"""Copy data between every two GPUs in both directions and compare it: NVML's word on peer access is not enough.

Runs where torch is: in the image, or in the engine's environment.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

ELEMENTS = 1 << 20
"""Of 4 bytes: small enough for a card that is nearly full, and more than one DMA transfer."""
ROUNDS = 4


def main(argv: Sequence[str]) -> int:
    """Print `{"pairs": [{"from": 0, "to": 1, "peer": true, "wrong": 0}, ...]}` or `{"error": "..."}`."""
    try:
        import torch
    except ImportError as error:
        print(json.dumps({"error": f"torch cannot be imported: {error}"}))
        return 1
    if not torch.cuda.is_available():
        print(json.dumps({"error": "torch sees no CUDA device"}))
        return 1
    count = torch.cuda.device_count()
    try:
        pairs = [_copied(torch, one, two) for one in range(count) for two in range(count) if one != two]
    except RuntimeError as error:
        print(json.dumps({"error": " ".join(str(error).split())[:300]}))
        return 1
    print(json.dumps({"pairs": pairs}))
    return 0


def _copied(torch: Any, source: int, target: int) -> dict[str, Any]:
    """Copy a pattern that differs in every element and every round, and count the elements that arrive wrong."""
    wrong = 0
    for number in range(ROUNDS):
        sent = torch.arange(number, ELEMENTS + number, dtype=torch.int32, device=f"cuda:{source}")
        received = torch.full((ELEMENTS,), -1, dtype=torch.int32, device=f"cuda:{target}")
        received.copy_(sent)
        # Through the host's memory, which is another way than the one that is tested.
        wrong += int((received.cpu() != sent.cpu()).sum())
    peer = bool(torch.cuda.can_device_access_peer(source, target))
    return {"from": source, "to": target, "peer": peer, "wrong": wrong}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
