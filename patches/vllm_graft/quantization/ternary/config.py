"""The quantization config `ternary` of vLLM: what config.json says, which layers it is about, what is found of it.

    "quantization_config": {"quant_method": "ternary", "group_size": 128, "modules_to_not_convert": ["lm_head"]}

Every key but quant_method may be left out: the tensors tell.  `codes`, `packing` (k, n or none) and `transposed` count
where they do not, `scales: divide` is for scales that divide (BitNet's BitLinear), and a checkpoint with `quant_method:
bitnet` is taken as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from vllm_graft.quantization.ternary.formats import BITNET, Codes, Format, Packing, Undecided

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper

NAME = "ternary"
logger = init_logger("vllm.graft")  # only loggers below "vllm" have a handler
_KEYS = {
    "quant_method",
    "bits",
    "sym",
    "group_size",
    "codes",
    "packing",
    "transposed",
    "scales",
    "modules_to_not_convert",
    "lm_head",
}
_BITNET_KEYS = {"linear_class", "quantization_mode", "use_rms_norm", "rms_norm_eps"}
_FLOATS = {"F16", "BF16", "F32", "F64"}


class TernaryConfig(QuantizationConfig):  # type: ignore[misc]
    """Ternary weights; one object a model, which its layers share.

    `dense` are modules of the checkpoint that are not ternary, None until they are known.
    """

    def __init__(
        self,
        known: Format | None = None,
        group_size: int | None = None,
        scales_divide: bool = False,
        dense: list[str] | None = None,
        lm_head: bool = False,
    ) -> None:
        super().__init__()
        self.group_size = group_size
        self.scales_divide = scales_divide
        self.dense = dense
        self.lm_head = lm_head
        self.formats = Formats(known or Format())
        self.other_groups: dict[int | None, int] = {}

    @classmethod
    def get_name(cls) -> Any:
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        from vllm.platforms import current_platform

        return [torch.bfloat16, torch.float16, *([torch.float32] if current_platform.is_cpu() else [])]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TernaryConfig:
        """Read config.json's part.

        Raises:
            ValueError: a key or a value is not known, or asks for what this method does not do.

        """
        is_bitnet = config.get("quant_method") == "bitnet"
        unknown = set(config) - _KEYS - (_BITNET_KEYS if is_bitnet else set())
        if unknown:
            raise _wrong(", ".join(sorted(unknown)), "not known", f"one of {', '.join(sorted(_KEYS))}")
        if config.get("quantization_mode", "offline") != "offline":
            raise _wrong("quantization_mode", config["quantization_mode"], "offline: the weights have to be ternary")
        if config.get("use_rms_norm"):
            raise _wrong("use_rms_norm", True, "false: layers that normalize their input themselves are not served")
        if config.get("bits", 2) != 2 or not config.get("sym", True):
            raise _wrong("bits, sym", (config.get("bits"), config.get("sym")), "2, true, or neither")
        scales = config.get("scales", "divide" if is_bitnet and _is_bitlinear(config) else "multiply")
        if scales not in ("multiply", "divide"):
            raise _wrong("scales", scales, "multiply or divide")
        group_size = config.get("group_size")
        if group_size is not None and (not isinstance(group_size, int) or group_size < -1 or group_size == 0):
            raise _wrong("group_size", group_size, "a number of columns, or -1 for one scale a row")
        return cls(
            known=BITNET if is_bitnet else _declared(config),
            group_size=None if group_size == -1 else group_size,
            scales_divide=scales == "divide",
            dense=config.get("modules_to_not_convert"),
            lm_head=bool(config.get("lm_head", False)),
        )

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Take BitNet's checkpoints, which vLLM has no method for."""
        method = str(hf_quant_cfg.get("quant_method", "")).lower()
        return NAME if method == "bitnet" and user_quant in (None, NAME, "bitnet") else None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read from the checkpoint's headers which modules are not ternary.

        Raises:
            ValueError: experts are.

        """
        from vllm.transformers_utils.config import get_safetensors_params_metadata

        if Path(model_name).exists() and not any(Path(model_name).glob("*.safetensors")):
            return
        metadata: Mapping[str, Mapping[str, Any]] = get_safetensors_params_metadata(model_name, revision=revision)
        weights = {name.removesuffix(".weight"): info for name, info in metadata.items() if name.endswith(".weight")}
        if not weights:
            return
        found = {name for name, info in weights.items() if info.get("dtype") not in _FLOATS}
        if experts := sorted(name for name in found if ".experts." in name):
            raise ValueError(f"{experts[0]}.weight: is not in floating point; experts are not served as ternary layers")
        self.dense = sorted(set(weights) - found)
        self.lm_head = "lm_head" in {name.rpartition(".")[2] for name in found}

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        if self.dense is not None:
            self.dense = hf_to_vllm_mapper.apply_list(self.dense)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        from vllm_graft.quantization.ternary.method import TernaryLinearMethod

        if isinstance(layer, ParallelLMHead) and self.lm_head:
            return TernaryLinearMethod(self, prefix)
        if not isinstance(layer, LinearBase):
            return None
        if is_layer_skipped(prefix, self.dense or ["lm_head"], self.packed_modules_mapping):
            return UnquantizedLinearMethod()
        return TernaryLinearMethod(self, prefix)

    def note_group(self, group: int | None) -> None:
        """Count a tensor's group size, None for one scale a row; say once when config.json is wrong about it."""
        if group == self.group_size:
            return
        if not self.other_groups and self.group_size is not None:
            logger.warning(
                "config.json: quantization_config.group_size is %s; the scales are of groups of %s, which is taken",
                self.group_size,
                group or "whole rows",
            )
        self.other_groups[group] = self.other_groups.get(group, 0) + 1


