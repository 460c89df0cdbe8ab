"""Words of messages."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Returns a question for the known word that is nearest; empty if none is near.

    Example:
        >>> did_you_mean("rtx3060", ["h100", "rtx3060-12gb"])
        "; did you mean 'rtx3060-12gb'?"
        >>> did_you_mean("tpu", ["h100"])
        ''
    """
    text, names = str(word), list(known)
    longer = [name for name in names if len(text) > 2 and name.startswith(text)]
    near = [*longer, *difflib.get_close_matches(text, names, 1)]
    return f"; did you mean {near[0]!r}?" if near else ""
