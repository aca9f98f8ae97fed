"""The ternary kernels in Triton's interpreter against float32, at odd sizes, and their layout against itself."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

if "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

torch = pytest.importorskip("torch", reason="needs an environment with vLLM; the launcher's has none")
pytest.importorskip("triton", reason="needs Triton; the launcher's environment has none")
from vllm_graft.quantization.ternary import cpu, formats, kernels, layout, reference  # noqa: E402
from vllm_graft.quantization.ternary.kernels import GemmConfig, GemvConfig  # noqa: E402

ROUNDING = {torch.bfloat16: 5e-3, torch.float16: 7e-4}  # of one output; the interpreter cuts where a GPU rounds

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


def random_weight(n: int, k: int, groups: int, dtype: Any) -> tuple[Any, Any]:
    """Values int8 [n, k] and scales [n, groups]."""
    random = torch.Generator().manual_seed(n * k + groups)
    values = torch.randint(-1, 2, (n, k), generator=random, dtype=torch.int8)
    return values, (torch.rand(n, groups, generator=random) + 0.5).to(dtype)


def product(x: Any, values: Any, scales: Any) -> Any:
    """The truth in float64, from the tensors as they were before any packing."""
    columns = scales.double().repeat_interleave(values.shape[1] // scales.shape[1], dim=1)
    return x.double() @ (values.double() * columns).T


@pytest.mark.parametrize(("n", "k"), [(16, 128), (33, 100), (200, 300), (1, 1), (1040, 129)])
def test_packed_words_unpack_to_the_same_weights(n: int, k: int) -> None:
    values, _ = random_weight(n, k, 1, torch.float16)
    words = layout.pack_words(values)
    assert words.numel() * 2 == layout.padded(n, 16) * layout.padded(k, 128) // 4
    assert torch.equal(layout.unpack_words(words, n, k), values)


@pytest.mark.parametrize(
    ("k", "groups", "group"), [(256, 1, 256), (512, 2, 256), (96, 6, 16), (384, 4, 32), (160, 5, 32)]
)
def test_scales_unpack_to_those_of_each_column(k: int, groups: int, group: int) -> None:
    values, scales = random_weight(20, k, groups, torch.bfloat16)
    packed = layout.pack(values, scales)
    assert packed.group == group
    assert torch.equal(
        layout.unpack_scales(packed.scales, 20).repeat_interleave(packed.group, dim=1)[:, :k],
        scales.repeat_interleave(k // groups, dim=1),
    )


@pytest.mark.parametrize(("group", "k"), [(8, 64), (24, 96), (1, 32), (100, 300)])
def test_groups_that_the_kernels_cannot_take_are_refused(group: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"a group of {group} columns"):
        layout.kernel_group(group, k)


CASES = [
    # tokens, outputs, inputs, groups, activations, scales, configuration
    (1, 33, 300, 1, torch.bfloat16, torch.float32, None),
    (1, 40, 256, 2, torch.float16, torch.float16, None),
    (1, 16, 2048, 1, torch.bfloat16, torch.float16, GemvConfig(4, 1, 2, 3)),
    (3, 40, 256, 4, torch.bfloat16, torch.bfloat16, None),
    (7, 70, 512, 16, torch.bfloat16, torch.float16, GemvConfig(4, 2, 2, 2)),
    (16, 20, 2048, 8, torch.bfloat16, torch.float16, GemvConfig(2, 1, 1, 2)),
    (16, 17, 130, 1, torch.bfloat16, torch.float16, None),
    (9, 48, 96, 6, torch.float16, torch.float16, None),
    (17, 50, 200, 1, torch.bfloat16, torch.float16, None),
    (33, 70, 200, 1, torch.float16, torch.float32, None),
    (65, 140, 256, 2, torch.bfloat16, torch.float16, None),
    (70, 80, 512, 2, torch.float16, torch.bfloat16, GemmConfig(64, 64, 4, 2, 2)),
    (66, 80, 192, 3, torch.bfloat16, torch.float16, GemmConfig(64, 32, 4, 2, 1)),
    (20, 40, 96, 6, torch.bfloat16, torch.float16, GemmConfig(64, 32, 4, 2)),
    (4096, 16, 40, 1, torch.float16, torch.float16, GemmConfig(64, 256, 4, 2)),
]


@interpreted
@pytest.mark.parametrize(("m", "n", "k", "groups", "dtype", "scale_dtype", "config"), CASES)
def test_a_product_is_that_of_float64_within_rounding(
    m: int, n: int, k: int, groups: int, dtype: Any, scale_dtype: Any, config: Any
) -> None:
    values, scales = random_weight(n, k, groups, scale_dtype)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype) if n % 20 == 0 else None
    weight = layout.pack(values, scales)
    truth = product(x, values, scales)
    assert torch.allclose(reference.linear(x, weight).double(), truth, rtol=1e-4, atol=1e-4)
    if bias is not None:
        truth = truth + bias.double()
    y = kernels.linear(x, weight, bias, config)
    assert y.dtype == dtype
    assert float((y.double() - truth).norm() / truth.norm()) < ROUNDING[dtype]


@interpreted
def test_inputs_beyond_the_last_column_do_not_count() -> None:
    values, scales = random_weight(16, 100, 1, torch.float16)
    rows = torch.full((3, 128), torch.nan, dtype=torch.float16)
    rows[:, :100] = 1
    y = kernels.linear(rows[:, :100], layout.pack(values, scales))
    assert torch.allclose(y.double(), product(rows[:, :100], values, scales), rtol=2e-3, atol=2e-2)


@interpreted
def test_no_tokens_give_no_outputs() -> None:
    values, scales = random_weight(16, 128, 1, torch.float16)
    assert kernels.linear(torch.empty(0, 128, dtype=torch.float16), layout.pack(values, scales)).shape == (0, 16)


@pytest.mark.parametrize(("m", "n", "k", "groups"), [(1, 5, 7, 1), (3, 33, 64, 4), (2, 9, 30, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_on_the_cpu_is_that_of_float64_within_rounding(
    monkeypatch: pytest.MonkeyPatch, m: int, n: int, k: int, groups: int, dtype: Any
) -> None:
    monkeypatch.setattr(cpu, "_WEIGHTS_AT_ONCE", 3 * k)  # several blocks, the last one short
    values, scales = random_weight(n, k, groups, dtype)
    x, bias = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype)
    y = cpu.linear(x, formats.pack_bytes(values), scales, bias, k)
    truth = product(x, values, scales) + bias.double()
    assert torch.allclose(y.double(), truth, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=5e-2)


CARDS = (kernels.Card(99 << 10, 46), kernels.Card(99 << 10, 170), kernels.Card(227 << 10, 132))


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("group", [16, 64, 128, 4096, 17408])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 4096), (5120, 17408)])
def test_what_is_chosen_fits_the_shared_memory_of_the_card(card: Any, group: int, n: int, k: int) -> None:
    for m in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 1024, 4096):
        config = kernels.choose(m, n, k, group, card)
        if isinstance(config, GemvConfig):
            tokens = 1 if m == 1 else max(8, 1 << (m - 1).bit_length())
            stage = config.warps * config.tiles * (config.strips * 512 + 128 * tokens * 2)
        else:
            stage = config.outputs * 32 + config.tokens * 128 * 2
        # Triton holds a stage less than it is told where products read registers, and as many where they read memory.
        buffers = config.stages if card.shared_bytes >= kernels.LARGE_SHARED_BYTES else config.stages - 1
        assert stage * buffers <= card.shared_bytes


def test_blocks_grow_with_the_programs_that_they_leave() -> None:
    card = kernels.Card(227 << 10, 132)
    sizes = {n: [_block(m, n, card) for m in (64, 128, 256, 512, 1024, 4096)] for n in (1024, 4096, 17408)}
    assert sizes == {
        1024: ["64x64", "64x64", "64x64", "64x64", "64x64", "128x256"],
        4096: ["64x64", "64x64", "64x64", "128x128", "128x256", "128x256"],
        17408: ["64x64", "128x128", "128x128", "128x128", "128x256", "128x256"],
    }


def _block(m: int, n: int, card: Any) -> str:
    config = kernels.choose(m, n, 4096, 4096, card)
    assert isinstance(config, GemmConfig)
    return f"{config.outputs}x{config.tokens}"


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("group", [64, 128, 4096])
@pytest.mark.parametrize("n", [64, 1024, 4096, 28672])
def test_every_kernel_that_may_be_chosen_is_warmed_up(card: Any, group: int, n: int) -> None:
    def compiled(m: int, config: Any) -> tuple[Any, int]:
        if isinstance(config, GemmConfig):
            return config, 0
        return config, 1 if m == 1 else max(8, 1 << (m - 1).bit_length())

    warm = {compiled(m, config) for m, config in kernels.to_compile(n, 4096, group, card)}
    steps = (*range(1, 5000), *range(5001, 40000, 501))
    may_be = {compiled(m, kernels.choose(m, n, 4096, group, card)) for m in steps}
    assert may_be <= warm
    assert len(warm) <= 7
