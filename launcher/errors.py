"""The launcher's errors: one class per exit code; the message says what, where and what to do."""

from typing import ClassVar


class GraftError(Exception):
    """Base of every error that ends a command with a message instead of a traceback."""

    exit_code: ClassVar[int] = 1


class CheckFailed(GraftError):
    """A check ran and its answer is no (exit code 1)."""

    exit_code = 1


class UsageError(GraftError):
    """The command, a profile, a model or another input is wrong (exit code 2)."""

    exit_code = 2


class Refused(GraftError):
    """The plan or the host says that the start cannot succeed (exit code 3)."""

    exit_code = 3


class StartFailed(GraftError):
    """The server was started and did not reach a right answer (exit code 4)."""

    exit_code = 4


class FixNotApplied(GraftError):
    """A required fix is not applied in every process that it names (exit code 5)."""

    exit_code = 5


INTERRUPTED_EXIT_CODE = 130
