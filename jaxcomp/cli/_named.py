"""What MODULE:NAME names on the command line."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flax import nnx


def function(text: str) -> Callable[..., Any]:
    """Returns the function that MODEL names.

    Raises:
        ValueError: If there is no such module or function.
    """
    found = _named("MODEL", text)
    if not callable(found):
        kind = type(found).__name__
        name = text.rpartition(":")[2]
        raise ValueError(f"MODEL={text!r}: {name} is of type {kind}, expected a function")
    function: Callable[..., Any] = found
    return function


def arguments(text: str) -> tuple[Any, ...]:
    """Returns the arguments of a step, with shapes in place of arrays where that is possible.

    Args:
        text: MODULE:NAME of a tuple, or of a function that returns one.

    Raises:
        ValueError: If there is no such module or name, or it is something else.
    """
    found = _named("--args", text)
    made = _shapes(found) if callable(found) else found
    if not isinstance(made, tuple | list):
        returned = "returned" if callable(found) else "is"
        raise ValueError(
            f"--args={text}: {text.rpartition(':')[2]} {returned} a value of type "
            f"{type(made).__name__}, expected the step's arguments as one tuple"
        )
    return tuple(made)


def _shapes(make: Callable[[], Any]) -> Any:
    """Returns what a function returns; it makes no arrays if it can be traced.

    What is no array, such as a static argument, stays as it is.
    """
    others: dict[int, Any] = {}

    def traced() -> Any:
        made = make()
        if not isinstance(made, tuple | list):
            return made
        others.update({i: m for i, m in enumerate(made) if isinstance(m, int | float | str)})
        return tuple(None if i in others else one for i, one in enumerate(made))

    try:
        made = nnx.eval_shape(traced)
    except Exception:  # it looks at values, as of a file
        return make()
    return tuple(others.get(i, one) for i, one in enumerate(made)) if others else made


def _named(argument: str, text: str) -> Any:
    module, colon, name = text.partition(":")
    if not colon or not name:
        raise ValueError(f"{argument}={text!r}: expected MODULE:NAME")
    if module.endswith(".py"):
        raise ValueError(f"{argument}={text!r}: expected a module's name, without .py")
    sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # of an import in the module
        file = Path(*module.split(".")).with_suffix(".py")
        raise ValueError(
            f"{argument}={text!r}: No module named {module!r}: there is no {file} in {Path.cwd()}, "
            "and no such package is installed"
        ) from None
    if not hasattr(found, name):
        raise ValueError(f"{argument}={text!r}: {module} has no function {name!r}")
    return getattr(found, name)
