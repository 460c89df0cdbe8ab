"""Backward passes of two branches, one after the other."""

import jax
from jaxtyping import Array, Float

from jaxcomp._core import barriers
from jaxcomp._core.shard_map import match_varying


def in_turn(
    first: Float[Array, "..."], second: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Two arrays of which the second's backward pass waits for the first's.

    Where branches of a network meet, XLA may make the cotangents of all branches at once. Where
    `first` is in one branch and `second` at the end of the other, the latter's backward pass begins
    when the former's has come down to `first`.

    Args:
        first: What a branch is made of.
        second: What is added to that branch; its cotangent waits in memory.

    Returns:
        Both, unchanged, and so are their gradients; forward mode (`jax.jvp`) is an error.

    Example:
        >>> import jax.numpy as jnp
        >>> def block(h, shortcut):
        ...     h, shortcut = in_turn(h, shortcut)
        ...     return jnp.sin(h) + shortcut
        >>> jax.grad(block, 1)(jnp.ones(()), jnp.ones(()))
        Array(1., dtype=float32)
    """
    return _in_turn(*match_varying((first, second)))


@jax.custom_vjp
def _in_turn(first: Array, second: Array) -> tuple[Array, Array]:
    return first, second


def _forward(first: Array, second: Array) -> tuple[tuple[Array, Array], None]:
    return (first, second), None


def _backward(_: None, cotangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return barriers.barrier_together(*cotangents)


_in_turn.defvjp(_forward, _backward)
