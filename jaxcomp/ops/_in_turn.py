"""Runs the backward passes of two branches one after the other."""

import jax
from jaxtyping import Array, Float

from jaxcomp._core import barriers
from jaxcomp._core.shard_map import match_varying


def in_turn(
    first: Float[Array, "..."], second: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Makes the backward pass of one branch wait for that of another.

    XLA may compute the cotangents of all branches that meet at a sum at once. Let `first` be an
    input of one branch and `second` the result of the other branch. Then the backward pass of the
    other branch starts only after the cotangent of `first` is computed, which lowers peak memory.

    Args:
        first: Input of the branch whose backward pass runs first.
        second: Result of the other branch, which is added to the first branch. Its cotangent stays
            in memory until then.

    Returns:
        Both arrays, unchanged. Their gradients are unchanged too. Forward mode (`jax.jvp`) is an
        error.

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
