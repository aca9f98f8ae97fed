"""What is compared: `ENGINE:FOLDER?option=value&...`, or a YAML or JSON file that says the same."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from launcher.errors import UsageError

SYNTAX = "transformers:FOLDER, vllm:FOLDER?option=value&option=value, or a .yaml or .json file with engine and model"


class VllmOptions(BaseModel):
    """Arguments of vLLM's engine, and `fixes: off` for vLLM without Graft's plugin."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    fixes: bool | None = None
    enforce_eager: bool | None = None
    attention_backend: str | None = None
    gdn_prefill_backend: Literal["flashinfer", "triton", "cutedsl"] | None = None
    block_size: int | None = Field(default=None, ge=1)
    load_format: str | None = None
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    calculate_kv_scales: bool | None = None


class TransformersOptions(BaseModel):
    """How the reference computes: float32 unless told otherwise, on the GPU if there is one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    device: str | None = None


_OPTIONS: dict[str, type[VllmOptions] | type[TransformersOptions]] = {
    "vllm": VllmOptions,
    "transformers": TransformersOptions,
}


@dataclass(frozen=True)
class Side:
    """One engine with one checkpoint; `name` is how the user wrote it."""

    name: str
    engine: str
    model: Path
    options: VllmOptions | TransformersOptions

    def given(self) -> dict[str, Any]:
        """The options that were said."""
        return self.options.model_dump(exclude_none=True)


def parse(text: str) -> Side:
    """Read a side.

    Raises:
        UsageError: it is neither, an option is not known, or there is no such checkpoint.

    """
    engine, colon, rest = text.partition(":")
    if colon and engine in _OPTIONS:
        folder, _, query = rest.partition("?")
        try:
            options = dict(parse_qsl(query, strict_parsing=True)) if query else {}
        except ValueError as error:
            raise UsageError(f"{text}: write what is after the ? as option=value&option=value") from error
        return _side(text, engine, folder, options)
    if Path(text).suffix in (".yaml", ".yml", ".json"):
        return _from_file(Path(text).expanduser())
    raise UsageError(f"{text}: write {SYNTAX}")


def _from_file(path: Path) -> Side:
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: {error}") from error
    if not isinstance(document, dict) or not {"engine", "model"} <= set(document):
        raise UsageError(
            f"{path}: needs the keys engine (vllm or transformers) and model (a folder); options beside them"
        )
    engine, model = str(document.pop("engine")), str(document.pop("model"))
    if engine not in _OPTIONS:
        raise UsageError(f"{path}: engine: got {engine!r}; write vllm or transformers")
    return _side(str(path), engine, str(path.parent / Path(model).expanduser()), document)


def _side(name: str, engine: str, folder: str, options: dict[str, Any]) -> Side:
    model = Path(folder).expanduser().resolve()
    if not (model / "config.json").is_file():
        raise UsageError(f"{name}: {model}: no config.json; name the folder of a checkpoint")
    try:
        return Side(name, engine, model, _OPTIONS[engine].model_validate(options))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        accepted = ", ".join(_OPTIONS[engine].model_fields)
        raise UsageError(f"{name}: {key}: {first['msg']}; options of {engine} are {accepted}") from error
