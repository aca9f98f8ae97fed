"""The reference: transformers, whole prompts at once without a KV cache."""

from pathlib import Path
from typing import Any

import torch

from launcher.reconcile.program.points import recording
from launcher.reconcile.program.problems import Problem
from launcher.reconcile.program.recorder import Recorder
from launcher.reconcile.program.tokens import layers_of

_OWN_FORMATS = ("ternary", "bitnet")


def capture(model_path: Path, options: dict[str, Any], rows: list[list[int]], recorder: Recorder) -> str:
    """Record the points of every prompt, and return the dtype that they are computed in.

    Raises:
        Problem: transformers cannot load the checkpoint.

    """
    device = options.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype: str = options.get("dtype", "float32")
    model = load(model_path, getattr(torch, dtype)).to(device).eval()
    run(model, layers_of(model_path), rows, recorder)
    return dtype


def run(model: torch.nn.Module, layers: int, rows: list[list[int]], recorder: Recorder) -> None:
    """Record the points of a model that is loaded."""
    with recording(model, layers, recorder), torch.inference_mode():
        for row in rows:
            recorder.rows_now = len(row)
            given = torch.tensor([row], device=next(model.parameters()).device)
            recorder.write("logits", model(given, use_cache=False).logits.float())


def load(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Load a checkpoint; ternary weights are multiplied out, since transformers has no such method.

    Raises:
        Problem: transformers cannot load it, or tensors are missing.

    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path)
        quantization = getattr(config, "quantization_config", None) or {}
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        if method in _OWN_FORMATS:
            model, info = _load_ternary(path, config, quantization, dtype)
        else:
            model, info = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, ImportError) as error:
        raise Problem(f"transformers:{path}: {error}") from error
    if missing := sorted(info["missing_keys"]):
        raise Problem(f"transformers:{path}: {_names(missing)}: not in the checkpoint")
    return model


def _load_ternary(
    path: Path, config: Any, quantization: dict[str, Any], dtype: torch.dtype
) -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    from launcher.reconcile.program.ternary import multiplied_out

    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tensors = multiplied_out(path, quantization, shapes, dtype)
    # By its own loading, which knows that a mixture's experts are kept otherwise than a checkpoint has them.
    loaded: tuple[torch.nn.Module, dict[str, Any]] = type(model).from_pretrained(
        None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True
    )
    return loaded


def _names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
