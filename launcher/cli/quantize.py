"""Commands that quantize a checkpoint: quantize ternary."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from launcher.cli.base import JsonOption, out, print_json

app = typer.Typer()
quantize_app = typer.Typer(no_args_is_help=True, help="Quantize a checkpoint; vLLM's environment does the work.")
app.add_typer(quantize_app, name="quantize")


class ScaleType(StrEnum):
    """The type that scales are written in."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


@quantize_app.command()
def ternary(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of a dense checkpoint in safetensors.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="New folder.")],
    group_size: Annotated[
        int | None, typer.Option("--group-size", min=16, help="Columns that share a scale; default: a whole row.")
    ] = None,
    scale_dtype: Annotated[
        ScaleType, typer.Option("--scale-dtype", help="What scales are written in.")
    ] = ScaleType.FLOAT16,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="PATTERN", help="Modules that stay dense too, such as '*.layers.0.*'."),
    ] = None,
    lm_head: Annotated[bool, typer.Option("--lm-head", help="Convert lm_head too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Round the linear layers of a dense model to -1, 0 and +1 with a scale, 2 bits a weight.

    For models that were trained for it; others lose their sense. Memory stays below 4 GB, and the same command goes on
    where an interrupted one was. Embeddings, norms and lm_head stay as they are. vLLM with Graft serves the folder.
    """
    from launcher import bring
    from launcher.cli.live import Live
    from launcher.engine_env import ENGINE
    from launcher.errors import UsageError
    from launcher.weights.ternary import Request, convert

    source, target = source.expanduser().resolve(), target.expanduser().resolve()
    if not (source / "config.json").is_file():
        raise UsageError(f"{source}: no config.json; name the folder of a checkpoint")
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent}: no such folder; make it first")
    request = Request(source, target, group_size, scale_dtype, tuple(keep or ()), lm_head)
    with Live(out) as live:
        bring.install(ENGINE, live)
        live.phase("round")
        summary = convert(request, ENGINE.python, lambda done, total, name: live.progress(done, total, "bytes", name))
    if as_json:
        print_json(summary)
        return
    out.print(
        f"{target}: {summary.ternary_modules} layers in 2 bits, {summary.source_bytes / 1e9:.2f} GB became "
        f"{summary.target_bytes / 1e9:.2f} GB; rounding took {summary.relative_error:.0%} of the weights' norm",
        markup=False,
    )
    if summary.relative_error > 0.1:
        out.print("That much is lost unless the model was trained with ternary weights: compare its answers.")
