"""Ternary layers of the real vLLM: loaded in every format and by every rank, refused by tensor name, multiplied."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

torch = pytest.importorskip("torch", reason="needs an environment with vLLM; the launcher's has none")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    linear = pytest.importorskip("vllm.model_executor.layers.linear", reason="needs vLLM; the launcher's has none")
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm_graft import quantization
    from vllm_graft.quantization.ternary import formats
    from vllm_graft.quantization.ternary.config import TernaryConfig
    from vllm_graft.quantization.ternary.formats import FormatError

HIDDEN, WIDE = 256, 192
MAPPING = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
}


def ternary(n: int, k: int, seed: int = 0) -> Any:
    """Weights of which about half are zeros."""
    random = torch.Generator().manual_seed(n + k + seed)
    return torch.randint(-1, 2, (n, k), generator=random, dtype=torch.int8) * torch.randint(
        0, 4, (n, k), generator=random, dtype=torch.int8
    ).clamp_(max=1)


def scales(n: int, groups: int = 1, seed: int = 0) -> Any:
    """Positive scales."""
    return torch.rand(n, groups, generator=torch.Generator().manual_seed(n + seed)).to(torch.float16) + 0.5


def dense(values: Any, scale: Any) -> Any:
    """The weight in float32."""
    return values.float() * scale.float().repeat_interleave(values.shape[1] // scale.shape[1], dim=1)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Make vLLM's layers take a rank of a number of them."""

    def take(rank: int, size: int) -> None:
        from vllm.model_executor.layers import vocab_parallel_embedding

        for module in (linear, parameter, vocab_parallel_embedding):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)

    return take


@pytest.fixture(scope="module")
def vllm_config() -> Any:
    return VllmConfig(device_config=DeviceConfig("cpu"))


@pytest.fixture(autouse=True)
def one_rank(ranks: Callable[[int, int], None], vllm_config: Any) -> Iterator[None]:
    ranks(0, 1)
    with set_current_vllm_config(vllm_config):
        yield


def config(**keys: Any) -> TernaryConfig:
    """A config as vLLM makes it of config.json, with the model's names of fused layers."""
    made = TernaryConfig.from_config({"quant_method": "ternary", **keys})
    made.packed_modules_mapping = MAPPING
    return made


def qkv(quant_config: TernaryConfig) -> Any:
    """8 query heads and 2 KV heads of 32."""
    return linear.QKVParallelLinear(
        HIDDEN, 32, 8, 2, bias=False, quant_config=quant_config, prefix="layers.0.qkv_proj", return_bias=False
    )


def column(quant_config: TernaryConfig, name: str = "layers.0.wide") -> Any:
    return linear.ColumnParallelLinear(
        HIDDEN, WIDE, bias=False, quant_config=quant_config, prefix=name, return_bias=False
    )


def row(quant_config: TernaryConfig, k: int = HIDDEN, n: int = WIDE) -> Any:
    return linear.RowParallelLinear(
        k,
        n,
        bias=False,
        quant_config=quant_config,
        prefix="layers.0.down_proj",
        return_bias=False,
        reduce_results=False,
    )


def load(layer: Any, weight: Any, scale: Any, shard: Any = None) -> None:
    """Load as a model does."""
    part = () if shard is None else (shard,)
    layer.weight.weight_loader(layer.weight, weight, *part)
    layer.weight_scale.weight_loader(layer.weight_scale, scale, *part)


def output(layer: Any, x: Any) -> Any:
    """What the layer computes of x, in its own dtype."""
    layer.quant_method.process_weights_after_loading(layer)
    return layer.quant_method.apply(layer, x, None)


def near(y: Any, x: Any, weight: Any) -> bool:
    """Whether y is x times the weight, within the rounding of float16."""
    return bool(torch.allclose(y.float(), x.float() @ weight.T, rtol=4e-3, atol=4e-2))


def tokens(count: int = 3, width: int = HIDDEN) -> Any:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count)).to(torch.float16)