class Formats:
    """The format of the checkpoint's weights as far as it is known, and the tensors that wait for more to be."""

    def __init__(self, declared: Format) -> None:
        self.known = declared
        self._declared = declared
        self._waiting: dict[str, Callable[[], Format]] = {}
        self._reported = False

    def take(self, name: str, load: Callable[[], Format]) -> None:
        """Load a weight, now or when another has told the format that this one does not tell."""
        try:
            found = load()
        except Undecided:
            self._waiting[name] = load
            return
        self._learn(found)

    def settle(self) -> None:
        """Load what still waits, packed along K or else as BitNet does, which a warning says.

        Raises:
            ValueError: the tensors do not tell which weight a code is.

        """
        if self._waiting and self.known.packing is None:
            codes = self.known.codes
            for packing in (Packing("k"), Packing("n")):
                if self._waiting:
                    logger.warning("no tensor tells how the ternary weights are packed: %s is assumed", packing)
                    self.known = Format(packing, codes or self.known.codes)
                    self._retry()
        if self._waiting:
            names = ", ".join(list(self._waiting)[:3]) + (", ..." if len(self._waiting) > 3 else "")
            raise ValueError(
                f"{names}: neither these ternary weights nor others of the checkpoint tell which weight a code is; set "
                "quantization_config.codes in config.json: offset (0, 1, 2 are -1, 0, +1), zero-first (0, 1, 2 are "
                "0, +1, -1) or signed"
            )

    def _learn(self, found: Format) -> None:
        if not self._reported and self._contradicts(found):
            self._reported = True
            logger.warning("config.json says ternary weights are %s; the tensors are %s", self._declared, found)
        fresh = self.known.packing is None or self.known.codes is None
        self.known = Format(self.known.packing or found.packing, self.known.codes or found.codes)
        if fresh:
            self._retry()

    def _contradicts(self, found: Format) -> bool:
        packing, codes = self._declared.packing, self._declared.codes
        return packing not in (None, found.packing) or codes not in (None, found.codes)

    def _retry(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for name, load in waiting.items():
            self.take(name, load)


def _declared(config: Mapping[str, Any]) -> Format:
    packing, codes = config.get("packing"), config.get("codes")
    if packing not in (None, "k", "n", "none"):
        raise _wrong("packing", packing, "k, n or none")
    if codes is not None and codes not in tuple(Codes):
        raise _wrong("codes", codes, ", ".join(Codes))
    along: Literal["k", "n"] | None = packing if packing in ("k", "n") else None
    return Format(
        Packing(along, bool(config.get("transposed", False))) if packing is not None else None,
        Codes(codes) if codes is not None else None,
    )


def _is_bitlinear(config: Mapping[str, Any]) -> bool:
    return str(config.get("linear_class", "bitlinear")) == "bitlinear"


def _wrong(key: str, found: Any, accepted: str) -> ValueError:
    return ValueError(f"config.json: quantization_config.{key}: got {found!r}; write {accepted}")
