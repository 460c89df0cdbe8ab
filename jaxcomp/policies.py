"""Policies for `jax.checkpoint`: what is kept for the backward pass, what is computed again."""

from collections.abc import Callable

import jax

from jaxcomp.codecs import Codec

Policy = Callable[..., bool]


def save_compressed() -> Policy:
    """Keeps what codecs have stored and recomputes everything else.

    Without a policy `jax.checkpoint` recomputes codes too, so nothing is gained by making them.
    With this one only the input of the function and the codes wait for the backward pass, with
    what stored exactly beside them (masks, indices, statistics).

    Returns:
        A policy that saves the values named `jaxcomp/<codec>`, of the codecs defined by now.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxcomp as jc
        >>> def f(x):
        ...     return jnp.sin(jc.ops.relu(x)).sum()
        >>> def stored(policy):
        ...     _, backward = jax.vjp(jax.checkpoint(f, policy=policy), jnp.ones((16, 8)))
        ...     return sorted(a.shape for a in jax.tree.leaves(backward))
        >>> stored(None)
        [(16, 8)]
        >>> stored(save_compressed())
        [(16, 1), (16, 8)]
    """
    codecs = _subclasses(Codec)  # type: ignore[type-abstract]
    named = (codec for codec in codecs if hasattr(codec, "name"))
    names = {codec.stored_name() for codec in named}
    return jax.checkpoint_policies.save_only_these_names(*names)


def _subclasses(kind: type[Codec]) -> set[type[Codec]]:
    direct: set[type[Codec]] = set(kind.__subclasses__())
    return direct.union(*map(_subclasses, direct))
