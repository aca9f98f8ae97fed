"""What is the user's to change."""


class Problem(Exception):
    """The message says what, where and what to do; the launcher shows it as it is."""
