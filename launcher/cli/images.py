"""Commands about images: pins, lock, upgrade, rollback."""

from collections.abc import Iterator
from pathlib import Path
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
    from launcher.images.pins import ImagePin, Pin
    from launcher.profile import Profile
    from launcher.upgrade_check import Memory, Preview

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
        print_json(found.images)
        return
    for pin in found.pins:
        out.print(f"[bold]{pin.vllm}[/] ({pin.role}) {pin.base}", highlight=False)
        out.print(f"  digest: {pin.digest or 'not known yet; `graft pins resolve` reads it from the registry'}")
        details = {"CUDA": pin.cuda, "driver at least": pin.min_driver, "Python": pin.python, "torch": pin.torch}
        out.print(f"  {', '.join(f'{name} {value}' for name, value in details.items() if value)}")
    for beside in found.services.values():
        out.print(f"[bold]{beside.name}[/] {beside.base}", highlight=False)
        out.print(f"  digest: {beside.digest or 'not known yet'}")


@pins_app.command()
def resolve(vllm: VllmArgument = None, as_json: JsonOption = False) -> None:
    """Read missing digests from the registry and record them; a known one is never replaced."""
    from launcher.images import base
    from launcher.images.registry import RegistryError

    resolved, failed = [], []
    for pin in _images(vllm):
        try:
            resolved.append(base.resolve(pin))
        except RegistryError as error:
            failed.append(str(error))
    if as_json:
        print_json(resolved)
    for pin in () if as_json else resolved:
        out.print(f"{pin.key}: {pin.base} is {pin.digest}", markup=False)
    if failed:
        raise CheckFailed("\n".join(failed))


@pins_app.command()
def check(vllm: VllmArgument = None, as_json: JsonOption = False) -> None:
    """Compare each known digest with the registry; a tag that has moved is reported, and not followed."""
    from launcher.images import base

    found = [base.check(pin) for pin in _images(vllm)]
    if as_json:
        print_json(found)
    for one in () if as_json else found:
        out.print(_check_line(one), markup=False)
    bad = [f"{one.pin.key} {one.state}" for one in found if one.state != "same"]
    if bad:
        raise CheckFailed(f"not as pinned: {', '.join(bad)}")


@pins_app.command()
def context(
    folder: Annotated[Path, typer.Argument(help="Gets one folder for each release.")] = Path("build/images"),
    vllm: VllmArgument = None,
    unpinned: UnpinnedOption = False,
) -> None:
    """Write what the image of each release is built from: Dockerfile, wheel, and the script of its manifest."""
    from launcher.images.base import ensure_digest
    from launcher.images.build import build_context
    from launcher.service_files import write

    for pin in _pins(vllm):
        files = build_context(ensure_digest(pin, unpinned=unpinned).image())
        write(folder / pin.vllm, files)
        out.print(f"{folder / pin.vllm}: {', '.join(files)}", markup=False)


def _check_line(one: "Checked") -> str:
    return f"{one.pin.key}: {one.state}: {one.message}"


def _images(vllm: str | None) -> "tuple[ImagePin, ...]":
    from launcher.images.pins import load_pins

    return load_pins().images if vllm is None else _pins(vllm)


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
        locked = service.lock_of(made.plan, live)
    path = lock_file(ServiceState.of(one.name))
    locked.write(path)
    if as_json:
        print_json(locked)
        return
    out.print(
        f"{path}: {locked.model.repo}, {len(locked.model.files)} files; {locked.base or 'no image'}", markup=False
    )


