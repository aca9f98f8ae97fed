"""What the tables of result files share: on what it was measured, which cases are whole, and Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_VERSIONS = {"vllm": "vLLM", "torch": "torch", "triton": "Triton", "cuda": "CUDA", "python": "Python"}


def about(host: Mapping[str, str]) -> str:
    """Return the card, the versions and, where it is known, the day in one sentence."""
    capability = host.get("compute_capability")
    card = host.get("gpu") or f"CPU ({host['cpu']})"
    if capability:
        card += f" (compute capability {capability})"
    versions = [f"{title} {host[name]}" for name, title in _VERSIONS.items() if name in host]
    return f"{', '.join((card, *versions, *([host['date']] if 'date' in host else [])))}."


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, names: int | None = None) -> str:
    """Return a table in Markdown; behind so many columns of `names` numbers are aligned to the right."""
    numbers = 0 if names is None else len(head) - names
    lines = [head, ("---",) * (len(head) - numbers) + ("---:",) * numbers, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def whole(cases: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cases that ran to their end."""
    return {name: case for name, case in cases.items() if "error" not in case}


def parts(*texts: str) -> str:
    """Return texts as paragraphs, without the empty ones."""
    return "\n\n".join(text for text in texts if text)


def broken(cases: Mapping[str, Any]) -> str:
    """Say which cases did not run to their end; empty where all did."""
    names = [f"`{name}`" for name, case in sorted(cases.items()) if "error" in case]
    return f"Without a result: {', '.join(names)}." if names else ""
