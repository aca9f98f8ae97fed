"""incomplete_files compares a checkpoint's index and headers with what is on disk."""

import json
import struct
from pathlib import Path

import pytest

from launcher.host.modelfiles import INDEX, IncompleteFile, incomplete_files

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def tensor_file(path: Path, tensor_bytes: int = 64) -> int:
    entry = {"dtype": "U8", "shape": [tensor_bytes], "data_offsets": [0, tensor_bytes]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "weight": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(tensor_bytes))
    return path.stat().st_size


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for shard in SHARDS:
        tensor_file(tmp_path / shard)
    index = {"metadata": {}, "weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}}
    (tmp_path / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return tmp_path


def test_a_whole_checkpoint_lacks_nothing(model: Path) -> None:
    assert incomplete_files(model) == ()


def test_a_checkpoint_of_one_file_needs_no_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    tensor_file(tmp_path / "model.safetensors")
    assert incomplete_files(tmp_path) == ()


def test_a_shard_of_the_index_that_is_not_there_is_named(model: Path) -> None:
    (model / SHARDS[1]).unlink()
    assert incomplete_files(model) == (IncompleteFile(path=SHARDS[1], reason=f"missing; {INDEX} lists it"),)


@pytest.mark.parametrize("lost_bytes", [1, 63, 64, 100])
def test_a_shard_that_is_cut_short_is_named_with_its_numbers(model: Path, lost_bytes: int) -> None:
    shard = model / SHARDS[0]
    whole_bytes = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-lost_bytes])
    (found,) = incomplete_files(model)
    assert found.path == SHARDS[0]
    assert found.reason.startswith(f"cut short: {whole_bytes - lost_bytes} bytes")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cut short: 0 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer, not the weights"),
        (b"<!DOCTYPE html><html>", "not a safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "not a safetensors file"),
        (struct.pack("<Q", 3) + b"{}{", "not a safetensors file"),
        (struct.pack("<Q", 2) + b"{}more", "longer than it says: 14 bytes of 10"),
    ],
)
def test_what_is_no_shard_is_named(model: Path, content: bytes, reason: str) -> None:
    (model / SHARDS[0]).write_bytes(content)
    assert incomplete_files(model) == (IncompleteFile(path=SHARDS[0], reason=reason),)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": {}}}'])
def test_an_index_that_is_none_is_named(model: Path, content: str) -> None:
    (model / INDEX).write_text(content, encoding="utf-8")
    (found,) = incomplete_files(model)
    assert found.path == INDEX
    assert found.reason.startswith("not a safetensors index")


def test_an_empty_folder_lacks_everything(tmp_path: Path) -> None:
    assert [file.path for file in incomplete_files(tmp_path)] == ["config.json", "*.safetensors"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert incomplete_files(tmp_path / "absent") == (IncompleteFile(path=".", reason="the folder is not there"),)
