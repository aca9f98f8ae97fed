"""The command that compares engines: reconcile."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.cli.base import JsonOption, err, out, print_json

if TYPE_CHECKING:
    from rich.console import Group

    from launcher.reconcile.run import Pair

app = typer.Typer()


@app.command()
def reconcile(
    sides: Annotated[
        list[str],
        typer.Argument(
            metavar="A B...",
            help="transformers:FOLDER, vllm:FOLDER?option=value&..., or a .yaml or .json file.",
        ),
    ],
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Text, or .jsonl of texts or token ids; default: a bundled text.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=4, help="Most tokens of a passage.")] = 128,
    passages: Annotated[int, typer.Option("--passages", min=1, help="Most passages.")] = 2,
    decoded: Annotated[
        int, typer.Option("--decoded", min=1, help="Tokens of each passage that vLLM decodes one by one.")
    ] = 16,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0.001, help="Factor for the tolerances, which follow from the dtypes.")
    ] = 1.0,
    python: Annotated[
        Path | None,
        typer.Option("--python", help="Python of another environment with vLLM, such as one with CUDA."),
    ] = None,
    work: Annotated[Path | None, typer.Option("--work", help="Folder with room for activations while it runs.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder of reconcile.json and reconcile.html; default: not written.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the same tokens through two engines, and name the first layer, row and column where they part.

    Ends with 1 where a point is farther apart than rounding explains, or the mean KL is not below 0.012.
    """
    from launcher import bring
    from launcher.cli.live import Live
    from launcher.engine_env import ENGINE
    from launcher.errors import CheckFailed, UsageError
    from launcher.measure import html_report
    from launcher.reconcile import report
    from launcher.reconcile import run as runs
    from launcher.reconcile.prompts import BUNDLED, read
    from launcher.reconcile.sides import SYNTAX, parse

    if len(sides) < 2:
        raise UsageError(f"got {len(sides)} side; name two or more, each as {SYNTAX}")
    for option, given in (("--work", work), ("--out", folder)):
        if given is not None and not given.is_dir():
            raise UsageError(f"{option} {given}: no such folder; make it first")
    if python is not None and not python.is_file():
        raise UsageError(f"--python {python}: no such file")
    a, *others = map(parse, sides)
    texts, source = read(prompts), prompts.name if prompts else f"bundled {BUNDLED.name}"
    settings = runs.Settings(tokens, passages, decoded, tolerance)
    with Live(err if as_json else out) as live:
        if python is None:
            bring.install(ENGINE, live)
        pairs = list(runs.reconcile(a, others, texts, settings, python or ENGINE.python, live.phase, work))
    document = report.document(pairs, settings, source)
    if folder is not None:
        text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
        (folder / "reconcile.json").write_text(text, encoding="utf-8")
        page = html_report.html(report.page(pairs, settings, source))
        (folder / "reconcile.html").write_text(page, encoding="utf-8")
        err.print(f"Report: {folder / 'reconcile.html'}", markup=False)
    if as_json:
        print_json(document)
    else:
        out.print(_view(pairs))
    if not document["passed"]:
        parted = ", ".join(pair.b for pair in pairs if not pair.agree)
        raise CheckFailed(f"not the same as {a.name}: {parted}")


def _view(pairs: "list[Pair]") -> "Group":
    """What people see: a row for each layer, the sentence, and the cost."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    from launcher.reconcile import report

    parts: list[Table | Text] = []
    for pair in pairs:
        layers = Table(*report.COLUMNS, title=Text(f"{pair.b} against {pair.a}"), title_justify="left", box=None)
        for point in report.layer_rows(pair):
            layers.add_row(*map(escape, report.cells(point)), style=None if point["within"] else "red")
        parts.append(layers)
    quality = Table(*report.QUALITY, box=None)
    for row in report.quality_rows(pairs):
        quality.add_row(*map(escape, row))
    parts += [Text(""), quality, Text("")]
    for check in report.checks(pairs):
        mark, style = ("pass", "green") if check.passed else ("FAIL", "bold red")
        parts.append(Text.assemble((mark, style), f" {check.name}: {check.said}"))
    return Group(*parts)
