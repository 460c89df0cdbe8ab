"""Models in which nothing is encoded, to which diagnostics compare."""

from typing import TypeVar

from flax import nnx

from jaxcomp._core.modules import set_class, stock_class
from jaxcomp.nn._coded import coded_modules

M = TypeVar("M", bound=nnx.Module)


def exact_copy(model: M) -> M:
    """Copies a model without codecs: of its layers, around its blocks, or of its whole call."""
    copy = nnx.clone(model)
    for layer in coded_modules(copy).values():
        layer.codec = None
    for _, module in nnx.iter_modules(copy):
        if encodes(module):
            set_class(module, stock_class(module))
    return copy


def encodes(module: nnx.Module) -> bool:
    """Returns whether the class of a module encodes what its call saves."""
    return getattr(type(module), "encodes", False)
