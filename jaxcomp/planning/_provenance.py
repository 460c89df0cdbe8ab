"""How and when a result was made."""

import datetime
import importlib.metadata
import platform
import shlex
import sys
from pathlib import Path

_PACKAGES = ("jaxcomp", "jax", "jaxlib", "flax", "optax")


def provenance() -> dict[str, str]:
    """Returns the date, the command, and the versions of Python and of packages.

    Example:
        >>> sorted(provenance())
        ['command', 'date', 'flax', 'jax', 'jaxcomp', 'jaxlib', 'optax', 'python']
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
    } | {name: importlib.metadata.version(name) for name in _PACKAGES}
