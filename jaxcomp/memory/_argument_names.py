"""Readable names of the arguments of a step, for those that JAX numbers."""

from collections.abc import Sequence

import jax
from flax import nnx

_NUMBERED = ".states["


def argument_names(given: Sequence[str], arguments: object) -> dict[str, str]:
    """Returns the path of each variable of a Flax NNX object, by the name that JAX gives it.

    `nnx.jit` passes an object as a flat list, so JAX calls a kernel `model.states[0][192]`.

    Args:
        given: JAX's name of each leaf of the arguments, in order.
        arguments: a pytree of the arguments, which may contain NNX objects.

    Returns:
        A path such as `model/head/kernel` by JAX's name. A name that is not numbered is left out.
        All are left out if the names do not match the variables.
    """
    paths: list[str] = []
    with nnx.split_context() as context:
        for leaf in jax.tree.leaves(arguments, is_leaf=is_object):
            if not is_object(leaf):
                paths.append("")
                continue
            for path, variable in nnx.to_flat_state(context.split(leaf)[1]):
                paths += ["/".join(map(str, path))] * len(jax.tree.leaves(variable))
    if len(paths) != len(given):
        return {}
    return {
        name: f"{name.split(_NUMBERED)[0]}/{path}"
        for name, path in zip(given, paths, strict=True)
        if path and _NUMBERED in name
    }


def is_object(value: object) -> bool:
    """Returns whether a value is a Flax NNX object."""
    return isinstance(value, nnx.Pytree)
