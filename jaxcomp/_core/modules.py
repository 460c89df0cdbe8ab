"""Flax NNX models as pytrees, and classes derived from those of their modules."""

import copyreg
import functools
from collections.abc import Callable, Hashable
from typing import Any, cast

from flax import nnx
from flax.nnx import filterlib

State = nnx.State[Any, Any]
_WHERE = "call jaxcomp.compress and uncompress outside of nnx.jit, nnx.grad and the like"


def split_model(
    model: nnx.Module, trained: filterlib.Filter = nnx.Param
) -> tuple[nnx.GraphDef[Any], State, State]:
    """Splits a model into its structure, the variables that are trained, and the others."""
    return nnx.split(model, trained, ...)  # type: ignore[return-value] # always two states here


class _DerivedMeta(type(nnx.Module)):  # type: ignore[misc] # the type of modules
    """Type of the classes that `derived` makes; they are pickled by the arguments of `derived`."""

    def __repr__(cls) -> str:
        """Returns what Flax's error has for the class of a model that changed inside `nnx.jit`."""
        return f"{cls.stock_class!r} of jaxcomp ({_WHERE})"


def derived(
    kind: type[nnx.Module], body: Callable[..., dict[str, Any]], *arguments: Hashable
) -> type[nnx.Module]:
    """Returns a subclass of a module's class with additional methods.

    The same arguments return the same class, so JAX's caches stay valid. Modules of the class can
    be copied and pickled.

    Args:
        kind: The class to derive from. The result keeps its name and stores it as `stock_class`.
        body: Function of `kind` and `arguments` that returns the methods. It must be defined at the
            top level of a Python module, because pickle refers to it by name.
        *arguments: Further arguments of `body`.

    Returns:
        The subclass.
    """
    try:
        return _derived(kind, body, *arguments)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        return _derived.__wrapped__(kind, body, *arguments)


@functools.cache
def _derived(
    kind: type[nnx.Module], body: Callable[..., dict[str, Any]], *arguments: Hashable
) -> type[nnx.Module]:
    own = {
        "stock_class": kind,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_made_of": (kind, body, *arguments),
    }
    return cast(
        type[nnx.Module], _DerivedMeta(kind.__name__, (kind,), own | body(kind, *arguments))
    )


def set_class(module: nnx.Module, kind: type[nnx.Module]) -> None:
    """Changes the class of a module. Flax's own `__setattr__` would store an attribute."""
    object.__setattr__(module, "__class__", kind)


def stock_class(module: nnx.Module) -> type[nnx.Module]:
    """Returns the class that a module had before `derived`, or its class."""
    return getattr(type(module), "stock_class", type(module))


def _reduce(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return derived, kind._made_of


copyreg.pickle(_DerivedMeta, _reduce)
