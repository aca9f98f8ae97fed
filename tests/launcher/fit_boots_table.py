"""What `tests/gpu/results/fit_boots.json` says, as the tables of `tests/gpu/README.md`."""

from collections.abc import Iterable, Mapping
from typing import Any

GIB = 2**30
Entry = Mapping[str, Any]


def markdown(document: Entry) -> str:
    """Return the tables and the sentences that explain each deviation, from the results alone."""
    booted = {name: one for name, one in document["cases"].items() if one["reported"]["outcome"] == "booted"}
    first = next(iter(booted.values()))["reported"]
    heading = (
        f"{len(booted)} boots of vLLM {document['vllm_version']} (torch {first['torch']}) on one {first['device']} "
        "with dummy weights. **The cards are emulated**: their memory is a cap on the larger GPU, whose kernels and "
        "CUDA context (compute capability 9.0) are not theirs. GiB; computed before the boot / reported."
    )
    return "\n\n".join((heading, _pools(booted), _exact(booted), _peaks(booted), _failed(document["cases"])))


def _pools(booted: Mapping[str, Entry]) -> str:
    rows: list[tuple[str, ...]] = [
        (
            "case",
            "context",
            "blocks",
            "KV memory",
            "weights",
            "activations",
            "graphs",
            "non-torch",
            "term that is off",
        ),
        ("---", *("---:",) * 7, "---"),
    ]
    for name, entry in booted.items():
        kv, reported = entry["predicted"]["kv"], entry["reported"]
        terms = {term["name"]: (term["predicted"], term["reported"]) for term in entry["comparison"]["terms"]}
        names = ("weights", "activation peak", "CUDA graphs", "non-torch memory")
        available = f"{_gib(kv['available_bytes'])} ±{_gib(kv['available_error_bytes'])} / "
        rows.append(
            (
                f"`{name}`",
                f"{reported['max_model_len']:,}",
                f"{kv['num_blocks']} / {reported['num_blocks']}",
                available + _gib(reported["available_bytes"]),
                *(f"{terms[one][0]:.2f} / {terms[one][1]:.2f}" for one in names),
                (entry["comparison"]["cause"] or "within one block").split(":")[0],
            )
        )
    return _table(rows)


def _exact(booted: Mapping[str, Entry]) -> str:
    held = {
        "the block size": "block_tokens_agree",
        "the blocks of the reported pool": "blocks_agree",
        "the printed tokens": "tokens_agree",
        "admission to the byte (one byte less is refused)": "admission_agrees",
    }
    parts = [
        f"{what} {sum(one['comparison'][key] for one in booted.values())} of {len(booted)}"
        for what, key in held.items()
    ]
    return "Exact, computed by the planner and by vLLM: " + ", ".join(parts) + "."


def _peaks(booted: Mapping[str, Entry]) -> str:
    rows: list[tuple[str, ...]] = [
        (
            "case",
            "card",
            "computed",
            "allocated after the boot",
            "working memory of the prompt",
            "allocator slack",
            "CUDA context",
            "kernels, driver",
            "= peak of the device",
            "above the computed",
        ),
        ("---", *("---:",) * 9),
    ]
    for name, entry in booted.items():
        reported, prefill = entry["reported"], entry["reported"]["prefill"]
        peak, context = reported["device_used_bytes"], reported["cuda_context_bytes"]
        parts = (
            prefill["allocated_before_bytes"],
            prefill["peak_allocated_bytes"] - prefill["allocated_before_bytes"],
            prefill["peak_reserved_bytes"] - prefill["peak_allocated_bytes"],
            context,
            peak - prefill["peak_reserved_bytes"] - context,
        )
        predicted = entry["comparison"]["predicted_peak_bytes"]
        rows.append(
            (
                f"`{name}`",
                f"{entry['case']['card_gib']}",
                _gib(predicted),
                *(_gib(part) for part in parts),
                _gib(peak),
                f"{(peak - predicted) / GIB:+.2f}",
            )
        )
    return _table(rows)


def _failed(cases: Mapping[str, Entry]) -> str:
    answered = [one for one in cases.values() if one["reported"].get("prefill", {}).get("outcome") == "answered"]
    failed = [name for name, one in cases.items() if one not in answered]
    text = f"A prompt that fills the planned context was answered in {len(answered)} of {len(cases)} boots"
    return f"{text}; not in {', '.join(failed)}." if failed else f"{text}."


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f}"
