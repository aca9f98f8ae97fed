"""The command line: parse, call, print, exit code. The only package that prints."""

import sys

from typer.exceptions import TyperException

from launcher.cli import base, files, images, keys, load, measure, operate, planning, quantize, reconcile, service
from launcher.errors import INTERRUPTED_EXIT_CODE, GraftError, Refused
from launcher.fit.geometry import FitError
from launcher.fit.refusals import FitRefused

base.app.add_typer(service.app)
base.app.add_typer(planning.app)
base.app.add_typer(images.app)
base.app.add_typer(keys.app)
base.app.add_typer(files.app)
base.app.add_typer(quantize.app)
base.app.add_typer(reconcile.app)
base.app.add_typer(measure.app)
base.app.add_typer(load.app)
base.app.add_typer(operate.app)


def main() -> None:
    """Run the command line; errors become one message and an exit code."""
    try:
        exit_code = base.app(standalone_mode=False)
    except TyperException as error:
        # Without any command the help was printed and there is no message.
        base.fail(f"{message}\nSee `graft --help`." if (message := error.format_message()) else "", error.exit_code)
    except GraftError as error:
        base.fail(str(error), error.exit_code)
    except FitRefused as error:
        base.fail(str(error), Refused.exit_code)
    except FitError as error:
        base.fail(str(error), 2)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)
    # Typer returns the code of an early end, 130 of an interrupted command among them.
    if isinstance(exit_code, int):
        sys.exit(exit_code)
