"""Regular expressions for paths, limited to those that match in a short time."""

import functools
import re

_LONGEST = 1000  # characters
_MOST_REPEATS = 8
_ATOMS = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL)  # escapes and classes of characters
_TOKENS = re.compile(
    r"\(\?P<\w+>|\(\?<?[=!>]|\(\?[a-zA-Z-]*:|\(|\)|\||(?:[*+?]|\{\d*,?\d*\})[?+]?|.", re.DOTALL
)


def check_pattern(name: str, pattern: object) -> None:
    """Checks that a pattern is a regular expression that cannot take exponential time.

    Python tries all ways in which a repeated group can be divided, if the group has a repeat or
    alternatives itself, as `([a-z_]+)*` has. Such groups are refused.

    Args:
        name: The argument's name, for the message.
        pattern: The pattern.

    Raises:
        TypeError: If `pattern` is no string.
        ValueError: If it is no regular expression, is too long, or has too many repeats or repeats
            of repeats.

    Example:
        >>> check_pattern("path", "(blocks/)?[0-9]+/.*")
        >>> check_pattern("path", "([a-z]+)*")
        Traceback (most recent call last):
        ValueError: path='([a-z]+)*': a repeated group has a repeat or alternatives in it, ...
    """
    if not isinstance(pattern, str):
        raise TypeError(f"{name}={pattern!r}: expected a regular expression")
    if len(pattern) > _LONGEST:
        raise ValueError(f"{name}: {len(pattern):,} characters, expected {_LONGEST:,} at most")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{name}={pattern!r}: not a regular expression: {error}") from error
    tokens = _TOKENS.findall(_ATOMS.sub("x", pattern))
    if sum(map(_repeats, tokens)) > _MOST_REPEATS:
        raise ValueError(f"{name}={pattern!r}: expected {_MOST_REPEATS} repeats at most")
    if _repeats_a_repeat(tokens):
        raise ValueError(
            f"{name}={pattern!r}: a repeated group has a repeat or alternatives in it, which may "
            "take forever; expected it to be repeated once, such as '.*'"
        )


@functools.lru_cache(100_000)
def fits(pattern: str, text: str) -> bool:
    """Returns whether a pattern matches the whole text; an empty one matches every text.

    Example:
        >>> fits("blocks/.*", "blocks/0"), fits("blocks", "blocks/0"), fits("", "blocks/0")
        (True, False, True)
    """
    return not pattern or bool(re.fullmatch(pattern, text))


def _repeats(token: str) -> bool:
    return token[0] in "*+" or (token[0] == "{" and len(token) > 1)


def _repeats_a_repeat(tokens: list[str]) -> bool:
    varies = [False]  # of each open group: whether it can match in several ways
    closed = False  # whether the last token closed such a group
    for token in tokens:
        if _repeats(token) and closed:
            return True
        if token == ")" and len(varies) > 1:
            closed = varies.pop()
            varies[-1] |= closed
            continue
        closed = False
        if token[0] == "(":
            varies.append(False)
        elif token[0] in "|?" or _repeats(token):
            varies[-1] = True
    return False
