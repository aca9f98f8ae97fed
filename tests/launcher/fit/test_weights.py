"""Sizes of checkpoints: from headers, from listed figures, and what is refused."""

import json
from pathlib import Path

import pytest

from launcher.fit.geometry import FitError, Geometry
from launcher.fit.request import GIB, card_from_name_or_size, card_from_nvml
from launcher.fit.weights import weights_from_folder, weights_from_sizes

TENSORS = {
    "model.language_model.embed_tokens.weight": 100,
    "model.language_model.layers.0.mlp.gate_proj.qweight": 30,
    "model.language_model.layers.0.linear_attn.A_log": 4,
    "model.language_model.norm.weight": 6,
    "lm_head.weight": 100,
    "mtp.layers.0.mlp.gate_proj.weight": 12,
    "mtp.fc.weight": 8,
    "model.visual.blocks.0.attn.qkv.weight": 50,
}


def write(path: Path, tensors: dict[str, int]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(at))


def test_parts_are_read_from_headers(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", TENSORS)
    weights = weights_from_folder(tmp_path)
    sizes = {part.part: part.size_bytes for part in weights.parts}
    assert sizes == {"linear": 40, "embeddings": 100, "lm_head": 100, "mtp": 20, "vision": 50}
    assert all(part.basis == "exact" for part in weights.parts)
    assert weights.total_bytes == sum(TENSORS.values())


def test_only_the_files_of_the_index_count(tmp_path: Path) -> None:
    write(tmp_path / "model-00001-of-00002.safetensors", {"lm_head.weight": 10})
    write(tmp_path / "model-00002-of-00002.safetensors", {"model.norm.weight": 3})
    write(tmp_path / "consolidated.safetensors", {"model.norm.weight": 1000})
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    index["weight_map"]["model.norm.weight"] = "model-00002-of-00002.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_from_folder(tmp_path).total_bytes == 13


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FitError, match=r"lists model-00002-of-00002\.safetensors; fetch"):
        weights_from_folder(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\x05", (10**12).to_bytes(8, "little") + b"{}", (4).to_bytes(8, "little") + b"{{{{"]
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(FitError, match=r"model\.safetensors.*fetch it again"):
        weights_from_folder(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FitError, match="no safetensors file"):
        weights_from_folder(tmp_path)


def test_listed_sizes_are_split_as_far_as_arithmetic_can(geometry_27b: Geometry) -> None:
    weights = weights_from_sizes(geometry_27b, round(17.69 * GIB), "card", vision_bytes=round(0.86 * GIB))
    sizes = {part.part: part.size_bytes for part in weights.parts}
    assert sizes["embeddings"] + sizes["lm_head"] == 2 * 248320 * 5120 * 2
    assert weights.total_bytes == round(17.69 * GIB)
    assert "with the MTP head" in weights.parts[0].note
    text_only = sum(part.size_bytes for part in weights.loaded(language_model_only=True, mtp=True))
    assert text_only / GIB == pytest.approx(16.83, abs=0.01)


def test_parts_larger_than_the_total_are_refused(geometry_27b: Geometry) -> None:
    with pytest.raises(FitError, match=r"4\.00 GiB in all is less than its parts"):
        weights_from_sizes(geometry_27b, 4 * GIB, "models/x.yaml")


def test_cards_of_other_machines_by_name_and_size() -> None:
    assert card_from_name_or_size("RTX 4090").compute_capability == (8, 9)
    assert card_from_name_or_size("rtx3090").total_bytes == round(23.56 * GIB)
    assert card_from_name_or_size("NVIDIA GeForce RTX 5090").compute_capability == (12, 0)
    label = card_from_name_or_size("24GiB")
    assert label.total_bytes == round(23.56 * GIB)
    assert (label.total_basis, label.free_bytes) == ("assumed", None)
    assert label.total_error_bytes > 0
    assert card_from_name_or_size("32 GB").compute_capability == (12, 0)
    assert card_from_name_or_size("24GiB", (8, 6)).compute_capability == (8, 6)
    for wrong in ("", "a lot", "0GiB", "GiB", "99999GiB"):
        with pytest.raises(FitError, match="rtx3090, rtx4090, rtx5090"):
            card_from_name_or_size(wrong)


def test_cards_of_this_machine_as_cuda_sees_them() -> None:
    measured = card_from_nvml(24 * GIB, 450 * 2**20, 23 * GIB, (8, 6), "GPU")
    assert (measured.total_bytes, measured.total_basis) == (24 * GIB - 450 * 2**20, "measured")
    assumed = card_from_nvml(24 * GIB, None, 24 * GIB, (8, 6), "GPU")
    assert assumed.total_bytes == round(23.56 * GIB) == assumed.free_bytes
    assert assumed.total_basis == "assumed"
