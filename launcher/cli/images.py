"""Commands about images: pins, lock, upgrade, rollback."""

from typing import TYPE_CHECKING, Annotated

import typer

from launcher.cli.base import (
    AdviseOption,
    FolderOption,
    ForceOption,
    JsonOption,
    ModelOption,
    ProfileOption,
    RuntimeOption,
    UnpinnedOption,
    chosen,
    err,
    out,
    print_json,
)
from launcher.errors import CheckFailed
from launcher.prepare import Options

if TYPE_CHECKING:
    from launcher.images.base import Checked
    from launcher.images.pins import Pin

app = typer.Typer()
pins_app = typer.Typer(help="The pinned vLLM releases, and the digests of their images.")
app.add_typer(pins_app, name="pins")

VllmArgument = Annotated[str | None, typer.Argument(metavar="[VLLM]", help="Release such as 0.33.0; default: all.")]


@pins_app.callback(invoke_without_command=True)
def show(context: typer.Context, as_json: JsonOption = False) -> None:
    """Show the pins and what is known of their digests."""
    if context.invoked_subcommand is not None:
        return
    from launcher.images.pins import load_pins

    found = load_pins()
    if as_json:
        print_json(found.pins)
        return
    for pin in found.pins:
        out.print(f"[bold]{pin.vllm}[/] ({pin.role}) {pin.base}", highlight=False)
        out.print(f"  digest: {pin.digest or 'not known yet; `graft pins resolve` reads it from the registry'}")
        details = {"CUDA": pin.cuda, "driver at least": pin.min_driver, "Python": pin.python, "torch": pin.torch}
        out.print(f"  {', '.join(f'{name} {value}' for name, value in details.items() if value)}")


@pins_app.command()
def resolve(vllm: VllmArgument = None, as_json: JsonOption = False) -> None:
    """Read missing digests from the registry and record them; a known one is never replaced."""
    from launcher.images import base
    from launcher.images.registry import RegistryError

    resolved, failed = [], []
    for pin in _pins(vllm):
        try:
            resolved.append(base.resolve(pin))
        except RegistryError as error:
            failed.append(str(error))
    if as_json:
        print_json(resolved)
    for pin in () if as_json else resolved:
        out.print(f"{pin.vllm}: {pin.base} is {pin.digest}", markup=False)
    if failed:
        raise CheckFailed("\n".join(failed))


@pins_app.command()
def check(vllm: VllmArgument = None, as_json: JsonOption = False) -> None:
    """Compare each known digest with the registry; a tag that has moved is reported, and not followed."""
    from launcher.images import base

    found = [base.check(pin) for pin in _pins(vllm)]
    if as_json:
        print_json(found)
    for one in () if as_json else found:
        out.print(_check_line(one), markup=False)
    bad = [f"{one.pin.vllm} {one.state}" for one in found if one.state != "same"]
    if bad:
        raise CheckFailed(f"not as pinned: {', '.join(bad)}")


def _check_line(one: "Checked") -> str:
    return f"{one.pin.vllm}: {one.state}: {one.message}"


def _pins(vllm: str | None) -> "tuple[Pin, ...]":
    from launcher.images.pins import load_pins

    pins = load_pins()
    return pins.pins if vllm is None else (pins.of(vllm),)


@app.command()
def lock(
    profile: ProfileOption = None,
    model: ModelOption = None,
    profiles: FolderOption = None,
    runtime: RuntimeOption = None,
    advise: AdviseOption = False,
    force: ForceOption = False,
    unpinned: UnpinnedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write down the bytes that a start is made of, from base image to model files; `up --locked` holds to them."""
    from launcher import service
    from launcher.cli.live import Live
    from launcher.images.lock import lock_file
    from launcher.state import ServiceState

    options = Options(profile, model, profiles, runtime, None, advise)
    one = chosen(options)
    live = Live(err)
    with live:
        made, _ = service.prepared(options, one, live, force=force, unpinned=unpinned)
        locked = service.lock_of(made, live)
    path = lock_file(ServiceState.of(one.name))
    locked.write(path)
    if as_json:
        print_json(locked)
        return
    out.print(
        f"{path}: {locked.model.repo}, {len(locked.model.files)} files; {locked.base or 'no image'}", markup=False
    )
