"""The look-up of centroids: its instructions, followed step by step here, give the centroids."""

import re
from collections.abc import Callable

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from vllm_graft.attention.kernels.codebook import prepare_codebook
from vllm_graft.attention.kernels.layout import slot_layout

from tests.kernels.cases import centroids

WORD = 0xFFFFFFFF


def permuted(low: int, high: int, selector: int) -> int:
    """PTX's prmt: each byte of the result is one of eight, by four bits of the selector; the highest spreads a sign."""
    source = low | high << 32
    result = 0
    for place in range(4):
        choice = selector >> (4 * place) & 0xF
        byte = source >> (8 * (choice & 7)) & 0xFF
        if choice & 8:
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << (8 * place)
    return result


OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "not.b32": lambda a: ~a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "sub.u32": lambda a, b: a - b,
    "prmt.b32": permuted,
}


def followed(code: str, outputs: int, words: list[int]) -> list[int]:
    """The output registers of instructions, whose inputs come after the outputs."""
    registers = {f"${outputs + place}": word for place, word in enumerate(words)}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for statement in code.strip()[1:-1].split(";"):
        parts = re.split(r"[\s,{}]+", statement.strip(" \n}"))
        if parts == [""] or parts[0] == ".reg":
            continue
        if parts[0] == "mov.b64":
            registers[parts[1]] = value(parts[2]) | value(parts[3]) << 32
        else:
            registers[parts[1]] = OPERATIONS[parts[0]](*map(value, parts[2:])) & WORD
    return [registers[f"${place}"] for place in range(outputs)]


def looked_up(lookup: str, bits: int, codes: list[list[int]]) -> list[list[int]]:
    """The FP16 bits that two words of codes give."""
    packed = [sum(code << (bits * place) for place, code in enumerate(row)) for row in codes]
    if bits == 4:  # each result is the four centroids of a word
        fours = followed(lookup, 2, [packed[0] | packed[1] << 16])
        return [[four >> (16 * place) & 0xFFFF for place in range(4)] for four in fours]
    pairs = followed(lookup, 8, packed)  # each result is a centroid of both words
    return [[pair >> (16 * word) & 0xFFFF for pair in pairs] for word in range(2)]


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("preset", ["turboquant_4bit_nc", "turboquant_3bit_nc"])
def test_each_code_is_looked_up(preset: str, head_size: int) -> None:
    bits = slot_layout(preset, head_size).preset.key_bits
    codebook = prepare_codebook(centroids(slot_layout(preset, head_size)))
    wanted = torch.tensor(codebook.values, dtype=torch.float16).view(torch.int16).tolist()
    generator = torch.Generator().manual_seed(head_size)
    for _ in range(40):
        codes = torch.randint(0, 2**bits, (2, 4 if bits == 4 else 8), generator=generator).tolist()
        assert looked_up(codebook.lookup, bits, codes) == [[wanted[code] & 0xFFFF for code in row] for row in codes]


@pytest.mark.parametrize(("preset", "error"), [("turboquant_4bit_nc", 4.5e-5), ("turboquant_3bit_nc", 2e-5)])
def test_the_values_are_the_centroids_times_a_factor_that_rounds_little(preset: str, error: float) -> None:
    given = centroids(slot_layout(preset, 128)).double()
    values = torch.tensor(prepare_codebook(given).values, dtype=torch.float64)
    assert torch.equal(values, -values.flip(0))
    factor = (values @ given) / (given @ given)
    assert (values - factor * given).norm() < error * values.norm()
    rounded = given.half().double()
    assert (rounded - given).norm() > 2 * error * given.norm()  # what FP16 makes of the centroids as they are


@pytest.mark.parametrize(
    ("given", "fault"), [(torch.arange(4.0), "got 4 of them"), (torch.arange(8.0), "not symmetric about zero")]
)
def test_other_centroids_are_refused(given: torch.Tensor, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        prepare_codebook(given)
