"""The decode kernels against FP32 attention, in Triton's interpreter."""

import dataclasses
import math

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_graft.attention.kernels import decode
from vllm_graft.attention.kernels.layout import PRESETS, slot_layout

from tests.kernels.cases import Batch, launch, make, relative_error, run

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
TOLERANCE = {torch.float16: 1.5e-3, torch.bfloat16: 4e-3}  # of the output's rounding and of FP16 operands
FP8, FOUR_BIT, THREE_FOUR, THREE_BIT = PRESETS


def error(batch: Batch, *, tokens: int = 32, programs: int = 5, min_tiles: int = 1) -> float:
    inputs = make(batch)
    found = run(batch, inputs, launch(tokens, min_tiles=min_tiles), programs)
    assert found.isfinite().all()
    return relative_error(found, inputs.wanted)


@pytest.mark.parametrize(
    ("head_size", "group", "page"), [(64, 1, 16), (128, 5, 32), (256, 2, 128)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("preset", PRESETS)
def test_decodes_of_a_ragged_batch_are_exact(preset: str, head_size: int, group: int, page: int) -> None:
    batch = Batch(preset, head_size, group, 1, page, lengths=(35, 1), queries=(1, 1), dtype=torch.float16)
    assert error(batch, programs=2) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("preset", PRESETS)
def test_rows_of_a_verify_step_see_what_lies_before_them(preset: str) -> None:
    assert error(Batch(preset, 64, 3, 1, 16, lengths=(67, 4, 33), queries=(4, 3, 1))) < TOLERANCE[torch.bfloat16]


def test_a_head_size_that_is_no_power_of_two_is_masked() -> None:
    assert error(Batch(FP8, 96, 3, 2, 64, lengths=(70, 33), queries=(2, 1))) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64])
def test_lengths_at_the_borders_of_tiles_and_pages(length: int) -> None:
    batch = Batch(FP8, 64, 2, 1, 32, lengths=(length,), queries=(1,), dtype=torch.float16)
    assert error(batch, programs=2) < TOLERANCE[torch.float16]


@pytest.mark.parametrize(("programs", "min_tiles"), [(1, 1), (3, 1), (3, 2), (16, 1)])
def test_any_number_of_programs_shares_the_tiles(programs: int, min_tiles: int) -> None:
    batch = Batch(FP8, 64, 2, 2, 16, lengths=(50, 5), queries=(2, 1), dtype=torch.float16)
    assert error(batch, tokens=16, programs=programs, min_tiles=min_tiles) < TOLERANCE[torch.float16]


def test_a_tile_may_be_longer_than_a_page() -> None:
    batch = Batch(FOUR_BIT, 64, 2, 1, 16, lengths=(75, 20), queries=(1, 2), dtype=torch.float16)
    assert error(batch, tokens=64) < TOLERANCE[torch.float16]


def test_more_rows_than_one_unit_holds_are_more_units() -> None:
    batch = Batch(FP8, 64, 13, 1, 32, lengths=(35,), queries=(3,), dtype=torch.float16)
    assert error(batch, programs=2) < TOLERANCE[torch.float16]


def test_padding_of_a_graph_is_zero_and_touches_nothing() -> None:
    batch = Batch(FOUR_BIT, 64, 2, 1, 16, lengths=(33, 0, 50, 0), queries=(2, 0, 0, 1), capacity=3, padding=9)
    inputs = make(batch)
    inputs.blocks[2] = 2**30  # a request without a query token: its pages are never read
    found = run(batch, inputs, launch(), 5)
    assert relative_error(found, inputs.wanted) < TOLERANCE[torch.bfloat16]
    assert (found[3:] == 0).all()
    assert (found[2] == 0).all()


