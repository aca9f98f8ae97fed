"""Compare recorded boots with the block arithmetic: what `graft fit --check` prints."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

from launcher.fit.geometry import DTYPE_BYTES, FitError, Geometry, geometry_from_config
from launcher.fit.kv import KvLayout, KvRules, kv_layout

GIB = 2**30
HALF_UNIT_GIB = 0.005
"""Logs print two decimals."""
SEARCH_BLOCKS = 200_000
"""Largest pool that is looked for when only a token count was printed."""

Status = Literal["exact", "within rounding", "off", "nothing reported"]


class CheckError(FitError):
    """A boots file that lacks something; the message names the boot and the field."""


@dataclass(frozen=True, slots=True)
class Boot:
    """What one boot was started with and what vLLM printed."""

    id: str
    source: str
    model: str
    kv_cache_dtype: str
    tp: int
    num_speculative_tokens: int
    prefix_caching: bool
    max_model_len: int
    kernel_block_alignment: int
    gdn_prefill_checkpoint_blocks: int
    null_block_deducted: bool
    exact: bool
    mamba_ssm_cache_dtype: str | None
    available_kv_gib: float | None
    reported_tokens: int | None
    reported_tokens_rule: str | None
    reported_concurrency: float | None
    reported_needed_gib: float | None
    reported_estimated_max_model_len: int | None
    expected_num_blocks: int | None
    num_blocks_source: str | None


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure: predicted against reported, None where vLLM did not print it."""

    name: str
    predicted: float | int | None
    reported: float | int | None
    agrees: bool


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One boot."""

    id: str
    source: str
    marked_exact: bool
    status: Status
    block_tokens: int
    bytes_per_block: int
    figures: tuple[Compared, ...]
    note: str

    def figure(self, name: str) -> Compared | None:
        """Look up a figure by name."""
        return next((figure for figure in self.figures if figure.name == name), None)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All boots of a file."""

    rows: tuple[CheckRow, ...]

    @property
    def ok(self) -> bool:
        """Whether every boot that is marked exact is reproduced from its own figures, without use of rounding."""
        return all(row.status == "exact" for row in self.rows if row.marked_exact)

    def to_json(self) -> dict[str, object]:
        """Return plain data; sizes are bytes, contexts are tokens."""
        return {"ok": self.ok, "boots": [asdict(row) for row in self.rows]}


def check_boots(document: Mapping[str, Any], source: str) -> CheckReport:
    """Compare every boot of a parsed boots file (`models` and `boots`, as in tests/data/kv_logs.json).

    Raises:
        CheckError: a boot lacks a field or names a model that the file does not describe.
    """
    models = {
        name: _geometry(cast(Mapping[str, Any], fields), f"{source}: models.{name}")
        for name, fields in _mapping(document, "models", source).items()
    }
    boots = document.get("boots")
    if not isinstance(boots, list) or not boots:
        raise CheckError(f"{source}: boots: a list with at least one boot is needed")
    return CheckReport(tuple(_check(_boot(item, source, index), models, source) for index, item in enumerate(boots)))


def boot_layout(boot: Boot, geometry: Geometry) -> KvLayout:
    """Return the blocks that the boot's own settings and platform give."""
    rules = KvRules(boot.kernel_block_alignment, boot.gdn_prefill_checkpoint_blocks, boot.null_block_deducted)
    return kv_layout(geometry, boot.kv_cache_dtype, boot.tp, boot.num_speculative_tokens, boot.prefix_caching, rules)


def _geometry(fields: Mapping[str, Any], where: str) -> Geometry:
    # The file lists what a config.json lists, with the class under its singular name.
    config = {**fields, "architectures": [fields.get("architecture")]}
    return geometry_from_config(config, where)


def _mapping(document: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    value = document.get(name)
    if not isinstance(value, Mapping):
        raise CheckError(f"{source}: {name}: a mapping is needed")
    return value


_NEEDED: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "source": str,
    "model": str,
    "kv_cache_dtype": str,
    "tp": int,
    "num_speculative_tokens": int,
    "prefix_caching": bool,
    "max_model_len": int,
    "kernel_block_alignment": int,
    "gdn_prefill_checkpoint_blocks": int,
    "null_block_deducted": bool,
    "exact": bool,
}
_OPTIONAL: dict[str, type | tuple[type, ...]] = {
    "mamba_ssm_cache_dtype": str,
    "available_kv_gib": (int, float),
    "reported_tokens": int,
    "reported_tokens_rule": str,
    "reported_concurrency": (int, float),
    "reported_needed_gib": (int, float),
    "reported_estimated_max_model_len": int,
    "expected_num_blocks": int,
    "num_blocks_source": str,
}


def _boot(item: object, source: str, index: int) -> Boot:
    if not isinstance(item, Mapping):
        raise CheckError(f"{source}: boots[{index}]: a mapping is needed")
    where = f"{source}: boots[{index}] ({item.get('id', 'without id')})"
    values: dict[str, Any] = {}
    for name, kind in {**_NEEDED, **_OPTIONAL}.items():
        value = item.get(name)
        if value is None and name in _OPTIONAL:
            values[name] = None
            continue
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckError(f"{where}: {name}: got {value!r}; write a {_kind_name(kind)}")
        values[name] = value
    for name in ("tp", "max_model_len", "kernel_block_alignment"):
        if values[name] < 1:
            raise CheckError(f"{where}: {name}: got {values[name]}; it must be at least 1")
    return Boot(**values)


