"""Block arithmetic against the published tables for Qwen3.5/3.6 on vLLM 0.33.0."""

import pytest

from launcher.fit.geometry import Geometry
from launcher.fit.kv import (
    KvError,
    KvLayout,
    KvRules,
    block_alignment,
    gdn_prefill_checkpoint,
    gdn_state_bytes,
    kv_layout,
    null_block_deducted,
    slot_bytes,
)

GIB = 2**30
TRITON = KvRules(16, 0, True)
FLASHINFER = KvRules(64, 1, True)


def layout(geometry: Geometry, dtype: str, tp: int = 1, spec: int = 3, rules: KvRules = TRITON) -> KvLayout:
    return kv_layout(geometry, dtype, tp, spec, prefix_caching=True, rules=rules)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", 1024),
        ("bfloat16", 1024),
        ("fp8", 512),
        ("fp8_e4m3", 512),
        ("fp8_e5m2", 512),
        ("fp8_per_token_head", 520),
        ("int8_per_token_head", 520),
        ("int4_per_token_head", 264),
        ("nvfp4", 288),
        ("turboquant_k8v4", 388),
        ("turboquant_4bit_nc", 262),
        ("turboquant_k3v4_nc", 230),
        ("turboquant_3bit_nc", 198),
    ],
)
def test_slot_of_head_size_256(geometry_27b: Geometry, dtype: str, expected: int) -> None:
    assert slot_bytes(geometry_27b, dtype) == expected


def test_an_unknown_dtype_lists_the_known_ones(geometry_27b: Geometry) -> None:
    with pytest.raises(KvError, match=r"turboquant_4bit'; known: auto, .*turboquant_4bit_nc"):
        slot_bytes(geometry_27b, "turboquant_4bit")


def test_gdn_state_of_one_layer(geometry_27b: Geometry, geometry_35b: Geometry) -> None:
    assert gdn_state_bytes(geometry_27b, 1, 0) == 3_207_168
    assert gdn_state_bytes(geometry_27b, 1, 3) == 3_268_608
    assert gdn_state_bytes(geometry_27b, 2, 3) == 1_634_304
    assert gdn_state_bytes(geometry_35b, 1, 0) == 2_146_304
    assert gdn_state_bytes(geometry_35b, 1, 3) == 2_195_456


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "aligned_16", "aligned_64"),
    [
        ("auto", 800, 832),
        ("fp8", 1600, 1600),
        ("int8_per_token_head", 1584, 1600),
        ("int4_per_token_head", 3104, 3136),
        ("nvfp4", 2848, 2880),
        ("turboquant_k8v4", 2112, 2112),
        ("turboquant_4bit_nc", 3120, 3136),
        ("turboquant_k3v4_nc", 3568, 3584),
        ("turboquant_3bit_nc", 4128, 4160),
    ],
)
def test_block_size_of_27b_with_three_speculative_tokens(
    geometry_27b: Geometry, tp: int, dtype: str, aligned_16: int, aligned_64: int
) -> None:
    assert layout(geometry_27b, dtype, tp).block_tokens == aligned_16
    assert layout(geometry_27b, dtype, tp, rules=FLASHINFER).block_tokens == aligned_64


def test_mtp_makes_every_block_one_attention_layer_larger(geometry_27b: Geometry, geometry_35b: Geometry) -> None:
    with_mtp = layout(geometry_27b, "fp8")
    assert (with_mtp.group_layers, with_mtp.attention_groups, with_mtp.gdn_groups) == (17, 1, 3)
    assert with_mtp.padding_layers == 3
    assert layout(geometry_27b, "fp8", spec=0).group_layers == 16
    assert layout(geometry_35b, "fp8").group_layers == 11
    assert layout(geometry_35b, "fp8", spec=0).group_layers == 10


def test_layer_counts_less_than_one_and_a_half_apart_share_the_larger_group(dense: Geometry) -> None:
    from dataclasses import replace

    mixed = replace(
        dense,
        attention_layers=12,
        gdn_layers=13,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        ssm_dtype_bytes=4,
    )
    even = layout(mixed, "auto", spec=0)
    assert (even.group_layers, even.attention_groups, even.gdn_groups, even.padding_layers) == (13, 1, 1, 1)


TABLE_27B = """
bf16 56/2.96 97/5.08 179/9.34 343/17.85 8.92 58/3.18 176/9.55 334/18.07
fp8 36/1.92 56/2.96 97/5.08 179/9.34 4.67 39/2.08 100/5.24 182/9.49
int8_per_token_head 36/1.93 57/3.03 98/5.16 181/9.49 4.75 39/2.11 100/5.32 182/9.64
turboquant_k8v4 31/1.66 47/2.49 78/4.10 140/7.32 3.66 34/1.82 81/4.26 143/7.47
nvfp4 27/1.45 39/2.08 62/3.27 108/5.66 2.83 30/1.63 64/3.41 110/5.83
turboquant_4bit_nc 26/1.40 37/1.97 58/3.05 100/5.23 2.61 29/1.56 60/3.17 102/5.36
int4_per_token_head 26/1.40 37/1.97 58/3.06 100/5.24 2.62 29/1.57 60/3.20 102/5.40
turboquant_k3v4_nc 25/1.35 34/1.82 52/2.75 89/4.68 2.34 28/1.51 55/2.92 92/4.85
turboquant_3bit_nc 23/1.24 31/1.66 47/2.48 79/4.14 2.07 26/1.41 50/2.66 82/4.33
"""
CONTEXTS = [(TRITON, 32768), (TRITON, 65536), (TRITON, 131072), (TRITON, 262144), None]
CONTEXTS += [(FLASHINFER, 32768), (FLASHINFER, 131072), (FLASHINFER, 262144)]


