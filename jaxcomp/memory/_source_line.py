"""Finds the line of user code that an equation of a traced program comes from."""

import ast
import functools
import itertools
import linecache
import os
import types
from typing import Any

import flax
import jax
import jaxtyping
from jax.extend.core import Jaxpr, JaxprEqn

from jaxcomp.memory._tracing import CHECKPOINT_PRIMITIVES

_LONG = 40  # characters of an expression
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN = ("_core", "codecs", "diagnostics", "memory", "nn", "ops", "planning", "transform")
LIBRARIES = (
    *(os.path.dirname(str(m.__file__)) + os.sep for m in (jax, flax, jaxtyping, functools)),
    *(os.path.join(_PACKAGE, name) + os.sep for name in _OWN),
)
"""Folders of libraries, and of this one but its models. Their files are no user code."""


def source_line(equation: JaxprEqn | None) -> str:
    """Returns `file:line` of the innermost frame outside `LIBRARIES`, or "" if there is none."""
    return "" if equation is None else _line_of(equation.source_info.traceback)


@functools.lru_cache(4096)
def _line_of(traceback: Any) -> str:
    for frame in traceback.frames if traceback else ():
        if not frame.file_name.startswith(LIBRARIES) and os.path.isabs(frame.file_name):
            return f"{os.path.basename(frame.file_name)}:{frame.line_num}"
    return ""


def is_of_library(called: Jaxpr) -> bool:
    """Returns whether a traced function is defined in one of `LIBRARIES`."""
    return (called.debug_info.func_filename or "").startswith(LIBRARIES)


def source_call(equation: JaxprEqn) -> str:
    """Returns what the user's code calls at `source_line`, such as "nnx.max_pool".

    For an operator it is the expression. It is the name of JAX's primitive if the code is not
    known, or long.
    """
    traceback: Any = equation.source_info.traceback
    codes, positions = traceback.raw_frames() if traceback else ((), ())
    for code, position in zip(codes, positions, strict=True):
        if not code.co_filename.startswith(LIBRARIES) and os.path.isabs(code.co_filename):
            return _expression(code, position) or _name(equation)
    return _name(equation)


def _name(equation: JaxprEqn) -> str:
    name: str = equation.primitive.name
    return "jax.checkpoint" if name in CHECKPOINT_PRIMITIVES else name


@functools.lru_cache(1024)
def _expression(code: types.CodeType, position: int) -> str:
    """Returns what is called at a position of the bytecode, or the short expression there.

    It is "" if none.
    """
    first, last, start, end = next(itertools.islice(code.co_positions(), position // 2, None))
    if first is None or start is None:
        return ""
    lines = [line.encode() for line in linecache.getlines(code.co_filename)[first - 1 : last]]
    if not lines:
        return ""
    lines[-1] = lines[-1][:end]  # before the first, which may be the same
    lines[0] = lines[0][start:]
    try:
        node = ast.parse(b"(%s)" % b"".join(lines), mode="eval").body
    except SyntaxError:
        return ""
    text = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    return text if len(text) <= _LONG else ""
