"""Flax NNX models as pytrees, and with calls of their own."""

import copyreg
import functools
import typing
from collections.abc import Callable, Hashable
from typing import Any

from flax import nnx

State = nnx.State[Any, Any]


def split_model(model: nnx.Module) -> tuple[nnx.GraphDef[Any], State, State]:
    """The model's structure, its parameters, and its other variables."""
    return nnx.split(model, nnx.Param, ...)  # type: ignore[return-value] # always two states here


class _DerivedMeta(type(nnx.Module)):  # type: ignore[misc] # the type of modules
    """Type of the classes of `derived`, which are pickled by what they were made of."""


def derived(
    kind: type[nnx.Module], body: Callable[..., dict[str, Any]], *arguments: Hashable
) -> type[nnx.Module]:
    """A subclass of a module's class, with methods of its own.

    The same arguments give the same class, so that JAX's caches hold. Modules of it are copied and
    pickled as others are; the class is pickled by its arguments.

    Args:
        kind: The class. It is the result's `stock_class`, and its name stays.
        body: A function of a module (not a local one), from `kind` and `arguments` to the methods.
        *arguments: What `body` takes besides.
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
    return typing.cast(
        type[nnx.Module], _DerivedMeta(kind.__name__, (kind,), own | body(kind, *arguments))
    )


def set_class(module: nnx.Module, kind: type[nnx.Module]) -> None:
    """Changes the class of a module; Flax's own `__setattr__` would note it as an attribute."""
    object.__setattr__(module, "__class__", kind)


def stock_class(module: nnx.Module) -> type[nnx.Module]:
    """The class that a module had before `derived`, or its class."""
    return getattr(type(module), "stock_class", type(module))


def _reduce(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return derived, kind._made_of


copyreg.pickle(_DerivedMeta, _reduce)