@app.command()
def upgrade(
    profile: ProfileOption = None,
    model: ModelOption = None,
    profiles: FolderOption = None,
    advise: AdviseOption = False,
    to: Annotated[str | None, typer.Option("--to", help="Pinned release to move to; default: the current one.")] = None,
    check_only: Annotated[bool, typer.Option("--check", help="Say what would change, and change nothing.")] = False,
    force: ForceOption = False,
    unpinned: UnpinnedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Move a running service to another vLLM release: tried beside the old one where memory allows, then switched."""
    from launcher import service, upgrade
    from launcher.cli.live import Live
    from launcher.cli.service import say_failure

    options = Options(profile, model, profiles, None, None, advise)
    one = chosen(options)
    if check_only:
        _preview(options, one, upgrade.target_of(one, to), as_json)
        return
    live = Live(err if as_json else out)
    try:
        with live:
            done = upgrade.upgrade(options, one, live, to=to, force=force, unpinned=unpinned)
    except service.FailedStart as failure:
        say_failure(failure)
        raise
    if as_json:
        print_json({"profile": one.name, "upgraded": done is not None, "to": done.started.plan.vllm if done else None})
    elif done is None:
        out.print(f"{one.name}: runs just that already.")
    else:
        where = "beside the old server, then switched" if done.was_beside else "after the old server was stopped"
        out.print(f"{one.name}: vLLM {done.before} -> {done.started.plan.vllm}, proven {where}.")
        out.print(f"     {done.started.answer.text.strip()}", markup=False)
        out.print(f"`graft rollback --profile {one.name}` goes back.", markup=False)


@app.command()
def rollback(profile: ProfileOption = None, profiles: FolderOption = None, as_json: JsonOption = False) -> None:
    """Start again what ran before, from the files and the image that it ran with; needs no network."""
    from launcher import service, upgrade
    from launcher.cli.live import Live
    from launcher.cli.service import say_failure

    options = Options(profile, None, profiles)
    name = chosen(options).name
    live = Live(err if as_json else out)
    try:
        with live:
            done = upgrade.rollback(options, name, live)
    except service.FailedStart as failure:
        say_failure(failure)
        raise
    if as_json:
        print_json({"profile": name, "vllm": done.plan.vllm, "url": done.base_url, "answer": done.answer})
        return
    out.print(f"{name}: vLLM {done.plan.vllm} serves again at {done.base_url}/v1")
    out.print(f"     {done.answer.text.strip()}", markup=False)


def _preview(options: Options, profile: "Profile", target: "Profile", as_json: bool) -> None:
    from launcher import service, upgrade_check
    from launcher.state import ServiceState

    running = service.read_plan(ServiceState.of(profile.name))
    found = upgrade_check.preview(options, profile, target, running)
    if as_json:
        print_json(found)
    else:
        out.print("\n".join(_preview_lines(found)), markup=False)


def _preview_lines(found: "Preview") -> Iterator[str]:
    yield f"vLLM {found.vllm[0]} -> {found.vllm[1]}"
    yield f"base: {found.base[0] or 'none'} -> {found.base[1]}"
    fixes = found.fixes
    yield f"fixes that retire: {', '.join(fixes.retired) or 'none'}"
    yield f"fixes that are not known to apply there: {', '.join(fixes.unknown) or 'none'}"
    yield f"fixes that are added: {', '.join(fixes.added) or 'none'}"
    if found.refused_flags is None:
        remedy = f"; `{found.parser_remedy}` brings it" if found.parser_remedy else ""
        yield f"flags that disappear: unknown: the parser of vLLM {found.vllm[1]} is not installed here{remedy}"
    else:
        yield f"flags that disappear: {', '.join(one.flag for one in found.refused_flags) or 'none'}"
        yield from (f"  {one.flag}: {one.complaint}" for one in found.refused_flags)
    yield from (f"flag {name}: {old or 'not set'} -> {new or 'not set'}" for name, old, new in found.plan_flags)
    yield f"memory: {_memory_text(found.memory[0])} -> {_memory_text(found.memory[1])}"


def _memory_text(memory: "Memory") -> str:
    if memory.verdict is None or memory.kv_cache_bytes is None:
        return f"not counted (context {memory.context_tokens or 'automatic'})"
    return f"{memory.verdict}, {memory.kv_cache_bytes / 2**30:.2f} GiB of KV cache, {memory.context_tokens} tokens"
