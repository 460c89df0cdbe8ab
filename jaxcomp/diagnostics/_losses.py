"""The gradient of a user's loss, as a function of the parameters and the batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx import filterlib

from jaxcomp._core.explicit import explicit_axes
from jaxcomp._core.modules import split_model
from jaxcomp.memory._tracing import inner_jaxprs, open_jaxpr
from jaxcomp.transform._program.program import Program
from jaxcomp.transform._program.without_codes import has_codes, without_codes

Loss = Callable[[Any, Any], Any]  # of a model and a batch


def check_data(loss: Any, batch: Any, parts: int | None, hint: str = "") -> None:
    """Checks what a gradient is measured on. Without parts, the batch need not divide.

    Args:
        loss: The loss.
        batch: The batch.
        parts: Into how many parts the batch has to divide.
        hint: What to do where it does not.

    Raises:
        TypeError: If one of them has another type.
        ValueError: If the batch does not divide into so many parts.
    """
    if not callable(loss):
        raise TypeError(f"loss={loss!r}: expected a function of a model and a batch")
    leaves = jax.tree.leaves(batch)
    if not all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
        raise TypeError(f"batch: expected a pytree of arrays; it has {kinds}")
    sizes = {leaf.shape[:1] for leaf in leaves}
    if parts is None:
        return
    if len(sizes) != 1 or () in sizes or sizes.pop()[0] % parts:
        raise ValueError(
            f"batch: expected arrays whose axis 0 is the same multiple of {parts}{hint}"
        )


def parameters_of(model: Any, wrt: filterlib.Filter = nnx.Param) -> Any:
    """Returns the parameters of a Flax NNX module, or a pytree of parameters as it is.

    Args:
        model: The module, or the pytree.
        wrt: Selects variables of a module, as in `nnx.grad`.

    Raises:
        TypeError: If the pytree has no leaves, or others than floating-point arrays.
        ValueError: If a module has no such variables, or `wrt` is given for a pytree.
    """
    if isinstance(model, nnx.Module):
        state = nnx.state(model, wrt)
        if not jax.tree.leaves(state):
            raise ValueError(f"wrt={wrt!r}: the model has no such variables")
        return state
    if wrt is not nnx.Param:
        raise ValueError(f"wrt={wrt!r}: expected a Flax NNX module with it, not a pytree")
    kinds = {str(getattr(leaf, "dtype", type(leaf).__name__)) for leaf in jax.tree.leaves(model)}
    if not kinds or not all(map(_is_floating, jax.tree.leaves(model))):
        raise TypeError(
            "model: expected a Flax NNX module or a pytree of floating-point arrays (of an Equinox "
            f"module those of equinox.partition); it has {', '.join(sorted(kinds)) or 'no leaves'}"
        )
    return model


def _is_floating(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array | np.ndarray)
    return is_array and jnp.issubdtype(leaf.dtype, jnp.floating)


def of_parameters(
    loss: Loss, model: Any, has_aux: bool = False, wrt: filterlib.Filter = nnx.Param
) -> Callable[[Any, Any], Any]:
    """Returns a loss of a model and a batch as one of the parameters and the batch."""
    graphdef: Any = None
    rest: Any = None
    if isinstance(model, nnx.Module):
        graphdef, _, rest = split_model(model, wrt)

    def of(params: Any, batch: Any) -> jax.Array:
        given = params if graphdef is None else nnx.merge(graphdef, params, rest, copy=True)
        found = loss(given, batch)
        if has_aux and not (isinstance(found, tuple) and len(found) == 2):
            raise TypeError(f"loss returned a {type(found).__name__}: expected a pair (has_aux)")
        value = found[0] if has_aux else found
        is_scalar = getattr(value, "shape", None) == ()
        if not is_scalar or not jnp.issubdtype(value.dtype, jnp.floating):
            kind = jax.typeof(value) if isinstance(value, jax.Array) else type(value).__name__
            raise TypeError(
                f"loss returned {kind}: expected a floating-point scalar, or with has_aux=True a "
                "pair of it and something else"
            )
        return value

    return of


def exactly(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the same loss, of which JAX takes its own derivatives: nothing is encoded.

    A call raises a ValueError if codes are where `without_codes` does not find them.
    """

    def run(*arguments: Any) -> Any:
        program, shape = jax.make_jaxpr(loss, return_shape=True)(*arguments)
        exact = without_codes(Program.of(program))
        if has_codes(exact):
            raise ValueError(
                "loss: there are codes in a while loop or in jax.shard_map, of which the exact "
                "gradient is not known; expected them elsewhere, as in a scan"
            )
        made = exact(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shape), made)

    return run


def sgd_variance(exact: Callable[[Any, Any], Any], params: Any, batch: Any, parts: int) -> float:
    """Returns the variance of the gradient over batches of this size, from parts of one."""
    each = [vector(exact(params, _part(batch, i, parts))) for i in range(parts)]
    return float(np.var(each, axis=0, ddof=1).sum() / parts)


def _part(batch: Any, number: int, parts: int) -> Any:
    """Returns one of equal parts of a batch, sharded as the batch."""

    def cut(x: Any) -> Any:
        size = x.shape[0] // parts
        piece = np.asarray(x)[number * size : (number + 1) * size]
        # Over explicit axes the type of the batch carries its sharding.
        return jax.device_put(piece, x.sharding) if explicit_axes() else piece

    return jax.tree.map(cut, batch)


def moved(params: Any, draw: int, rounding: float = 0.0) -> Any:
    """Returns the parameters, float32 ones moved up or down at random.

    They move by about a unit in the last place, or by `rounding` as a part of each if that is more.
    """
    rng = np.random.default_rng(draw)

    def move(leaf: jax.Array) -> jax.Array:
        if leaf.dtype != jnp.float32:
            return leaf
        up = rng.integers(0, 2, leaf.shape).astype(bool)
        if rounding > jnp.finfo(jnp.float32).eps:
            return leaf * jnp.where(up, 1 + rounding, 1 - rounding).astype(jnp.float32)
        return jnp.nextafter(leaf, jnp.where(up, jnp.inf, -jnp.inf).astype(jnp.float32))

    return jax.tree.map(move, params)


def largest_rounding(program: Any) -> float:
    """Returns the largest relative rounding error of a traced program's floating-point dtypes.

    Those of 8 bits do not count: they are codes. Nor do those of branches for platforms, in which
    codes are packed.
    """
    errors = [0.0]
    for equation in open_jaxpr(program).eqns:
        if equation.params.get("branches_platforms") is not None:
            continue
        dtypes = [out.aval.dtype for out in equation.outvars if hasattr(out.aval, "dtype")]
        floats = [d for d in dtypes if jnp.issubdtype(d, jnp.floating) and d.itemsize > 1]
        errors += [float(jnp.finfo(d).eps) / 2 for d in floats]
        errors += map(largest_rounding, inner_jaxprs(equation))
    return max(errors)


def vector(gradient: Any) -> np.ndarray:
    """Returns all values of a pytree, in float64."""
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(gradient)]
    return np.concatenate(leaves)
