"""Commands about the gateway's API keys: keys add, list, remove."""

from typing import Annotated

import typer

from launcher.cli.base import FolderOption, JsonOption, ProfileOption, chosen, err, out, print_json
from launcher.prepare import Options

app = typer.Typer()
keys_app = typer.Typer(no_args_is_help=True, help="The API keys that the gateway knows.")
app.add_typer(keys_app, name="keys")

NameArgument = Annotated[str, typer.Argument(help="Name of the key; the access log shows it.")]


@keys_app.command()
def add(
    name: NameArgument,
    rpm: Annotated[int | None, typer.Option("--rpm", min=1, help="Requests in a minute; default: no limit.")] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Requests under way at once; default: no limit.")
    ] = None,
    profile: ProfileOption = None,
    profiles: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key and print it, this once: only its SHA-256 is kept. A running gateway knows it at once."""
    from launcher.gateway import change

    one = chosen(Options(profile, None, profiles))
    added = change.add(one, name, rpm, concurrency)
    if as_json:
        print_json({"name": name, "key": added.secret, "in_force": added.in_force})
        return
    out.print(added.secret, markup=False, soft_wrap=True)
    _say(added.in_force, one.name)


@keys_app.command("list")
def list_(profile: ProfileOption = None, profiles: FolderOption = None, as_json: JsonOption = False) -> None:
    """List the keys by name, with their limits; the service's own key is not among them."""
    from rich.table import Table

    from launcher.gateway import keys
    from launcher.state import ServiceState

    one = chosen(Options(profile, None, profiles))
    known = keys.read(ServiceState.of(one.name))
    if as_json:
        print_json([key.model_dump(exclude={"sha256"}) for key in known])
        return
    if not known:
        out.print(f"{one.name}: no keys but the service's own; `graft keys add NAME` makes one.")
        return
    table = Table("name", "requests a minute", "at once", "made", box=None, pad_edge=False)
    for key in known:
        table.add_row(key.name, str(key.requests_per_minute or "-"), str(key.concurrency or "-"), key.created)
    out.print(table)


@keys_app.command()
def remove(
    name: NameArgument, profile: ProfileOption = None, profiles: FolderOption = None, as_json: JsonOption = False
) -> None:
    """Forget a key; what runs with it goes on to its end, nothing new begins."""
    from launcher.gateway import change

    one = chosen(Options(profile, None, profiles))
    in_force = change.remove(one, name)
    if as_json:
        print_json({"name": name, "in_force": in_force})
        return
    out.print(f"{name}: removed.")
    _say(in_force, one.name)


def _say(in_force: bool, profile: str) -> None:
    if not in_force:
        err.print(f"{profile} does not run behind its gateway now; its next start takes the keys as they are then.")
