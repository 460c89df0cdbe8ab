"""How much noise the coding of a sample would bring into a parameter's gradient."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxcomp.codecs import Quantize
from jaxcomp.codecs._per_sample import WIDTHS

COLUMNS = 2 + len(WIDTHS)

Sink = Float[Array, "batch columns"]
"""An argument whose gradient is a statistic of the backward pass.

Its gradient with respect to the loss holds for each sample the squared ranges of its input, the
squared norm of what its code is multiplied by, and what it adds to the variance of the parameter's
gradient with codes of 1, 2, 4 and 8 bits. Of its own values an operation reads the second column:
the samples' importance to its codec, such as the norms that were found when they were last seen, or
ones.
"""


def sensitivity(
    x: Float[Array, "batch ..."], cotangent: Float[Array, "batch ..."], uses: float
) -> Sink:
    """The gradient of a `Sink`.

    After ActNN (Chen et al., ICML 2021, arXiv:2104.14129, section 4.2), with the variance of random
    rounding of the values themselves, f (1 - f) of a squared step, for their bound of a fourth of
    it: a zero among a ReLU's results is a level, and has none.

    Args:
        x: What is coded, the features last. An operation has its decoded values, so only with
            `Exact()` are these the variances of its codes.
        cotangent: What the gradient multiplies it by.
        uses: How often each of its values meets each of the cotangent's channels, on average.

    Returns:
        The gradient. Squared ranges are summed over the groups of `Quantize`.
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
    """What `Codec.encode` takes of a sink."""
    return None if sink is None else sink[:, 1]


def check_sink(sink: Sink | None, shape: tuple[int, ...]) -> None:
    """Raises a ValueError unless a sink is for an array of this shape."""
    if sink is not None and sink.shape != (shape[0], COLUMNS):
        raise ValueError(f"sink of shape {sink.shape}: expected {(shape[0], COLUMNS)}")
