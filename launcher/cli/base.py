"""What all commands share: the application, the options that recur, printing and failing."""

import json
import sys
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import BaseModel
from rich.console import Console

from launcher.choice import chosen_vllm
from launcher.plan import Runtime
from launcher.prepare import Options, chosen_profile
from launcher.profile import Profile
from launcher.state import ServiceState

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="vLLM on the GPUs you own: says what fits, proves that the fixes are in, serves right tokens.",
    epilog="Exit codes: 0 done, 1 a check failed, 2 usage, 3 refused by plan or host, 4 start failed, "
    "5 a required fix is not applied, 130 interrupted.",
)

# Lines are folded for a screen only: a pipe gets them whole.
out = Console(highlight=False, soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 160)
err = Console(stderr=True, highlight=False, soft_wrap=True)

ProfileOption = Annotated[
    str | None, typer.Option("--profile", "-p", help="Profile; default: the one that suits this machine.")
]
ProfileArgument = Annotated[
    str | None, typer.Argument(metavar="[PROFILE]", help="Profile; default: the one that suits this machine.")
]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help="Model; default: the profile's.")]
FolderOption = Annotated[
    Path | None, typer.Option("--profiles", help="Folder of your own profiles and models; default: $GRAFT_PROFILES.")
]
RuntimeOption = Annotated[Runtime | None, typer.Option("--runtime", help="Another runtime than the profile's.")]
CardOption = Annotated[
    str | None, typer.Option("--card", help="Plan for this card, not for the machine's: rtx4090, 24GiB, ...")
]
AdviseOption = Annotated[bool, typer.Option("--advise", help="Take safer numbers where the profile's are unsafe.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
UnpinnedOption = Annotated[
    bool, typer.Option("--unpinned", help="Take a base image that came from no registry, and so has no digest.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Go on although the plan or the machine says no.")]


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        out.print(f"graft {version('graft-launcher')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


def chosen(options: Options) -> Profile:
    """Return the profile named or chosen; in the latter case say which and why."""
    profile, choice = chosen_profile(options)
    if choice is not None:
        err.print(f"PROFILE={profile.name}: {choice.why}", style="dim")
    if profile.vllm == chosen_vllm(ServiceState.of(profile.name)):
        note = f"{profile.name}: vLLM {profile.vllm}, as an upgrade or a rollback left it; `graft upgrade` moves on"
        err.print(note, style="dim", markup=False)
    return profile


def print_json(value: Any) -> None:
    """Print a value, with dataclasses and pydantic models inside, as JSON."""
    out.file.write(json.dumps(value, default=_plain, indent=2) + "\n")


def fail(message: str, exit_code: int) -> NoReturn:
    """End the command with a message on standard error."""
    if message:
        err.print(f"graft: {message}", markup=False)
    sys.exit(exit_code)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form here")
