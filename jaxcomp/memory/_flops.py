"""Floating point operations of a JAX program, counted from its jaxpr."""

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from ._tracing import inner_jaxprs


def flops(fn: Callable[..., Any], *args: Any) -> int | None:
    """FLOPs of the matrix products and convolutions of `fn(*args)`; nothing is run.

    A multiply and an add are two operations. Multiplications with padding and with the zeros of
    a dilated (transposed) convolution are left out, as in XLA's own count. Scan bodies count by
    their length, of a `cond` the largest branch, of a `platform_dependent` the attached
    platform's, Pallas kernels by their grid, and `shard_map` bodies by the number of devices: the
    figure is that of the whole program.

    Not counted: elementwise work, reductions, FFTs, linear algebra beyond products, and foreign
    functions. What XLA adds or removes later (its own rematerialisation, dead code) is not seen.

    Args:
        fn: any function that JAX can trace.
        *args: its arguments: arrays or `ShapeDtypeStruct`s.

    Returns:
        FLOPs; None if a `while_loop` whose trip count depends on data holds some of them.

    Example:
        >>> import jax.numpy as jnp
        >>> flops(lambda x, w: jnp.tanh(x @ w), jnp.ones((8, 16)), jnp.ones((16, 4)))
        1024
    """
    return jaxpr_flops(jax.make_jaxpr(fn)(*args).jaxpr, jax.default_backend())


def jaxpr_flops(jaxpr: Jaxpr, platform: str) -> int | None:
    """`flops` of a program already traced: `jax.jit(fn).trace(*args).jaxpr.jaxpr`."""
    parts = [_equation_flops(equation, platform) for equation in jaxpr.eqns]
    known = [p for p in parts if p is not None]
    return sum(known) if len(known) == len(parts) else None


def _equation_flops(equation: JaxprEqn, platform: str) -> int | None:
    name = equation.primitive.name
    if name == "dot_general":
        return _dot_flops(equation)
    if name == "conv_general_dilated":
        return _convolution_flops(equation)
    inner = [jaxpr_flops(jaxpr, platform) for jaxpr in inner_jaxprs(equation)]
    branches = equation.params.get("branches_platforms")
    if branches is not None:
        return next(f for f, names in zip(inner, branches, strict=True) if _holds(names, platform))
    known = [f for f in inner if f is not None]
    if len(known) < len(inner):
        return None
    if name == "cond":
        return max(known)
    if name == "while":
        return None if any(known) else 0
    return _repeats(equation) * sum(known)


def _holds(platforms: tuple[str, ...] | None, platform: str) -> bool:
    """Whether a branch of a `platform_dependent` is this platform's; None is the default."""
    return platforms is None or platform in platforms


def _repeats(equation: JaxprEqn) -> int:
    """How often the body of an equation runs, over all devices."""
    params = equation.params
    if equation.primitive.name == "scan":
        return int(params["length"])
    if equation.primitive.name == "pallas_call":
        return prod(params["grid_mapping"].grid)
    if equation.primitive.name == "shard_map":
        return prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return 1


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(variable.aval.shape)


def _dot_flops(equation: JaxprEqn) -> int:
    (contracting, _), _ = equation.params["dimension_numbers"]
    left, out = _shape(equation.invars[0]), _shape(equation.outvars[0])
    return int(2 * prod(out) * prod(left[d] for d in contracting))


def _convolution_flops(equation: JaxprEqn) -> int:
    params = equation.params
    numbers = params["dimension_numbers"]
    left, right = (_shape(variable) for variable in equation.invars)
    out = _shape(equation.outvars[0])
    per_position = out[numbers.out_spec[0]] * out[numbers.out_spec[1]] * right[numbers.rhs_spec[1]]
    products = [
        _products(left[i], right[k], out[o], stride, pad[0], left_dilation, right_dilation)
        for i, k, o, stride, pad, left_dilation, right_dilation in zip(
            numbers.lhs_spec[2:],
            numbers.rhs_spec[2:],
            numbers.out_spec[2:],
            params["window_strides"],
            params["padding"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            strict=True,
        )
    ]
    return int(2 * per_position * prod(products))


def _products(
    size: int, taps: int, outputs: int, stride: int, pad: int, left_dilation: int, dilation: int
) -> int:
    """Along one axis: pairs of output and tap that meet an element of the input."""
    position = np.arange(outputs)[:, None] * stride + np.arange(taps) * dilation - pad
    inside = (position >= 0) & (position <= (size - 1) * left_dilation)
    return int(np.sum(inside & (position % left_dilation == 0)))
