"""What rules of a policy see of a value that a backward pass needs."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.codecs._codec import FLOATS

ROLES = ("operand", "derivative", "residual", "mask", "index", "statistic", "input", "other")


@functools.lru_cache(256)
def dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype, of those of JAX's keys too.

    Example:
        >>> dtype_name(jnp.float32), dtype_name(jax.random.key(0).dtype)
        ('float32', 'key<fry>')
    """
    extended = jnp.issubdtype(dtype, jax.dtypes.extended)
    return str(dtype) if extended else jnp.dtype(dtype).name


@dataclasses.dataclass(frozen=True)
class Value:
    """A value that a backward pass needs.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        primitive: Name of the JAX primitive that computes it; "" for an argument.
        names: The names that `jax.ad_checkpoint.checkpoint_name` gives it.
        role: What the backward pass does with it, or with what is computed from it: "operand" of a
            product or convolution, "derivative" that multiplies element by element, "residual" of a
            `jax.custom_vjp` function, whose rule may do anything with it, "mask" (boolean), "index"
            (integer), "statistic" (of a reduction to an eighth or less; or a residual of an eighth
            of the elements of another, or less),
            "input" (one of the `coded_argnums` of `jaxcomp.checkpoint`) or "other".
        source: `file:line` of the code that computes it, or "".
        path: Path of the innermost module that computes it, in a model of `jaxcomp.compress`; in a
            function that of its named scopes; or "".
        iterations: How many of it are saved: the product of the lengths of the `scan` loops that
            compute it.
    """

    shape: tuple[int, ...]
    dtype: Any
    primitive: str = ""
    names: tuple[str, ...] = ()
    role: str = "other"
    source: str = ""
    path: str = ""
    iterations: int = 1

    @property
    def elements(self) -> int:
        """Number of its elements, over all iterations."""
        return self.iterations * math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether codecs for floating-point values can encode its dtype."""
        return dtype_name(self.dtype) in FLOATS
