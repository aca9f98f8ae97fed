"""The command line: parse, call, print, exit code. The only package that prints."""

import sys

from launcher.cli import base, images, planning, service
from launcher.errors import INTERRUPTED_EXIT_CODE, GraftError, Refused
from launcher.fit.geometry import FitError
from launcher.fit.refusals import FitRefused

base.app.add_typer(service.app)
base.app.add_typer(planning.app)
base.app.add_typer(images.app)


def main() -> None:
    """Run the command line; errors become one message and an exit code."""
    try:
        base.app(standalone_mode=False)
    except GraftError as error:
        base.fail(str(error), error.exit_code)
    except FitRefused as error:
        base.fail(str(error), Refused.exit_code)
    except FitError as error:
        base.fail(str(error), 2)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)
