"""Round a dense checkpoint to ternary weights: `python -m vllm_graft.quantization.ternary.convert SRC DST`.

A row, or a group of columns of one, becomes its mean magnitude times -1, 0 or +1 (absmean, https://arxiv.org/abs/2402.17764,
equations 1 to 3, by row instead of by tensor).  Tensors are read one at a time and written in files of at most 1 GB, so
that memory stays below 4 GB.  A conversion that broke off goes on with the file it was at: finished files are whole,
and the target gets its name last.  Progress is one JSON object a line on standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_graft.quantization.ternary.formats import pack_bytes

SHARD_BYTES = 1_000_000_000
RECORD = "graft-ternary.json"
SCALE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
KEPT = (
    *("*embed*", "*lm_head*", "*norm*", "*conv1d*", "*visual.*", "*vision*", "mtp.*"),
    *("*router*", "*.gate", "*_gate", "*.score", "*.experts.*", "*.in_proj_a", "*.in_proj_b", "*.in_proj_ba"),
)
"""Modules that stay dense: what is no linear layer, what vLLM makes without a quantization method, what is tiny."""
_ROWS_AT_ONCE = 1024
_MEASURED = ".error"  # beside a file that is done: squared norms of its error and of its weights
_FILE_MODE = 0o644  # the server in a container is another user
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_COPIED = re.compile(r".*\.(json|jinja|txt|model|tiktoken|py|md)|LICENSE.*|NOTICE.*")
_NOT_COPIED = {"config.json", "model.safetensors.index.json", "graft-model.json", RECORD}


class ConversionError(Exception):
    """The source or the target is not what a conversion can work with."""


@dataclass(frozen=True)
class Options:
    """What is converted how; `group_size` 0 is one scale a row, `keep` are patterns of modules that stay dense."""

    group_size: int = 0
    scale_dtype: str = "float16"
    keep: tuple[str, ...] = ()
    lm_head: bool = False


@dataclass(frozen=True)
class Source:
    """One tensor of the source: its file, and what its header says."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    is_ternary: bool

    @property
    def size_bytes(self) -> int:
        """Its size in the source."""
        return _elements(self.shape) * _FLOAT_BYTES.get(self.dtype, 8)

    def written_bytes(self, options: Options) -> int:
        """Its size in the target."""
        if not self.is_ternary:
            return self.size_bytes
        groups = self.shape[1] // options.group_size if options.group_size else 1
        scale_bytes = torch.finfo(SCALE_DTYPES[options.scale_dtype]).bits // 8
        return int(self.shape[0] * (-(-self.shape[1] // 4) + groups * scale_bytes))


@dataclass(frozen=True)
class Summary:
    """What a conversion did."""

    ternary_modules: int
    kept_modules: tuple[str, ...]
    source_bytes: int
    target_bytes: int
    relative_error: float
    """Norm of what rounding took away over the norm of the rounded weights, of all ternary modules together."""


Tell = Callable[[dict[str, Any]], None]


def convert(source: Path, target: Path, options: Options, tell: Tell) -> Summary:
    """Write the ternary checkpoint.

    Raises:
        ConversionError: the source cannot be converted, or the target is in the way.

    """
    tensors = plan(source, options)
    if target.exists():
        raise ConversionError(f"{target}: exists; name another folder, or delete it")
    work = target.with_name(f".{target.name}.partial")
    work.mkdir(parents=True, exist_ok=True)
    _begin(work, {"options": asdict(options), "source": _fingerprint(source)})
    shards = in_shards(tensors, options)
    total_bytes = sum(tensor.size_bytes for tensor in tensors)
    done_bytes, errors = 0, torch.zeros(2, dtype=torch.float64)
    for number, shard in enumerate(shards, 1):
        file = work / shard_name(number, len(shards))
        if not file.exists():
            written: dict[str, torch.Tensor] = {}
            measured = torch.zeros(2, dtype=torch.float64)
            for tensor in shard:
                tell({"detail": tensor.name, "done_bytes": done_bytes, "total_bytes": total_bytes})
                written |= _converted(source, tensor, options, measured)
                done_bytes += tensor.size_bytes
            _write_shard(file, written, measured)
        else:
            done_bytes += sum(tensor.size_bytes for tensor in shard)
        errors += _measured(file)
    _finish(source, work, target, tensors, shards, options)
    return Summary(
        ternary_modules=sum(tensor.is_ternary for tensor in tensors),
        kept_modules=kept_modules(tensors),
        source_bytes=total_bytes,
        target_bytes=sum(file.stat().st_size for file in target.glob("*.safetensors")),
        relative_error=float((errors[0] / errors[1]).sqrt()),
    )


def plan(source: Path, options: Options) -> list[Source]:
    """The tensors of the source, in the order of its files.

    Raises:
        ConversionError: it is no dense checkpoint in safetensors, or nothing would be ternary.

    """
    _config(source)
    tensors = []
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                part = opened.get_slice(name)
                shape, dtype = tuple(part.get_shape()), part.get_dtype()
                tensors.append(Source(name, file.name, dtype, shape, _is_ternary(name, shape, dtype, options)))
    if not tensors:
        raise ConversionError(f"{source}: no *.safetensors; convert a checkpoint of another form to safetensors first")
    if not any(tensor.is_ternary for tensor in tensors):
        raise ConversionError(f"{source}: no linear weight in floating point outside of {', '.join(options.keep)}")
    if options.group_size:
        _refuse_groups(tensors, options.group_size)
    return tensors


def _config(source: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConversionError(f"{source}: no config.json; name the folder of a checkpoint") from None
    quantization = config.get("quantization_config") or _text(config).get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "some method")
        raise ConversionError(f"{source}/config.json: quantized by {method} already; convert the dense checkpoint")
    return config


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of the config that is about the language model."""
    text: Mapping[str, Any] = config.get("text_config", config)
    return text


def _is_ternary(name: str, shape: Sequence[int], dtype: str, options: Options) -> bool:
    from fnmatch import fnmatchcase

    module, _, leaf = name.rpartition(".")
    if leaf != "weight" or len(shape) != 2 or dtype not in _FLOAT_BYTES:
        return False
    kept = [pattern for pattern in KEPT if not (options.lm_head and pattern == "*lm_head*")]
    return not any(fnmatchcase(module, pattern) for pattern in (*kept, *options.keep))


def _refuse_groups(tensors: Sequence[Source], group_size: int) -> None:
    if group_size % 16:
        raise ConversionError(f"a group of {group_size} columns; the kernels take multiples of 16")
    for tensor in tensors:
        if tensor.is_ternary and tensor.shape[1] % group_size:
            raise ConversionError(
                f"{tensor.name}: {tensor.shape[1]} columns are not a multiple of the group size {group_size}; take a "
                "divisor of all, or one scale a row"
            )


def kept_modules(tensors: Sequence[Source]) -> tuple[str, ...]:
    """The modules that have a matrix and keep it."""
    kept = (tensor for tensor in tensors if not tensor.is_ternary and len(tensor.shape) == 2)
    return tuple(sorted(tensor.name.removesuffix(".weight") for tensor in kept if tensor.name.endswith(".weight")))


def in_shards(tensors: Sequence[Source], options: Options) -> list[list[Source]]:
    """The tensors of each file of the target, at most `SHARD_BYTES` unless one tensor alone is larger."""
    shards: list[list[Source]] = []
    free_bytes = 0
    for tensor in tensors:
        size_bytes = tensor.written_bytes(options)
        if size_bytes > free_bytes:
            shards.append([])
            free_bytes = SHARD_BYTES
        shards[-1].append(tensor)
        free_bytes -= size_bytes
    return shards


def shard_name(number: int, count: int) -> str:
    """The name that Hugging Face's libraries give it."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def round_to_ternary(
    weight: torch.Tensor, group_size: int, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values, int8 [n, k], and scales [n, groups] of a weight [n, k]: absmean of each group of columns."""
    n, k = weight.shape
    grouped = weight.float().view(n, -1, group_size or k)
    scales = grouped.abs().mean(dim=2).to(scale_dtype)
    safe = scales.float().clamp(min=torch.finfo(scale_dtype).tiny)
    values = (grouped / safe[:, :, None]).round_().clamp_(-1, 1).to(torch.int8)
    return values.view(n, k), scales


def _converted(source: Path, tensor: Source, options: Options, measured: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is written of one tensor; squared norms of the error and of the weight are added to `measured`."""
    with safe_open(source / tensor.file, framework="pt") as opened:
        if not tensor.is_ternary:
            return {tensor.name: opened.get_tensor(tensor.name)}
        part = opened.get_slice(tensor.name)
        packed, scales = [], []
        for start in range(0, tensor.shape[0], _ROWS_AT_ONCE):
            block = part[start : start + _ROWS_AT_ONCE].float()
            norm = torch.linalg.vector_norm(block)
            if not bool(torch.isfinite(norm)):
                raise ConversionError(f"{source / tensor.file}: {tensor.name} holds a value that is not finite")
            values, scale = round_to_ternary(block, options.group_size, SCALE_DTYPES[options.scale_dtype])
            packed.append(pack_bytes(values))
            scales.append(scale)
            block -= (values.view(*scale.shape, -1) * scale.float()[:, :, None]).view_as(block)
            measured += torch.stack([torch.linalg.vector_norm(block), norm]).double().square()
    module = tensor.name.removesuffix(".weight")
    return {f"{module}.weight": torch.cat(packed), f"{module}.weight_scale": torch.cat(scales)}


def _write_shard(file: Path, tensors: Mapping[str, torch.Tensor], measured: torch.Tensor) -> None:
    _write_text(file.with_suffix(_MEASURED), json.dumps(measured.tolist()))
    partial = file.with_suffix(".part")
    save_file(dict(tensors), partial, metadata={"format": "pt"})
    partial.chmod(_FILE_MODE)
    _publish(partial, file)


def _measured(file: Path) -> torch.Tensor:
    return torch.tensor(json.loads(file.with_suffix(_MEASURED).read_text(encoding="utf-8")), dtype=torch.float64)


def _begin(work: Path, begun: Mapping[str, Any]) -> None:
    """Record what is converted how, or refuse to go on with something else."""
    record = work / RECORD
    text = json.dumps(begun, indent=1) + "\n"
    if not record.exists():
        _write_text(record, text)
    elif record.read_text(encoding="utf-8") != text:
        raise ConversionError(
            f"{work}: was begun from another source or with other options; repeat those, or delete the folder"
        )


def _fingerprint(source: Path) -> dict[str, list[int]]:
    files = sorted(source.glob("*.safetensors"))
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def _finish(
    source: Path,
    work: Path,
    target: Path,
    tensors: Sequence[Source],
    shards: Sequence[Sequence[Source]],
    options: Options,
) -> None:
    """Write what tells what the files are, bring what lies beside the weights, and give the folder its name."""
    places = {
        name: shard_name(number, len(shards))
        for number, shard in enumerate(shards, 1)
        for tensor in shard
        for name in _written_names(tensor)
    }
    size_bytes = sum(tensor.written_bytes(options) for tensor in tensors)
    index = {"metadata": {"total_size": size_bytes}, "weight_map": dict(sorted(places.items()))}
    _write_text(work / "model.safetensors.index.json", json.dumps(index, indent=1) + "\n")
    config = _config(source)
    config["quantization_config"] = {
        "quant_method": "ternary",
        "bits": 2,
        "sym": True,
        "codes": "offset",
        "packing": "k",
        "group_size": options.group_size or -1,
        "modules_to_not_convert": list(kept_modules(tensors)),
        "lm_head": any(tensor.is_ternary and "lm_head" in tensor.name for tensor in tensors),
    }
    _write_text(work / "config.json", json.dumps(config, indent=2) + "\n")
    for file in source.iterdir():
        if file.is_file() and _COPIED.fullmatch(file.name) and file.name not in _NOT_COPIED:
            shutil.copyfile(file, work / file.name)
    for file in (work / RECORD, *work.glob(f"*{_MEASURED}")):
        file.unlink()
    _publish(work, target)


def _written_names(tensor: Source) -> Iterator[str]:
    yield tensor.name
    if tensor.is_ternary:
        yield f"{tensor.name}_scale"


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(text, encoding="utf-8")
    _publish(partial, path)


def _publish(partial: Path, final: Path) -> None:
    """Flush and rename: a file or folder of the final name is whole, also after a power cut."""
    for path in (*(partial.iterdir() if partial.is_dir() else ()), partial):
        _sync(path)
    partial.replace(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _elements(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its last line is the summary, or the error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--group-size", type=int, default=0, help="columns that share a scale; default: a whole row")
    parser.add_argument("--scale-dtype", choices=tuple(SCALE_DTYPES), default="float16")
    parser.add_argument("--keep", action="append", default=[], metavar="PATTERN", help="modules that stay dense")
    parser.add_argument("--lm-head", action="store_true", help="convert lm_head too")
    parser.add_argument("--threads", type=int, default=0, help="processor threads; default: all")
    given = parser.parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    options = Options(given.group_size, given.scale_dtype, tuple(given.keep), given.lm_head)
    try:
        summary = convert(given.source, given.target, options, _print)
    except ConversionError as error:
        _print({"error": str(error)})
        return 1
    _print({"summary": asdict(summary)})
    return 0


def _print(event: Mapping[str, Any]) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    sys.exit(main())
