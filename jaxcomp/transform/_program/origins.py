"""Where in the user's model and code an equation comes from."""

import functools
import os
from typing import Any

from jaxcomp._core.module_scopes import scope_path
from jaxcomp.memory._origin import scopes_of
from jaxcomp.memory._source_line import LIBRARIES
from jaxcomp.transform._program.program import Program
from jaxcomp.transform._program.types import Equation


def module_path(equation: Equation | None) -> str:
    """Returns the path of the innermost module that made an equation, as `scope_path`."""
    return "" if equation is None else scope_path(scopes_of(equation.source_info.name_stack))


def located(called: Program, call: Equation) -> Program:
    """Returns a called program.

    Equations of a function that is JAX's own have the line of the call.

    JAX traces a jitted function such as `jax.nn.relu` once for all its callers, and remembers the
    first one's line.
    """
    traceback = call.source_info.traceback
    equations = [
        e.replace(source_info=e.source_info.replace(traceback=traceback))
        if _is_of_jax(e.source_info.traceback)
        else e
        for e in called.equations
    ]
    return Program(called.jaxpr.replace(eqns=equations), called.consts)


def placed(equation: Equation, at: Equation) -> Equation:
    """Returns an equation with the line of another one, and that one's name scopes first."""
    info = at.source_info
    stack = info.name_stack
    for name in scopes_of(equation.source_info.name_stack):
        stack = stack.extend(name)
    return equation.replace(source_info=info.replace(name_stack=stack))


@functools.lru_cache(4096)
def _is_of_jax(traceback: Any) -> bool:
    """Returns whether the innermost jitted function of a traceback has no line of the user's."""
    for frame in traceback.frames if traceback else ():
        if not frame.file_name.startswith(LIBRARIES):
            return False
        if os.path.basename(frame.file_name) == "pjit.py":
            return True
    return True
