"""Counts the floating-point operations of a JAX program from its jaxpr."""

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from jaxcomp.memory._tracing import inner_jaxprs


def flops(fn: Callable[..., object], *args: object) -> int | None:
    """Counts the FLOPs of the matrix products and convolutions of a function.

    The function is traced, not run. The count is that of the whole program, over all devices.

    A multiplication and an addition are two operations. Multiplications by padding, or by the
    zeros of a dilated (transposed) convolution, are excluded, as in XLA's own count. The body of
    a `scan` counts once per iteration, a Pallas kernel once per grid point, and the body of a
    `shard_map` once per device. A `cond` counts its largest branch. A `platform_dependent` counts
    the branch of the default platform.

    The count excludes elementwise operations, reductions, FFTs, linear algebra other than
    products, and foreign functions. It does not include what XLA adds (its own recomputation) or
    exclude what XLA removes (dead code).

    Args:
        fn: a function that JAX can trace.
        *args: the arguments of `fn`: arrays, `jax.ShapeDtypeStruct`s or pytrees of them, of any
            shape and dtype.

    Returns:
        The number of FLOPs; `None` if some of them are inside a `while_loop`, because its trip
        count depends on data.

    Example:
        >>> import jax.numpy as jnp
        >>> flops(lambda x, w: jnp.tanh(x @ w), jnp.ones((8, 16)), jnp.ones((16, 4)))
        1024
    """
    return jaxpr_flops(jax.make_jaxpr(fn)(*args).jaxpr, jax.default_backend())


def jaxpr_flops(jaxpr: Jaxpr, platform: str) -> int | None:
    """Counts the FLOPs of a traced program, such as `jax.make_jaxpr(fn)(*args).jaxpr`.

    Args:
        jaxpr: the program.
        platform: the platform whose branch of a `platform_dependent` counts.

    Returns:
        The number of FLOPs, or `None`, as `flops`.
    """
    return equations_flops(jaxpr.eqns, platform)


def equations_flops(equations: Iterable[JaxprEqn], platform: str) -> int | None:
    """Counts the FLOPs of some equations of a traced program, as `jaxpr_flops`."""
    parts = [_equation_flops(equation, platform) for equation in equations]
    known = [p for p in parts if p is not None]
    return sum(known) if len(known) == len(parts) else None


def _equation_flops(equation: JaxprEqn, platform: str) -> int | None:
    name = equation.primitive.name
    if name == "dot_general":
        return _dot_flops(equation)
    if name == "ragged_dot_general":
        return _ragged_dot_flops(equation)
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
    """Returns whether a branch of a `platform_dependent` is for a platform.

    `None` is the default.
    """
    return platforms is None or platform in platforms


def _repeats(equation: JaxprEqn) -> int:
    """Returns how many times the body of an equation runs, summed over all devices."""
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


def _ragged_dot_flops(equation: JaxprEqn) -> int:
    """Returns each row is in one group, whatever the sizes of the groups."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, contracting), (_, batch) = numbers.dot_dimension_numbers
    left, right = map(_shape, equation.invars[:2])
    others = {*contracting, *batch, *numbers.rhs_group_dimensions}
    return int(2 * prod(left) * prod(n for d, n in enumerate(right) if d not in others))


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
    """Returns the number of (output, tap) pairs along an axis that read an element of the input."""
    position = np.arange(outputs)[:, None] * stride + np.arange(taps) * dilation - pad
    inside = (position >= 0) & (position <= (size - 1) * left_dilation)
    return int(np.sum(inside & (position % left_dilation == 0)))
