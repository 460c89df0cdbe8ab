"""The variance that quantizing a sample adds to the gradient of a parameter."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxcomp.codecs import Quantize
from jaxcomp.codecs._per_sample import WIDTHS

COLUMNS = 2 + len(WIDTHS)

Sink = Float[Array, "batch columns"]
"""An argument whose gradient is a statistic of the backward pass; float32, one row per sample.

Columns of the gradient of the loss with respect to it: the sum of squared ranges of the sample's
groups; the squared norm of the cotangent that its code is multiplied by; and the variance that the
sample adds to the parameter's gradient with codes of 1, 2, 4 and 8 bits.

An operation reads only the second column of the value: the importance of the samples, which it
passes to its codec. It may hold the norms of an earlier step, or ones.
"""


def sensitivity(
    x: Float[Array, "batch ..."], cotangent: Float[Array, "batch ..."], uses: float
) -> Sink:
    """Computes the gradient of a `Sink`.

    Source: ActNN (Chen et al., ICML 2021, arXiv:2104.14129, section 4.2). ActNN bounds the variance
    of stochastic rounding by a quarter of a squared step. Here it is f (1 - f) of a squared step,
    where f is the fractional position between two levels. A zero among a ReLU's outputs is a level,
    so its variance is 0.

    Args:
        x: The array that is encoded, with the features last. Operations pass its decoded values, so
            the variances are those of the true values only with `Exact()`.
        cotangent: The array that `x` is multiplied by in the parameter's gradient; axis 0 is the
            batch.
        uses: How often each element of `x` meets each channel of the cotangent, on average.

    Returns:
        The gradient of the sink, float32. Squared ranges are summed over the groups of `Quantize`.
    """
    low, high = (extreme.astype(jnp.float32) for extreme in Quantize().extremes(x))
    span = high - low
    place = jnp.where(span > 0, (x.astype(jnp.float32) - low) / jnp.where(span > 0, span, 1), span)
    axes = tuple(range(1, x.ndim))
    positions = x[0].size // x.shape[-1]
    columns = [
        jnp.square(span).sum(axes),
        jnp.square(cotangent.astype(jnp.float32)).sum(tuple(range(1, cotangent.ndim))) * uses,
    ]
    for bits in WIDTHS:
        level = place * (2**bits - 1)
        part = level - jnp.floor(level)
        step = span / (2**bits - 1)
        variance = (part * (1 - part) * jnp.square(step)).sum(axes) / positions
        columns.append(variance * columns[1])
    return jnp.stack(columns, axis=-1)


def importance(sink: Sink | None) -> Float[Array, " batch"] | None:
    """Returns the `importance` argument of `Codec.encode` from a sink: its second column."""
    return None if sink is None else sink[:, 1]


def check_sink(sink: Sink | None, shape: tuple[int, ...]) -> None:
    """Checks that a sink fits an array.

    Args:
        sink: The sink, or None.
        shape: Shape of the array, (batch, ...).

    Raises:
        ValueError: If the sink is not of shape (batch, COLUMNS).
    """
    if sink is not None and sink.shape != (shape[0], COLUMNS):
        raise ValueError(f"sink of shape {sink.shape}: expected {(shape[0], COLUMNS)}")