def test_the_plugin_registers_the_method_once() -> None:
    from vllm.model_executor.layers import quantization as methods

    quantization.register()
    quantization.register()
    assert get_quantization_config("ternary") is TernaryConfig
    assert methods.QUANTIZATION_METHODS.count("ternary") == 1


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 4])
def test_fused_qkv_takes_the_scales_of_each_part_on_each_rank(
    ranks: Callable[[int, int], None], size: int, groups: int
) -> None:
    parts = {"q": 8, "k": 2, "v": 2}
    weights = {
        part: (ternary(32 * heads, HIDDEN, heads), scales(32 * heads, groups, ord(part)))
        for part, heads in parts.items()
    }
    x = tokens()
    for rank in range(size):
        ranks(rank, size)
        layer = qkv(config())
        for part, (values, scale) in weights.items():
            load(layer, formats.pack_bytes(values), scale, part)
        kept = []
        for part, heads in parts.items():
            whole = dense(*weights[part])
            mine = max(1, heads // size)
            first = rank * mine if heads >= size else rank * heads // size
            kept.append(whole[32 * first : 32 * (first + mine)])
        assert near(output(layer, x), x, torch.cat(kept))


@pytest.mark.parametrize("size", [1, 2])
def test_gate_and_up_may_have_groups_of_different_sizes(ranks: Callable[[int, int], None], size: int) -> None:
    parts = [(ternary(WIDE, HIDDEN, 1), scales(WIDE, 2)), (ternary(WIDE, HIDDEN, 2), scales(WIDE, 8).float())]
    x = tokens()
    for rank in range(size):
        ranks(rank, size)
        layer = linear.MergedColumnParallelLinear(
            HIDDEN, [WIDE, WIDE], bias=False, quant_config=config(), prefix="layers.0.gate_up_proj", return_bias=False
        )
        for number, (values, scale) in enumerate(parts):
            load(layer, formats.pack_bytes(values), scale, number)
        rows = slice(rank * WIDE // size, (rank + 1) * WIDE // size)
        assert near(output(layer, x), x, torch.cat([dense(*part)[rows] for part in parts]))


def qkvz(quant_config: TernaryConfig) -> Any:
    """The input of Qwen3.5's gated delta nets: four parts, of which its checkpoints hold the first three together."""
    return linear.MergedColumnParallelLinear(
        HIDDEN,
        [64, 64, 128, 128],
        bias=False,
        quant_config=quant_config,
        prefix="layers.0.in_proj_qkvz",
        return_bias=False,
    )


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_tensor_of_several_parts_is_cut_part_by_part(
    ranks: Callable[[int, int], None], size: int, groups: int
) -> None:
    together, alone = (ternary(256, HIDDEN), scales(256, groups)), (ternary(128, HIDDEN), scales(128))
    x = tokens()
    for rank in range(size):
        ranks(rank, size)
        layer = qkvz(config())
        load(layer, formats.pack_bytes(together[0]), together[1], (0, 1, 2))
        load(layer, formats.pack_bytes(alone[0]), alone[1], 3)
        parts = [*dense(*together).split([64, 64, 128]), dense(*alone)]
        assert near(output(layer, x), x, torch.cat([part.chunk(size)[rank] for part in parts]))


def test_a_tensor_of_several_parts_is_refused_by_its_own_name() -> None:
    layer = qkvz(config())
    with pytest.raises(FormatError, match=r"layers.0.in_proj_qkv.weight has the shape \[256, 63\]"):
        load(layer, formats.pack_bytes(ternary(256, HIDDEN))[:, 1:], scales(256), (0, 1, 2))
    layer.weight_scale.weight_loader(layer.weight_scale, scales(256), (0, 1, 2))
    missing = "^layers.0.in_proj_qkv.weight, layers.0.in_proj_z.weight, layers.0.in_proj_z.weight_scale: not in"
    with pytest.raises(ValueError, match=missing):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("k", "groups"), [(HIDDEN, 1), (HIDDEN, 4), (180, 1)])
def test_row_parallel_ranks_add_up_to_the_whole(
    ranks: Callable[[int, int], None], size: int, k: int, groups: int
) -> None:
    values, scale = ternary(WIDE, k), scales(WIDE, groups)
    x = tokens(2, k)
    total = torch.zeros(2, WIDE)
    for rank in range(size):
        ranks(rank, size)
        layer = row(config(), k)
        load(layer, formats.pack_bytes(values), scale)
        total += output(layer, x[:, rank * k // size : (rank + 1) * k // size].contiguous()).float()
    assert near(total, x, dense(values, scale))


@pytest.mark.parametrize("size", [1, 2])
def test_a_given_lm_head_is_ternary(ranks: Callable[[int, int], None], size: int) -> None:
    values, scale = ternary(100, HIDDEN), scales(100)
    x = tokens()
    for rank in range(size):
        ranks(rank, size)
        layer = ParallelLMHead(100, HIDDEN, quant_config=config(lm_head=True), prefix="lm_head")
        load(layer, formats.pack_bytes(values), scale)
        first, last = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
        y = output(layer, x)
        assert near(y[:, : last - first], x, dense(values, scale)[first:last])
        assert not y[:, last - first :].any()


def test_lm_head_and_embeddings_stay_dense_unless_given() -> None:
    layer = ParallelLMHead(100, HIDDEN, quant_config=config(), prefix="lm_head")
    assert layer.weight.is_floating_point()


def test_a_layer_that_the_checkpoint_has_dense_stays_dense() -> None:
    layer = column(config(modules_to_not_convert=["layers.0.wide"]))
    assert layer.weight.is_floating_point()


def test_square_weights_wait_until_another_tells_their_packing() -> None:
    shared = config()
    square = linear.ColumnParallelLinear(
        HIDDEN, HIDDEN, bias=False, quant_config=shared, prefix="square", return_bias=False
    )
    values, scale = ternary(HIDDEN, HIDDEN), scales(HIDDEN)
    load(square, formats.pack_bytes(values.T.contiguous()).T.contiguous(), scale)  # along N in order, as K transposed
    assert not square.ternary_loaded["weight"]
    other = column(shared)
    other_values = ternary(WIDE, HIDDEN)
    load(other, formats.pack_bytes(other_values).T.contiguous(), scales(WIDE))
    assert square.ternary_loaded["weight"]
    assert shared.formats.known == formats.Format(formats.Packing("k", transposed=True), formats.Codes.OFFSET)
    x = tokens()
    assert near(output(other, x), x, dense(other_values, scales(WIDE)))
    assert near(output(square, x), x, dense(values.T, scale))


def test_a_wrong_group_size_is_reported_and_the_true_one_used(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    layer = column(config(group_size=128))
    values, scale = ternary(WIDE, HIDDEN), scales(WIDE, 4)
    load(layer, formats.pack_bytes(values), scale)
    assert "group_size is 128; the scales are of groups of 64, which is taken" in caplog.text
    x = tokens()
    assert near(output(layer, x), x, dense(values, scale))


def test_codes_that_config_json_is_wrong_about_are_reported(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    layer = column(config(codes="zero-first"))
    values, scale = ternary(WIDE, HIDDEN), scales(WIDE)
    load(layer, formats.pack_bytes(values), scale)
    assert "the tensors are four a byte along K, codes offset" in caplog.text
    x = tokens()
    assert near(output(layer, x), x, dense(values, scale))


@pytest.mark.parametrize(("linear_class", "divides"), [("bitlinear", True), ("autobitlinear", False)])
def test_bitnets_checkpoints_are_served(linear_class: str, divides: bool) -> None:
    written = {"quant_method": "bitnet", "linear_class": linear_class, "quantization_mode": "offline"}
    assert TernaryConfig.override_quantization_method(written, None) == "ternary"
    assert TernaryConfig.override_quantization_method({"quant_method": "awq"}, None) is None
    made = TernaryConfig.from_config(written)
    made.packed_modules_mapping = MAPPING
    layer = column(made)
    values, scale = ternary(WIDE, HIDDEN), torch.tensor([4.0], dtype=torch.bfloat16)
    rows = (values + 1).to(torch.uint8).view(4, WIDE // 4, HIDDEN)
    load(layer, rows[0] | rows[1] << 2 | rows[2] << 4 | rows[3] << 6, scale)
    x = tokens()
    assert near(output(layer, x), x, values.float() * (0.25 if divides else 4.0))


REFUSALS = [
    (lambda v, s: (v.float(), s), "layers.0.k_proj.weight is float32; ternary weights are uint8 or int8"),
    (lambda v, s: (formats.pack_bytes(v)[:, 1:], s), r"layers.0.k_proj.weight has the shape \[64, 63\]"),
    (lambda v, s: (formats.pack_bytes(v) | 3, s), "layers.0.k_proj.weight has 4096 codes of value 3 among 16384"),
    (lambda v, s: (formats.pack_bytes(v), s[:5]), r"layers.0.k_proj.weight_scale has the shape \[5, 1\]"),
    (lambda v, s: (formats.pack_bytes(v), s * torch.nan), "layers.0.k_proj.weight_scale is not finite"),
    (lambda v, s: (formats.pack_bytes(v), s.to(torch.int8)), "layers.0.k_proj.weight_scale is int8; scales are"),
    (lambda v, s: (formats.pack_bytes(v), s.expand(-1, 32)), "layers.0.k_proj.weight_scale has a group of 8 columns"),
]


@pytest.mark.parametrize(("spoil", "message"), REFUSALS)
def test_a_bad_tensor_is_refused_by_name(spoil: Callable[[Any, Any], tuple[Any, Any]], message: str) -> None:
    layer = qkv(config(packing="k"))
    with pytest.raises(FormatError, match=message):
        load(layer, *spoil(ternary(64, HIDDEN), scales(64)), "k")


def test_ranks_that_split_a_group_are_refused_by_name(ranks: Callable[[int, int], None]) -> None:
    ranks(0, 4)
    layer = row(config())
    with pytest.raises(
        FormatError, match=r"layers.0.down_proj.weight_scale has a scale for each 128 columns; each of 4"
    ):
        load(layer, formats.pack_bytes(ternary(WIDE, HIDDEN)), scales(WIDE, 2))


def test_missing_tensors_are_named() -> None:
    layer = qkv(config())
    load(layer, formats.pack_bytes(ternary(256, HIDDEN)), scales(256), "q")
    layer.weight.weight_loader(layer.weight, formats.pack_bytes(ternary(64, HIDDEN)), "v")
    missing = (
        "layers.0.k_proj.weight, layers.0.k_proj.weight_scale, layers.0.v_proj.weight_scale: not in the checkpoint"
    )
    with pytest.raises(ValueError, match=missing):
        layer.quant_method.process_weights_after_loading(layer)


def test_codes_that_no_tensor_tells_are_refused_by_name() -> None:
    layer = column(config())
    balanced = torch.arange(-1, 2, dtype=torch.int8).repeat(WIDE * HIDDEN // 3).view(WIDE, HIDDEN)
    load(layer, formats.pack_bytes(balanced), scales(WIDE))
    with pytest.raises(ValueError, match=r"layers.0.wide.weight: neither these .* set quantization_config.codes"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"group": 1}, "quantization_config.group: got 'not known'"),
        ({"group_size": 0}, "group_size: got 0; write a number of columns, or -1"),
        ({"bits": 4}, r"bits, sym: got \(4, None\); write 2, true"),
        ({"codes": "odd"}, "codes: got 'odd'; write offset, zero-first, signed"),
        ({"packing": "m"}, "packing: got 'm'; write k, n or none"),
        ({"scales": "add"}, "scales: got 'add'; write multiply or divide"),
        ({"quant_method": "bitnet", "quantization_mode": "online"}, "quantization_mode: got 'online'"),
        ({"quant_method": "bitnet", "use_rms_norm": True}, "use_rms_norm: got True"),
    ],
)
def test_a_wrong_key_of_config_json_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TernaryConfig.from_config({"quant_method": "ternary", **keys})


def test_the_checkpoints_headers_say_which_layers_are_dense(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    made = config()
    made.maybe_update_config(str(tmp_path))
    assert made.dense is None
    tensors = {
        "a.weight": formats.pack_bytes(ternary(16, 32)),
        "a.weight_scale": scales(16),
        "b.weight": torch.zeros(16, 32),
        "lm_head.weight": formats.pack_bytes(ternary(16, 32)),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({}))
    made.maybe_update_config(str(tmp_path))
    assert made.dense == ["b"]
    assert made.lm_head
    save_file({"a.mlp.experts.0.up_proj.weight": tensors["a.weight"]}, tmp_path / "more.safetensors")
    with pytest.raises(ValueError, match=r"a.mlp.experts.0.up_proj.weight: is not in floating point; experts are not"):
        config().maybe_update_config(str(tmp_path))


def test_dummy_weights_are_ternary_and_scaled(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_config.load_config, "load_format", "dummy")
    layer = column(config())
    layer.weight.data.random_(0, 256)
    y = output(layer, tokens())
    assert torch.isfinite(y).all()
    assert 0 < float(y.float().std()) < 1


def test_each_kernel_of_a_layer_runs_once_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform
    from vllm_graft.quantization.ternary import kernels

    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    layer, ran = column(config()), []
    load(layer, formats.pack_bytes(ternary(WIDE, HIDDEN)), scales(WIDE))
    layer.quant_method.process_weights_after_loading(layer)
    monkeypatch.setattr(kernels, "linear", lambda x, weight, bias, chosen: ran.append((tuple(x.shape), chosen)))
    layer.quant_method._compile(layer)
    card = kernels.card_of(layer.weight.device)
    assert ran == [((m, HIDDEN), chosen) for m, chosen in kernels.to_compile(WIDE, HIDDEN, HIDDEN, card)]


def test_torch_compile_sees_one_opaque_operator() -> None:
    from vllm_graft.quantization.ternary import ops

    x, packed, scale = tokens(), formats.pack_bytes(ternary(WIDE, HIDDEN)), scales(WIDE)

    def product(one: Any) -> Any:
        return ops.linear_bytes(one, packed, scale, None, HIDDEN)

    compiled = torch.compile(product, backend="eager", fullgraph=True)
    assert near(compiled(x), x, dense(ternary(WIDE, HIDDEN), scale))
