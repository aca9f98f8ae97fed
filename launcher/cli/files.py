"""Commands about files: fetch, bundle, clean."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from launcher.cli.base import (
    FolderOption,
    JsonOption,
    ModelOption,
    ProfileOption,
    RuntimeOption,
    UnpinnedOption,
    chosen,
    out,
    print_json,
)
from launcher.prepare import Options, chosen_profile, models_dir
from launcher.profile import load_model, load_profile, user_folder

if TYPE_CHECKING:
    from launcher.cleaning import Leftover

app = typer.Typer()


@app.command()
def fetch(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Model; default: the profile's.")] = None,
    profile: ProfileOption = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="FOLDER|URL", help="Copy from a folder or disk, or ask a mirror of the hub."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", help="File with the hub's token; default: secrets/hf_token in the profile's state folder."
        ),
    ] = None,
    profiles: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring a model's files and verify them; run again, it goes on where it was, or compares every byte.

    From the Hugging Face hub at the revision that the model's YAML pins (else its newest, which is recorded), or from
    a folder: with config.json in it, in MODEL or in OWNER/NAME, or a cache of the Hugging Face libraries.

    A gated model needs a token: it is read from a file and shown to the hub alone.
    """
    from launcher.bring import tell_fetch
    from launcher.cli.live import Live
    from launcher.weights.events import Origin
    from launcher.weights.fetch import ensure_model, verify_model
    from launcher.weights.hub_token import read_token

    options = Options(profile, model, profiles)
    if model is None:
        model = chosen(options).model
    wanted = load_model(model, user_folder(profiles))
    token = read_token(token_file) if token_file else None if source else _stored_token(options)
    folder = models_dir() / wanted.name
    compared = None
    with Live(out) as live:
        if folder.exists():
            if source is not None:
                live.note(f"{folder} is there already: it is compared, and nothing is taken from {source}.")
            live.phase("verify")
            compared = verify_model(wanted, models_dir(), lambda event: tell_fetch(event, live))
        else:
            live.phase("model")
            ensure_model(wanted, models_dir(), lambda event: tell_fetch(event, live), token=token, source=source)
    origin = Origin.read(folder)
    if as_json:
        print_json({"model": wanted.name, "folder": folder, "origin": origin})
        return
    size_gb = sum(path.stat().st_size for path in folder.iterdir()) / 1e9
    came = (origin.revision or origin.package or "at a revision that its source did not tell") if origin else None
    out.print(f"{wanted.name}: {size_gb:.2f} GB in {folder}, {came or 'no record of where it came from'}", markup=False)
    if compared == 0:
        out.print("No record has its hashes: the files are all there and whole by their headers, no byte was compared.")


def _stored_token(options: Options) -> str | None:
    from launcher.errors import UsageError
    from launcher.state import ServiceState
    from launcher.weights.hub_token import stored_token

    try:
        profile, _ = chosen_profile(options)
    except UsageError:
        if options.profile is not None:
            raise
        # No profile suits this machine, which may fetch all the same.
        return None
    return stored_token(ServiceState.of(profile.name).secrets_dir)


class _CreateUnlessNamed(TyperGroup):
    """Takes `bundle OUT` as `bundle create OUT`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["create", *args]
        return super().parse_args(ctx, args)


bundle_app = typer.Typer(
    cls=_CreateUnlessNamed, no_args_is_help=True, help="Bring a service to a machine without network: `bundle OUT`."
)
app.add_typer(bundle_app, name="bundle")


@bundle_app.command()
def create(
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New folder, or a file that ends in .tar.")],
    profile: ProfileOption = None,
    model: ModelOption = None,
    profiles: FolderOption = None,
    runtime: RuntimeOption = None,
    without_engine: Annotated[
        bool, typer.Option("--without-engine", help="Host runtime: leave out vLLM's wheels, which that machine has.")
    ] = False,
    unpinned: UnpinnedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write all that a profile needs: launcher, wheels, model, and the image or the CPU engine.

    `bundle OUT` is short for it. On the other machine: `sh install.sh` in the folder or unpacked tar. Secrets are
    not in it.
    """
    from launcher.bundle.pack import pack
    from launcher.cli.live import Live

    options = Options(profile, model, profiles, runtime)
    one = chosen(options)
    with Live(out) as live:
        packed = pack(
            target.expanduser().resolve(), options, one, live, with_engine=not without_engine, unpinned=unpinned
        )
    if as_json:
        print_json(packed)
        return
    out.print(
        f"{packed.path}: {packed.size_bytes / 1e9:.2f} GB for {one.name} on {packed.manifest.machine}", markup=False
    )
    unpack = f"tar xf {packed.path.name} && " if packed.path.suffix == ".tar" else ""
    out.print(f"On the other machine: {unpack}sh {packed.path.stem}/install.sh", markup=False)


@bundle_app.command("install")
def install_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that `graft bundle` wrote, unpacked.")],
    as_json: JsonOption = False,
) -> None:
    """Verify a bundle and install its model, its image or engine, and its lock for this launcher."""
    from launcher.bundle.install import install_bundle
    from launcher.cli.live import Live

    with Live(out) as live:
        manifest = install_bundle(folder.expanduser().resolve(), live)
    if as_json:
        print_json(manifest)
        return
    own = load_profile(manifest.profile, user_folder(None))
    words = [f"make up PROFILE={manifest.profile}"]
    words += [f"MODEL={manifest.model}"] if manifest.model != own.model else []
    words += [f"ARGS='--runtime {manifest.runtime}'"] if manifest.runtime != own.runtime else []
    out.print(f"Installed. Start it with: {' '.join(words)}", markup=False)


@app.command()
def clean(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Remove these and no others.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove; without it nothing is touched.")] = False,
    profiles: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what Graft has left on this machine, and remove it with --yes: what is safe, or what you name.

    Safe: compile caches of images and fixes that are no longer used, logs of earlier failed starts, half downloads.
    Models and caches that a start would use are removed by name only; what runs is not removed at all.
    """
    from launcher import cleaning, service

    services = [service.find(name) for name in service.started_profiles()]
    running = [each.plan for each in services if each is not None and each.state.status != "exited"]
    volumes = cleaning.docker_volumes()
    found = cleaning.find(running, volumes or (), user_folder(profiles))
    going = cleaning.chosen(found, names or ())
    if yes:
        for one in going:
            cleaning.remove(one)
    if as_json:
        print_json({"found": found, "removed" if yes else "would_remove": [one.name for one in going]})
        return
    if volumes is None:
        out.print("Docker does not answer: its compile caches are not in the list.", style="dim")
    _say_leftovers(found, going, yes)


def _say_leftovers(found: Sequence["Leftover"], going: Sequence["Leftover"], removed: bool) -> None:
    from rich.table import Table

    table = Table("what", "name", "MB", "", "why", box=None, pad_edge=False)
    for one in found:
        mark = "removed" if removed and one in going else one.verdict
        table.add_row(one.kind, escape(one.name), f"{one.size_bytes / 1e6:,.1f}", mark, escape(one.why))
    if found:
        out.print(table)
    total_mb = sum(one.size_bytes for one in going) / 1e6
    if removed:
        out.print(f"Removed {len(going)}: {total_mb:,.1f} MB.")
    elif going:
        out.print(f"Nothing was removed; --yes would remove {len(going)}: {total_mb:,.1f} MB.")
    else:
        out.print("Nothing is there that is safe to remove unasked.")
