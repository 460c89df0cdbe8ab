"""A policy of `jax.checkpoint` for functions whose operations encode what they save."""

from collections.abc import Callable

import jax

from jaxcomp._core import remat3
from jaxcomp.codecs import Codec


def save_compressed() -> Callable[..., bool]:
    """Returns a policy for `jax.checkpoint` that keeps codes and recomputes everything else.

    Without it `jax.checkpoint` recomputes the codes that operations of `jaxcomp.ops` and layers of
    `jaxcomp.nn` make, so nothing is gained by making them. With it the input of the function and
    the codes are saved, and the masks, indices and statistics that are saved beside them.

    Returns:
        A policy that saves the values named `jaxcomp/<codec>`, of all codecs defined by now.

    Raises:
        NotImplementedError: If the option `jax_remat3` is on. That `jax.checkpoint` ignores names
            within the rules of a `jax.custom_vjp`, and would recompute all codes.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxcomp as jc
        >>> def f(x):
        ...     return jnp.sin(jc.ops.relu(x)).sum()
        >>> def saved_shapes(policy):
        ...     _, backward = jax.vjp(jax.checkpoint(f, policy=policy), jnp.ones((16, 8)))
        ...     return sorted(a.shape for a in jax.tree.leaves(backward))
        >>> saved_shapes(None)
        [(16, 8)]
        >>> saved_shapes(save_compressed())
        [(16, 1), (16, 8)]
    """
    if remat3.is_on():
        raise NotImplementedError(
            "save_compressed: with the option jax_remat3, jax.checkpoint ignores the names of "
            "codes and saves none of them; turn the option off, or use jaxcomp.checkpoint"
        )
    names = {kind.stored_name() for kind in codec_types() if hasattr(kind, "name")}
    return jax.checkpoint_policies.save_only_these_names(*names)


def codec_types() -> set[type[Codec]]:
    """Returns all subclasses of `Codec` that are defined by now."""

    def below(kind: type[Codec]) -> set[type[Codec]]:
        direct: set[type[Codec]] = set(kind.__subclasses__())
        return direct.union(*map(below, direct))

    return below(Codec)  # type: ignore[type-abstract]
