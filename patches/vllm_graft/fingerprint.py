"""Fingerprints of source text: what tells a function that was read from one that has changed since."""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from collections.abc import Iterable
from typing import Any


def fingerprint(objects: Iterable[Any]) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the objects' dedented source, joined by NUL.

    Raises:
        TypeError: an object has no source of its own (a constant); name its class or module instead.
        OSError: the source file cannot be read.

    """
    text = "\0".join(source(value) for value in objects)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def source(value: Any) -> str:
    """The dedented source of a module, class or function, also below decorators that keep what they wrap."""
    while not (inspect.ismodule(value) or inspect.isclass(value) or inspect.isfunction(value)):
        for attribute in ("__func__", "__wrapped__", "fget", "fn", "func"):
            inner = inspect.getattr_static(value, attribute, None)
            if inner is not None:
                value = getattr(value, attribute)
                break
        else:
            raise TypeError(f"an object of type {type(value).__name__} has no source of its own")
    return textwrap.dedent(inspect.getsource(value))
