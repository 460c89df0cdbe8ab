"""Regular expressions that users give."""

import re


def check_pattern(name: str, pattern: str) -> None:
    """Raises a ValueError, which names the argument, unless `pattern` is a regular expression.

    Example:
        >>> check_pattern("path", "blocks/.*")
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{name}={pattern!r}: not a regular expression: {error}") from error
