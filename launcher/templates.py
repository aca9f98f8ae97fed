"""The templates that files are rendered from."""

import shlex
from collections.abc import Callable

import jinja2

from launcher.state import CHECKOUT


def template(path: str, **filters: Callable[[str], str]) -> jinja2.Template:
    """Return a template of the checkout; a value that is missing is an error, never an empty string.

    Args:
        filters: further filters, by name.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(CHECKOUT),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.filters.update({"quoted": shlex.quote, "joined": shlex.join, **filters})
    return environment.get_template(path)
