"""Log-probabilities of a linear layer's logits, which are never in memory as a whole."""

import functools
import math
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
    (log_probs,) = _checked(x, kernel, labels, bias, chunk_size, 1.0, with_entropy=False)
    return -log_probs


class LogProbs(NamedTuple):
    """What `linear_log_probs` returns.

    Attributes:
        log_probs: Log-probability of the label of each example; float32.
        entropy: Entropy of the distribution of each example, in nats; float32.
    """

    log_probs: Float[Array, "*batch"]
    entropy: Float[Array, "*batch"]


def linear_log_probs(
    x: Float[Array, "*batch features"],
    kernel: Float[Array, "features classes"],
    labels: Int[Array, "*batch"],
    *,
    bias: Float[Array, " classes"] | None = None,
    temperature: float = 1.0,
    chunk_size: int = 4096,
) -> LogProbs:
    """Computes log-probabilities and entropies of `(x @ kernel + bias) / temperature`.

    As `linear_cross_entropy`, it takes `chunk_size` classes after the other, so logits of all
    classes are never in memory, and nothing is compressed. Policy gradients and distillation need
    these numbers for each token. Both have gradients. Saved are the arguments and two float32
    numbers for each example.

    Args:
        x: float32, bfloat16 or float16 array: the last hidden states. Products accumulate in
            float32.
        kernel: The kernel of the linear layer.
        labels: Class of each example. A label that is no class has the log-probability NaN.
        bias: Offset of each class. A class of -Inf is never chosen.
        temperature: Divides the logits.
        chunk_size: Classes that are computed at once. A chunk of logits takes
            4 x batch x `chunk_size` bytes.

    Returns:
        The log-probabilities and the entropies.

    Raises:
        ValueError: If shapes do not match, there is no class, `chunk_size` is less than 1, or
            `temperature` is not positive and finite.

    Example:
        >>> x, kernel = jnp.ones((2, 8)), jnp.zeros((8, 50_000))
        >>> found = linear_log_probs(x, kernel, jnp.array([0, 49_999]), temperature=0.7)
        >>> bool(jnp.allclose(found.entropy, jnp.log(50_000)))
        True
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature}: expected a positive number")
    scale = 1 / temperature
    return LogProbs(*_checked(x, kernel, labels, bias, chunk_size, scale, with_entropy=True))


def _checked(
    x: Array,
    kernel: Array,
    labels: Array,
    bias: Array | None,
    chunk_size: int,
    scale: float,
    *,
    with_entropy: bool,
) -> list[Array]:
    """Checks the arguments and returns the log-probabilities, and the entropies if asked."""
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
    form = _Form(min(chunk_size, kernel.shape[1]), scale, with_entropy)
    return _log_probs(x, kernel, offset, labels, form)


class _Form(NamedTuple):
    """What is computed, and how.

    Attributes:
        size: Classes that are computed at once.
        scale: Multiplies the logits.
        with_entropy: Whether there are entropies, too.
    """

    size: int
    scale: float
    with_entropy: bool


class _Part(NamedTuple):
    """A part of the classes.

    Attributes:
        kernel: Its part of the kernel.
        bias: Its part of the bias.
        scale: Multiplies the logits.
        place: Index of each example's label in it; outside it if the label is.
    """

    kernel: Array
    bias: Array
    scale: float
    place: Array

    def logits(self, x: Array) -> Array:
        """Returns the logits of the part; float32."""
        product = jnp.einsum("...d,dc->...c", x, self.kernel, preferred_element_type=jnp.float32)
        logits = product + jnp.expand_dims(self.bias.astype(jnp.float32), self._batch)
        return logits if self.scale == 1 else self.scale * logits

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
    form: _Form,
) -> _Carry:
    """Runs a step for each part of the classes, the last of which may be smaller."""
    kernel, bias, labels = arguments
    classes, size = kernel.shape[1], form.size
    whole = classes // size

    def part(start: Array | int, width: int) -> _Part:
        return _Part(
            lax.dynamic_slice_in_dim(kernel, start, width, 1),
            lax.dynamic_slice_in_dim(bias, start, width, 0),
            form.scale,
            labels - start,
        )

    def body(i: Array, carry: _Carry) -> _Carry:
        return step(carry, part(i * size, size), i * size)

    carry = lax.fori_loop(0, whole, body, carry)
    rest = classes - whole * size
    return step(carry, part(whole * size, rest), whole * size) if rest else carry


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _log_probs(x: Array, kernel: Array, bias: Array, labels: Array, form: _Form) -> list[Array]:
    return _forward(x, kernel, bias, labels, form)[0]


def _forward(
    x: Array, kernel: Array, bias: Array, labels: Array, form: _Form
) -> tuple[list[Array], tuple[Array, ...]]:
    def step(carry: _Carry, part: _Part, _: Array | int) -> _Carry:
        greatest, total, found, *moments = carry
        logits = part.logits(x)
        now = jnp.maximum(greatest, logits.max(-1))
        shift = jnp.where(jnp.isfinite(now), now, 0)  # of logits of -Inf alone, too
        before, moved = jnp.exp(greatest - shift), logits - shift[..., None]
        weights = jnp.exp(moved)
        for i, moment in enumerate(moments):  # the sum of the weights times the moved logits
            of_before = moment + _product(total, greatest - shift)
            moments[i] = before * of_before + _product(weights, moved).sum(-1)
        total = total * before + weights.sum(-1)
        return now, total, found + jnp.where(part.is_label, logits, 0).sum(-1), *moments

    zeros = jnp.zeros_like(labels, jnp.float32)
    start = zeros - jnp.inf, zeros, zeros, *([zeros] if form.with_entropy else [])
    carry = _over_parts(step, start, (kernel, bias, labels), form)
    greatest, total, found, *moments = carry
    normalizer = greatest + jnp.log(total)
    is_class = (labels >= 0) & (labels < kernel.shape[1])
    log_probs = jnp.where(is_class, found - normalizer, jnp.nan)
    entropy = [jnp.log(total) - moment / total for moment in moments]
    return [log_probs, *entropy], (x, kernel, bias, labels, normalizer, *entropy)


def _product(weights: Array, logs: Array) -> Array:
    """Returns a product that is 0 where a weight is, also with a logarithm of -Inf."""
    return jnp.where(weights == 0, 0, weights * logs)


def _backward(
    form: _Form, saved: tuple[Array, ...], cotangents: list[Array]
) -> tuple[Array, Array, Array, np.ndarray]:
    x, kernel, bias, labels, normalizer, *entropy = saved
    of_log_prob, *of_entropy = cotangents
    is_class = (labels >= 0) & (labels < kernel.shape[1])
    of_log_prob = jnp.where(is_class, of_log_prob, jnp.nan)

    def step(carry: _Carry, part: _Part, start: Array | int) -> _Carry:
        dx, dkernel, dbias = carry
        log_probs = part.logits(x) - normalizer[..., None]
        probability = jnp.exp(log_probs)
        dlogits = (part.is_label - probability) * of_log_prob[..., None]
        for mean, cotangent in zip(entropy, of_entropy, strict=True):
            slope = _product(probability, log_probs + mean[..., None])
            dlogits -= slope * cotangent[..., None]
        dlogits = dlogits if form.scale == 1 else form.scale * dlogits
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
    dx, dkernel, dbias = _over_parts(step, zeros, (kernel, bias, labels), form)
    none = np.zeros(labels.shape, jax.dtypes.float0)
    return dx.astype(x.dtype), dkernel, dbias, none


_log_probs.defvjp(_forward, _backward)