@pytest.mark.parametrize("line", TABLE_27B.strip().splitlines(), ids=lambda line: line.split()[0])
def test_blocks_and_memory_of_one_27b_request(geometry_27b: Geometry, line: str) -> None:
    name, *cells = line.split()
    dtype = "auto" if name == "bf16" else name
    for cell, context in zip(cells, CONTEXTS, strict=True):
        if context is None:
            two_cards = layout(geometry_27b, dtype, tp=2)
            assert f"{two_cards.needed_bytes(262144) / GIB:.2f}" == cell
            continue
        rules, length = context
        blocks = layout(geometry_27b, dtype, rules=rules)
        assert f"{blocks.request_blocks(length)}/{blocks.needed_bytes(length) / GIB:.2f}" == cell


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", 16.37),
        ("fp8", 8.37),
        ("turboquant_k8v4", 6.45),
        ("turboquant_4bit_nc", 4.46),
        ("turboquant_3bit_nc", 3.45),
    ],
)
def test_memory_of_256k_without_mtp(geometry_27b: Geometry, dtype: str, expected: float) -> None:
    assert round(layout(geometry_27b, dtype, spec=0).needed_bytes(262144) / GIB, 2) == expected


@pytest.mark.parametrize(
    ("dtype", "with_mtp", "without"),
    [("auto", 5.87, 5.16), ("fp8", 3.13, 2.66), ("turboquant_k8v4", 2.45, 2.04), ("turboquant_4bit_nc", 1.78, 1.42)],
)
def test_memory_of_256k_on_35b(geometry_35b: Geometry, dtype: str, with_mtp: float, without: float) -> None:
    assert round(layout(geometry_35b, dtype).needed_bytes(262144) / GIB, 2) == with_mtp
    assert round(layout(geometry_35b, dtype, spec=0).needed_bytes(262144) / GIB, 2) == without


def test_speculation_holds_whole_blocks_of_every_request(geometry_27b: Geometry) -> None:
    assert layout(geometry_27b, "fp8").state_blocks == 15
    assert layout(geometry_27b, "fp8", rules=FLASHINFER).state_blocks == 18
    without_caching = kv_layout(geometry_27b, "fp8", 1, 3, prefix_caching=False, rules=TRITON)
    assert without_caching.state_blocks == 12


def test_the_longest_context_is_admitted_and_one_more_block_is_not(geometry_27b: Geometry) -> None:
    blocks = layout(geometry_27b, "fp8")
    longest = blocks.longest_context(39, 262144)
    assert longest == 36_800
    assert blocks.needed_bytes(longest) <= 39 * blocks.bytes_per_block < blocks.needed_bytes(longest + 1)


def test_a_dense_model_has_one_group_of_16_token_blocks(dense: Geometry) -> None:
    blocks = kv_layout(dense, "auto", 1, 0, prefix_caching=True, rules=TRITON)
    assert (blocks.block_tokens, blocks.attention_groups, blocks.gdn_groups, blocks.state_blocks) == (16, 1, 0, 0)
    assert blocks.bytes_per_block == 30 * 16 * 3 * 64 * 2 * 2
    assert blocks.request_blocks(8192) == 512
    assert blocks.longest_context(101, 8192) == 1600


def test_kv_heads_are_replicated_when_there_are_more_cards(geometry_35b: Geometry) -> None:
    assert layout(geometry_35b, "fp8", tp=4).token_bytes == layout(geometry_35b, "fp8", tp=2).token_bytes


@pytest.mark.parametrize(
    ("capability", "cuda", "caching", "backend", "expected"),
    [
        ((8, 6), 13, True, "auto", 0),
        ((8, 9), 13, True, "auto", 0),
        ((9, 0), 12, True, "auto", 1),
        ((9, 0), 13, False, "auto", 0),
        ((9, 0), 13, True, "triton", 0),
        ((12, 0), 13, True, "auto", 1),
        ((12, 0), 13, True, "flashinfer", 1),
        ((12, 0), 12, True, "auto", 0),
        ((12, 0), 13, True, "triton", 0),
        ((10, 0), 13, True, "auto", 1),
        (None, 13, True, "auto", 0),
    ],
)
def test_flashinfer_gdn_prefill_is_derived_from_the_platform(
    geometry_27b: Geometry,
    capability: tuple[int, int] | None,
    cuda: int,
    caching: bool,
    backend: str,
    expected: int,
) -> None:
    assert gdn_prefill_checkpoint(geometry_27b, capability, cuda, caching, backend) == expected


def test_a_dense_model_has_no_gdn_prefill(dense: Geometry) -> None:
    assert gdn_prefill_checkpoint(dense, (9, 0), 13, True) == 0


def test_block_alignment_follows_backend_and_platform(geometry_27b: Geometry) -> None:
    assert block_alignment(geometry_27b, (8, 6), "fp8", 0) == 16
    assert block_alignment(geometry_27b, (12, 0), "fp8", 1) == 64
    assert block_alignment(geometry_27b, (10, 0), "auto", 1) == 128
    assert block_alignment(geometry_27b, (10, 0), "turboquant_k8v4", 1) == 64
    assert block_alignment(geometry_27b, None, "auto", 0) == 32


def test_the_null_block_is_deducted_by_current_builds_only() -> None:
    assert not null_block_deducted("0.20.2")
    assert not null_block_deducted("0.27.1")
    assert null_block_deducted("0.32.0")
    assert null_block_deducted("0.33.0")
    assert null_block_deducted("0.33.1+cpu")