def test_a_graph_of_one_length_serves_another() -> None:
    batch = Batch(FP8, 64, 2, 1, 16, lengths=(90, 17), queries=(2, 1), capacity=4)
    inputs = make(batch)
    shorter = dataclasses.replace(batch, lengths=(1, 1), queries=(1, 1))
    run(shorter, dataclasses.replace(inputs, lengths=torch.ones(2, dtype=torch.int32)), launch(), 5)
    assert relative_error(run(batch, inputs, launch(), 5), inputs.wanted) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_sizes_beyond_fp16_are_kept(scale: float) -> None:
    batch = Batch(FP8, 64, 2, 1, 16, lengths=(50,), queries=(1,))
    inputs = make(batch, key_size=1e-6 / scale, value_size=min(scale, 1e3))
    huge = dataclasses.replace(inputs, query=(inputs.query.float() * 1e6 * scale).to(torch.bfloat16))
    found = run(batch, huge, launch(), 3)
    assert found.isfinite().all()
    assert found.abs().max() > 0


def test_values_of_tokens_with_small_weights_count() -> None:
    batch = Batch(FP8, 64, 1, 1, 16, lengths=(150,), queries=(1,), dtype=torch.float16)
    inputs = make(batch, key_size=4.0, value_size=1e-3)
    found = run(batch, inputs, launch(), 4)
    assert relative_error(found, inputs.wanted) < 2e-3


@settings(max_examples=5, deadline=None)
@given(
    preset=st.sampled_from(list(PRESETS)),
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), min_size=1, max_size=2),
    group=st.integers(1, 3),
    page=st.sampled_from([16, 32]),
    programs=st.integers(1, 5),
    seed=st.integers(0, 2**20),
)
def test_any_small_batch(
    preset: str, requests: list[tuple[int, int]], group: int, page: int, programs: int, seed: int
) -> None:
    lengths = tuple(max(length, queries) for length, queries in requests)
    queries = tuple(queries for _, queries in requests)
    batch = Batch(preset, 64, group, 1, page, lengths, queries, torch.float16, capacity=3, padding=2, seed=seed)
    inputs = make(batch)
    found = run(batch, inputs, launch(16), programs)
    assert found.isfinite().all()
    if inputs.wanted.any():
        assert relative_error(found, inputs.wanted) < 2e-3
    else:
        assert not found.any()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_size": 80}, "head size 80"),
        ({"head_size": 96}, "power of two"),
        ({"num_heads": 7}, "do not divide"),
        ({"max_query_len": 40}, "160 rows"),
        ({"page_tokens": 48}, "a block of 48 tokens"),
        ({"dtype": torch.float32}, "torch.float32"),
        ({"sliding_window": 128}, "sliding window"),
        ({"logits_soft_cap": 30.0}, "cap on logits"),
        ({"has_sinks": True}, "sinks"),
        ({"has_alibi": True}, "ALiBi"),
    ],
)
def test_what_is_not_served_has_a_reason(change: dict[str, object], reason: str) -> None:
    asked = {"num_heads": 8, "num_kv_heads": 2, "max_query_len": 4, "page_tokens": 16, "dtype": torch.float16} | change
    layout = slot_layout(FOUR_BIT, int(str(asked.pop("head_size", 64))))
    said = decode.supports(layout, **asked)
    assert said is not None
    assert reason in said


@pytest.mark.parametrize("preset", PRESETS)
def test_what_serving_meets_is_served(preset: str) -> None:
    for head_size in (64, 128, 256):
        for group in range(1, 17):
            for queries in range(1, 9):
                assert (
                    decode.supports(
                        slot_layout(preset, head_size),
                        num_heads=group * 2,
                        num_kv_heads=2,
                        max_query_len=queries,
                        page_tokens=16,
                        dtype=torch.bfloat16,
                    )
                    is None
                )


def test_mse_keys_need_their_codebook() -> None:
    batch = Batch(FOUR_BIT, 64, 1, 1, 16, lengths=(1,), queries=(1,))
    inputs = make(batch)
    with pytest.raises(ValueError, match="turboquant_4bit_nc needs the one of prepare_codebook"):
        decode.verify_attention(
            inputs.query,
            inputs.cache,
            inputs.blocks,
            inputs.lengths,
            inputs.starts,
            max_query_len=1,
            layout=batch.layout,
            scale=math.sqrt(1 / 64),
            codebook=None,
            workspace=decode.Workspace(torch.zeros(10_000), 2),
            out=inputs.query,
            launch=launch(),
        )
