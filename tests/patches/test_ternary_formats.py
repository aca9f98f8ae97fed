"""Formats of ternary weights on disk: told from the tensors, and refused for what they are not."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs an environment with vLLM; the launcher's has none")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm_graft.quantization.ternary import formats
    from vllm_graft.quantization.ternary.formats import BITNET, Codes, FormatError, Packing, Undecided

N, K = 96, 160
UNKNOWN = formats.Format()


def values(n: int = N, k: int = K) -> Any:
    """Weights of which about half are zeros."""
    return torch.randint(-1, 2, (n, k), generator=torch.Generator().manual_seed(1), dtype=torch.int8) * (
        torch.rand(n, k, generator=torch.Generator().manual_seed(2)) < 0.8
    ).to(torch.int8)


def stored(weights: Any, packing: Packing, codes: Codes) -> Any:
    """The tensor on disk, written as the format's description reads."""
    n, k = weights.shape
    number = {Codes.OFFSET: weights + 1, Codes.ZERO_FIRST: weights % 3, Codes.SIGNED: weights}[codes]
    if packing.along is None:
        tensor = number
    else:
        number = number.to(torch.uint8)
        tensor = torch.zeros(*packing.shape(n, k)[:: -1 if packing.transposed else 1], dtype=torch.uint8)
        for row, column in itertools.product(range(n), range(k)):
            if packing.along == "k":
                tensor[row, column // 4] |= number[row, column] << 2 * (column % 4)
            else:
                tensor[row % (n // 4), column] |= number[row, column] << 2 * (row // (n // 4))
    return (tensor.T if packing.transposed else tensor).contiguous()


def read(tensor: Any, n: int, k: int, known: formats.Format = UNKNOWN) -> tuple[Any, Packing, Codes]:
    """The weights, and what was found."""
    packing = formats.packing_of(tensor.shape, tensor.dtype, n, k, known.packing)
    found, codes = formats.values_of(formats.raw_codes(tensor, packing, n, k), packing.along is not None, known.codes)
    return found, packing, codes


FORMATS = [  # packed codes have no sign
    (packing, codes) for packing in formats.PACKINGS for codes in Codes if not (codes is Codes.SIGNED and packing.along)
]


@pytest.mark.parametrize(("packing", "codes"), FORMATS, ids=str)
def test_a_format_is_told_from_the_tensor_alone(packing: Packing, codes: Codes) -> None:
    weights = values(48, 64)
    found, found_packing, found_codes = read(stored(weights, packing, codes), 48, 64)
    assert (found_packing, found_codes) == (packing, codes)
    assert torch.equal(found, weights)


def test_bitnets_own_packing_is_read_as_transformers_reads_it() -> None:
    bitnet = pytest.importorskip("transformers.integrations.bitnet")
    weights = values(64, 48)
    found, packing, codes = read(bitnet.pack_weights(weights.clone()), 64, 48)
    assert (packing, codes) == (BITNET.packing, BITNET.codes)
    assert torch.equal(found, weights)


def test_only_the_low_two_bits_of_unpacked_codes_count() -> None:
    tensor = stored(values(), Packing(None), Codes.OFFSET) + 64
    found, _, _ = read(tensor, N, K)
    assert torch.equal(found, values())


def test_columns_that_do_not_fill_a_byte_are_read() -> None:
    weights = values(96, 33)
    found, packing, _ = read(formats.pack_bytes(weights), 96, 33)
    assert packing == Packing("k")
    assert torch.equal(found, weights)
    assert torch.equal(formats.unpack_bytes(formats.pack_bytes(weights), 33), weights)


def test_a_square_weight_waits_for_what_others_tell() -> None:
    weights = values(96, 96)
    for packing in (Packing("k"), Packing("n"), Packing("k", transposed=True), Packing("n", transposed=True)):
        tensor = stored(weights, packing, Codes.OFFSET)
        with pytest.raises(Undecided):
            read(tensor, 96, 96)
        found, _, _ = read(tensor, 96, 96, formats.Format(packing))
        assert torch.equal(found, weights)


UNCLEAR = [(10, 10, 10), (500, 300, 200), (9, 2, 8), (1000, 1000, 1000), (5_660_000, 5_555_000, 5_570_000)]


@pytest.mark.parametrize("counts", UNCLEAR)
def test_codes_that_tell_nothing_are_not_guessed(counts: tuple[int, int, int]) -> None:
    assert formats.codes_from_counts(counts) is None


@pytest.mark.parametrize(
    ("counts", "codes"),
    [((3450, 3100, 3450), Codes.OFFSET), ((3100, 3450, 3450), Codes.ZERO_FIRST), ((100, 9800, 100), Codes.OFFSET)],
)
def test_codes_are_told_by_the_balance_of_signs(counts: tuple[int, int, int], codes: Codes) -> None:
    scaled = [100 * count for count in counts]
    assert formats.codes_from_counts(scaled) is codes


@pytest.mark.parametrize("packing", [Packing("k"), Packing("n"), Packing(None)], ids=str)
def test_a_code_of_three_is_refused(packing: Packing) -> None:
    tensor = stored(values(), packing, Codes.OFFSET)
    tensor[1, 1] = 3 if packing.along is None else tensor[1, 1] | 0b11
    with pytest.raises(FormatError, match="1 codes of value 3 among 15360; codes are 0, 1, 2"):
        read(tensor, N, K)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.int64])
def test_another_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(FormatError, match="ternary weights are uint8 or int8"):
        read(torch.zeros(N, K // 4).to(dtype), N, K)


def test_a_shape_that_fits_nothing_is_refused_with_all_that_would() -> None:
    with pytest.raises(FormatError, match=r"has the shape \[96, 41\].*\[96, 40\] four a byte along K.*\[24, 160\]"):
        read(torch.zeros(96, 41, dtype=torch.uint8), N, K)


@pytest.mark.parametrize(
    ("shape", "groups"),
    [((), 1), ((1,), 1), ((1, 1), 1), ((N,), 1), ((N, 1), 1), ((1, N), 1), ((N, 5), 5), ((5, N), 5), ((N, 5, 1), 5)],
)
def test_scales_of_a_tensor_a_row_or_a_group_are_read(shape: tuple[int, ...], groups: int) -> None:
    scales = torch.rand(shape) + 1
    found = formats.scales_of(scales, N, K)
    assert found.shape == (N, groups)
    if len(shape) > 1 and shape[0] == 5:
        assert torch.equal(found, scales.T)


@pytest.mark.parametrize("shape", [(N, 3), (7,), (N + 1, 5), (2, N, 5)])
def test_scales_of_no_use_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError, match=f"a weight of {N} outputs and {K} inputs has one scale, {N} scales"):
        formats.scales_of(torch.ones(shape), N, K)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_refused(bad: float) -> None:
    scales = torch.ones(N, 5)
    scales[2, 3] = bad
    with pytest.raises(FormatError, match="is not finite: element 13 of 480"):
        formats.scales_of(scales, N, K)


def test_a_scale_of_zero_does_not_divide() -> None:
    with pytest.raises(FormatError, match="scale of 0"):
        formats.reciprocal(torch.tensor([[1.0], [0.0]]))


def test_integer_scales_are_refused() -> None:
    with pytest.raises(FormatError, match="scales are float16, bfloat16 or float32"):
        formats.scales_of(torch.ones(N, dtype=torch.int32), N, K)
