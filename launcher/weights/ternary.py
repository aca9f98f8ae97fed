"""Conversion of a checkpoint to ternary weights: the engine's environment does it, as `vllm_graft`'s converter says."""

import json
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from launcher.errors import CheckFailed, UsageError

CONVERTER = "vllm_graft.quantization.ternary.convert"


class Summary(BaseModel):
    """What a conversion did."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ternary_modules: int
    kept_modules: tuple[str, ...]
    source_bytes: int
    target_bytes: int
    relative_error: float
    """Norm of what rounding took away over the norm of the rounded weights."""


@dataclass(frozen=True)
class Request:
    """What is converted, where to and how; without a group size there is one scale a row."""

    source: Path
    target: Path
    group_size: int | None = None
    scale_dtype: str = "float16"
    keep: tuple[str, ...] = ()
    lm_head: bool = False

    def argv(self, python: Path) -> tuple[str, ...]:
        """The command."""
        words = [str(python), "-m", CONVERTER, str(self.source), str(self.target), "--scale-dtype", self.scale_dtype]
        words += ["--group-size", str(self.group_size)] if self.group_size is not None else []
        words += [word for pattern in self.keep for word in ("--keep", pattern)]
        return (*words, *(["--lm-head"] if self.lm_head else []))


def convert(request: Request, python: Path, progress: Callable[[float, float, str], None]) -> Summary:
    """Convert, and go on where an earlier conversion of the same to the same broke off.

    Args:
        request: what, where to, how.
        python: of the engine's environment.
        progress: gets done bytes, all bytes and the tensor's name.

    Raises:
        UsageError: the source cannot be converted, or the target is in the way.
        CheckFailed: the converter broke.
    """
    last = ""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        with subprocess.Popen(
            request.argv(python), stdout=subprocess.PIPE, stderr=log, text=True, cwd=request.target.parent
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                last = line
                event = json.loads(line)
                if "detail" in event:
                    progress(event["done_bytes"], event["total_bytes"], event["detail"])
        log.seek(0)
        said = "\n".join(log.read().strip().splitlines()[-5:])
    answer = json.loads(last) if last else {}
    if "error" in answer:
        raise UsageError(answer["error"])
    try:
        return Summary.model_validate(answer.get("summary"))
    except ValidationError as error:
        raise CheckFailed(
            f"{request.source}: the conversion ended with {process.returncode}; the same command goes on with the file "
            f"it was at. It said:\n{said}"
        ) from error