def _kind_name(kind: type | tuple[type, ...]) -> str:
    names = {str: "text", int: "whole number", bool: "true or false"}
    return "number" if isinstance(kind, tuple) else names[kind]


def _check(boot: Boot, models: Mapping[str, Geometry], source: str) -> CheckRow:
    where = f"{source}: boot {boot.id}"
    if boot.model not in models:
        raise CheckError(f"{where}: model: {boot.model!r} is not described; there are {', '.join(models)}")
    geometry = models[boot.model]
    if boot.mamba_ssm_cache_dtype is not None:
        if boot.mamba_ssm_cache_dtype not in DTYPE_BYTES:
            raise CheckError(f"{where}: mamba_ssm_cache_dtype: got {boot.mamba_ssm_cache_dtype!r}")
        geometry = replace(geometry, ssm_dtype_bytes=DTYPE_BYTES[boot.mamba_ssm_cache_dtype])
    try:
        layout = boot_layout(boot, geometry)
    except FitError as error:
        raise CheckError(f"{where}: {error}") from error
    blocks, reading = _predicted_blocks(boot, layout)
    figures = _figures(boot, layout, blocks)
    status: Status = "nothing reported"
    if any(figure.reported is not None for figure in figures):
        status = "exact" if all(figure.agrees for figure in figures) else "off"
    if status == "off" and _within_rounding(boot, layout):
        status = "within rounding"
    return CheckRow(
        boot.id, boot.source, boot.exact, status, layout.block_tokens, layout.bytes_per_block, figures, reading
    )


def _predicted_blocks(boot: Boot, layout: KvLayout) -> tuple[int | None, str]:
    """Blocks from the printed pool taken literally, else the only count that gives the printed tokens."""
    if boot.available_kv_gib is not None:
        return layout.num_blocks(_gib(boot.available_kv_gib)), "from the printed pool"
    if boot.reported_tokens is None:
        return None, "neither the pool nor tokens were printed"
    counts = range(1, SEARCH_BLOCKS)
    low = bisect_left(counts, boot.reported_tokens, key=lambda count: _tokens(boot, layout, count))
    high = bisect_right(counts, boot.reported_tokens, key=lambda count: _tokens(boot, layout, count))
    fitting = [count for count in counts[low:high] if _reproduces(boot, layout, count)]
    if len(fitting) == 1:
        return fitting[0], "the only count that gives the printed tokens"
    if not fitting:
        return None, "no block count gives the printed tokens and concurrency"
    return None, f"{len(fitting)} block counts give what was printed"


def _reproduces(boot: Boot, layout: KvLayout, blocks: int) -> bool:
    concurrency = layout.concurrency(blocks, boot.max_model_len)
    return boot.reported_concurrency is None or _same(concurrency, boot.reported_concurrency)


def _tokens(boot: Boot, layout: KvLayout, blocks: int) -> int:
    """Token counts as the builds printed them; the rule is the boot's own input."""
    match boot.reported_tokens_rule:
        case "num_blocks*block_size":
            return blocks * layout.block_tokens
        case "num_blocks//num_groups*block_size":
            return blocks // (layout.attention_groups + layout.gdn_groups) * layout.block_tokens
        case "concurrency*max_model_len" | None:
            return layout.reported_tokens(blocks, boot.max_model_len)
        case unknown:
            raise CheckError(f"boot {boot.id}: reported_tokens_rule: {unknown!r} is not known")


def _figures(boot: Boot, layout: KvLayout, blocks: int | None) -> tuple[Compared, ...]:
    length = boot.max_model_len
    predicted_tokens = None if blocks is None else _tokens(boot, layout, blocks)
    concurrency = None if blocks is None else layout.concurrency(blocks, length)
    needed = layout.request_blocks(length) * layout.bytes_per_block / GIB
    longest = None if blocks is None else layout.longest_context(blocks, length)
    return (
        _compared("blocks", blocks, boot.expected_num_blocks),
        _compared("tokens", predicted_tokens, boot.reported_tokens),
        _compared("concurrency", concurrency, boot.reported_concurrency),
        _compared("needed GiB", needed, boot.reported_needed_gib),
        _compared("estimated max_model_len", longest, boot.reported_estimated_max_model_len),
    )


def _compared(name: str, predicted: float | int | None, reported: float | int | None) -> Compared:
    agrees = reported is None or (predicted is not None and _same(predicted, reported))
    return Compared(name, predicted, reported, agrees)


def _same(predicted: float | int, reported: float | int) -> bool:
    """Whole numbers must be equal; the others to the decimals that were printed, two at least."""
    if isinstance(reported, int) and isinstance(predicted, int):
        return predicted == reported
    decimals = max(2, len(repr(float(reported)).partition(".")[2]))
    # Half a unit of the last place, plus what a binary float cannot hold.
    return abs(predicted - reported) <= 0.5 * 10.0**-decimals + 1e-9


def _within_rounding(boot: Boot, layout: KvLayout) -> bool:
    """Whether a count inside the printed pool's rounding interval gives everything that was printed."""
    if boot.available_kv_gib is None:
        return False
    low = layout.num_blocks(_gib(boot.available_kv_gib - HALF_UNIT_GIB))
    high = layout.num_blocks(_gib(boot.available_kv_gib + HALF_UNIT_GIB))
    return any(all(f.agrees for f in _figures(boot, layout, count)) for count in range(low, high + 1))


def _gib(value: float) -> int:
    return math.floor(value * GIB)
