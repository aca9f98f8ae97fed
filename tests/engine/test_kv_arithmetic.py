"""The block arithmetic against vLLM's own planning functions, for every dtype, in both pinned versions."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.fit.geometry import Geometry, geometry_from_config
from launcher.fit.kv import KV_DTYPES, KvLayout, KvRules, kv_layout

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = {"0.32.0": ROOT / ".venv-engine", "0.33.0": ROOT / ".venv-vllm-0.33"}
MODELS = json.loads((ROOT / "tests/data/kv_logs.json").read_text(encoding="utf-8"))["models"]
# NVFP4's slot is packed by FlashInfer's backend, which cannot be imported without a GPU.
DTYPES = [name for name in KV_DTYPES if name not in ("nvfp4", "bfloat16", "float16")]
SETTINGS = [
    # model, cards, speculative tokens, prefix caching, FlashInfer GDN prefill
    ("qwen3.6-27b", 1, 3, True, False),
    ("qwen3.6-27b", 1, 3, True, True),
    ("qwen3.6-27b", 1, 3, False, False),
    ("qwen3.6-27b", 1, 0, True, False),
    ("qwen3.6-27b", 2, 3, True, False),
    ("qwen3.6-27b", 4, 1, True, True),
    ("qwen3.6-35b-a3b", 1, 3, True, False),
    ("qwen3.6-35b-a3b", 4, 0, False, False),
    ("even", 1, 0, True, False),
]
CONTEXT = 100_000
POOL_BLOCKS = 333


def geometry(name: str) -> Geometry:
    fields = MODELS["qwen3.6-27b" if name == "even" else name]
    found = geometry_from_config({**fields, "architectures": [fields["architecture"]]}, name)
    # As many layers of one kind as nearly of the other: the larger group is used for both.
    return replace(found, attention_layers=12, gdn_layers=13) if name == "even" else found


def case(name: str, tp: int, spec: int, caching: bool, flashinfer: bool, dtype: str) -> tuple[KvLayout, dict[str, Any]]:
    model = geometry(name)
    rules = KvRules(64 if flashinfer else 16, int(flashinfer), True)
    layout = kv_layout(model, dtype, tp, spec, caching, rules)
    shape = (
        *("num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads"),
        *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "gdn_layers"),
    )
    asked = {field: getattr(model, field) for field in shape} | {
        "kv_cache_dtype": dtype,
        "tp": tp,
        "num_speculative_tokens": spec,
        "prefix_caching": caching,
        "checkpoint": flashinfer,
        "block_tokens": layout.block_tokens,
        "attention_layers": model.attention_layers + (model.mtp_layers if spec else 0),
        "context": CONTEXT,
        "available_bytes": POOL_BLOCKS * layout.bytes_per_block + layout.bytes_per_block - 1,
        "needed_bytes": layout.needed_bytes(CONTEXT),
    }
    return layout, asked


@pytest.mark.engine
@pytest.mark.parametrize("version", ENVIRONMENTS)
def test_blocks_admission_and_report_are_vllms_own(version: str) -> None:
    python = ENVIRONMENTS[version] / "bin/python"
    if not any(ENVIRONMENTS[version].glob("lib/python3*/site-packages/vllm/__init__.py")):
        pytest.skip(f"{ENVIRONMENTS[version].name} has no vLLM {version}; run `graft engine install`")
    cases = [case(*settings, dtype) for settings in SETTINGS for dtype in DTYPES]
    done = subprocess.run(
        [python, ROOT / "tests/engine/kv_planning.py"],
        input=json.dumps([asked for _, asked in cases]),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(answers) == len(cases)
    for (layout, asked), found in zip(cases, answers, strict=True):
        assert found["state_bytes"] == layout.state_bytes, asked
        assert found["page_bytes"] == layout.page_bytes, asked
        assert found["num_blocks"] == POOL_BLOCKS, asked
        assert len(found["groups"]) == layout.attention_groups + layout.gdn_groups, asked
        assert max(found["groups"]) == layout.group_layers, asked
        assert found["kv_cache_tokens"] == layout.reported_tokens(POOL_BLOCKS, CONTEXT), asked
        assert found["max_concurrency"] == layout.concurrency(POOL_BLOCKS, CONTEXT), asked
        assert found["one_byte_less"].startswith("To serve at least one request"), asked
