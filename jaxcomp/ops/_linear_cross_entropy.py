"""The cross-entropy of a linear layer's logits, which are never in memory as a whole."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxcomp._core.explicit import over_automatic_axes
from jaxcomp._core.shard_map import match_varying


def linear_cross_entropy(
    x: Float[Array, "*batch features"],
    kernel: Float[Array, "features classes"],
    labels: Int[Array, "*batch"],
    *,
    bias: Float[Array, " classes"] | None = None,
    chunk_size: int = 4096,
) -> Float[Array, "*batch"]:
    """Computes the softmax cross-entropy of the logits `x @ kernel + bias`, a part at a time.

    Forward and backward pass take `chunk_size` classes after the other, so logits of all classes
    are never in memory. Nothing is compressed: loss and gradients are those of
    `optax.softmax_cross_entropy_with_integer_labels` but for rounding. The backward pass computes
    the logits again: 4 matrix products instead of 3. Saved are the arguments and a float32 number
    for each example. A batch may be sharded; chunks are of the classes alone.

    Args:
        x: float32, bfloat16 or float16 array: the last hidden states. Products accumulate in
            float32.
        kernel: The kernel of the linear layer.
        labels: Class of each example. A label that is no class has the loss NaN; for padding, take
            any class and multiply the loss by 0.
        bias: Offset of each class.
        chunk_size: Classes that are computed at once. A chunk of logits takes
            4 x batch x `chunk_size` bytes.

    Returns:
        The loss of each example; float32.

    Raises:
        ValueError: If shapes do not match, there is no class, or `chunk_size` is less than 1.

    Example:
        >>> x, kernel = jnp.ones((2, 8)), jnp.zeros((8, 50_000))
        >>> loss = linear_cross_entropy(x, kernel, jnp.array([0, 49_999]))
        >>> bool(jnp.allclose(loss, jnp.log(50_000)))
        True
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: expected 1 or more")
    if x.shape[-1:] != kernel.shape[:1] or x.shape[:-1] != labels.shape:
        raise ValueError(
            f"x of shape {x.shape}, kernel of shape {kernel.shape}, labels of shape "
            f"{labels.shape}: expected (*batch, features), (features, classes) and (*batch)"
        )
    if kernel.shape[1] == 0:
        raise ValueError(f"kernel of shape {kernel.shape}: expected at least one class")
    if bias is not None and bias.shape != kernel.shape[1:]:
        raise ValueError(f"bias of shape {bias.shape}: expected {kernel.shape[1:]}, as the kernel")
    offset = jnp.zeros(kernel.shape[1:], kernel.dtype) if bias is None else bias
    x, kernel, offset, labels = match_varying((x, kernel, offset, labels))
    return _loss(x, kernel, offset, labels, min(chunk_size, kernel.shape[1]))


class _Part(NamedTuple):
    """A part of the classes.

    Attributes:
        kernel: Its part of the kernel.
        bias: Its part of the bias.
        place: Index of each example's label in it; outside it if the label is.
    """

    kernel: Array
    bias: Array
    place: Array

    def logits(self, x: Array) -> Array:
        """Returns the logits of the part; float32."""
        product = jnp.einsum("...d,dc->...c", x, self.kernel, preferred_element_type=jnp.float32)
        return product + jnp.expand_dims(self.bias.astype(jnp.float32), self._batch)

    @property
    def is_label(self) -> Array:
        """Whether each class is the label of each example."""
        classes = jnp.expand_dims(jnp.arange(self.kernel.shape[1]), self._batch)
        return self.place[..., None] == classes

    @property
    def _batch(self) -> tuple[int, ...]:
        return tuple(range(self.place.ndim))


_Carry = tuple[Array, ...]


def _over_parts(
    step: Callable[[_Carry, _Part, Array | int], _Carry],
    carry: _Carry,
    arguments: tuple[Array, Array, Array],
    size: int,
) -> _Carry:
    """Runs a step for each part of the classes, the last of which may be smaller."""
    kernel, bias, labels = arguments
    classes = kernel.shape[1]
    whole = classes // size

    def part(start: Array | int, width: int) -> _Part:
        return _Part(
            lax.dynamic_slice_in_dim(kernel, start, width, 1),
            lax.dynamic_slice_in_dim(bias, start, width, 0),
            labels - start,
        )

    def body(i: Array, carry: _Carry) -> _Carry:
        return step(carry, part(i * size, size), i * size)

    carry = lax.fori_loop(0, whole, body, carry)
    rest = classes - whole * size
    return step(carry, part(whole * size, rest), whole * size) if rest else carry


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _loss(x: Array, kernel: Array, bias: Array, labels: Array, size: int) -> Array:
    return _forward(x, kernel, bias, labels, size)[0]


def _forward(
    x: Array, kernel: Array, bias: Array, labels: Array, size: int
) -> tuple[Array, tuple[Array, ...]]:
    def step(carry: _Carry, part: _Part, _: Array | int) -> _Carry:
        greatest, total, found = carry
        logits = part.logits(x)
        now = jnp.maximum(greatest, logits.max(-1))
        shift = jnp.where(jnp.isfinite(now), now, 0)  # of logits of -Inf alone, too
        total = total * jnp.exp(greatest - shift) + jnp.exp(logits - shift[..., None]).sum(-1)
        return now, total, found + jnp.where(part.is_label, logits, 0).sum(-1)

    zeros = jnp.zeros_like(labels, jnp.float32)
    start = zeros - jnp.inf, zeros, zeros
    greatest, total, found = _over_parts(step, start, (kernel, bias, labels), size)
    is_class = (labels >= 0) & (labels < kernel.shape[1])
    normalizer = jnp.where(is_class, greatest + jnp.log(total), jnp.nan)
    return normalizer - found, (x, kernel, bias, labels, normalizer)


def _backward(
    size: int, saved: tuple[Array, ...], cotangent: Array
) -> tuple[Array, Array, Array, np.ndarray]:
    x, kernel, bias, labels, normalizer = saved

    def step(carry: _Carry, part: _Part, start: Array | int) -> _Carry:
        dx, dkernel, dbias = carry
        probability = jnp.exp(part.logits(x) - normalizer[..., None])
        dlogits = (probability - part.is_label) * cotangent[..., None]
        rounded = dlogits.astype(x.dtype)
        dx += jnp.einsum("...c,dc->...d", rounded, part.kernel, preferred_element_type=jnp.float32)
        product = functools.partial(jnp.einsum, "...d,...c->dc", preferred_element_type=jnp.float32)
        of_kernel = over_automatic_axes(product, (x, rounded), like=part.kernel)
        of_bias = dlogits.sum(tuple(range(dlogits.ndim - 1)))
        dkernel, dbias = (
            lax.dynamic_update_slice_in_dim(all_, found.astype(all_.dtype), start, -1)
            for all_, found in ((dkernel, of_kernel), (dbias, of_bias))
        )
        return dx, dkernel, dbias

    zeros = jnp.zeros_like(x, jnp.float32), jnp.zeros_like(kernel), jnp.zeros_like(bias)
    dx, dkernel, dbias = _over_parts(step, zeros, (kernel, bias, labels), size)
    none = np.zeros(labels.shape, jax.dtypes.float0)
    return dx.astype(x.dtype), dkernel, dbias, none


_loss.defvjp(_forward, _backward)
