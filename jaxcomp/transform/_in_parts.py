"""Evaluates a part of a program's results along one axis, without the rest of what it computes."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, jaxpr_as_fun
from jaxtyping import Array

from jaxcomp._core.one_device import on_one
from jaxcomp._core.shard_map import vary_like
from jaxcomp.transform._algebra import POINTWISE
from jaxcomp.transform._axes import WholeError, same_axis
from jaxcomp.transform._constants import constants
from jaxcomp.transform._programs import (
    Program,
    apply,
    avals,
    is_placed,
    is_variable,
    read,
    scope_of,
)

_PART = 3 * 2**25  # bytes of the largest array of a part, if of float32
_PART_OF_TPU = 2**25  # with fewer, XLA keeps more of a part in a TPU's fast memory
_EXCESS = 4  # times as many parts as asked for, at most: an axis may have few divisors
_RATIO = 2  # of the largest array to all arguments, which are copied in parts
_REDUCTIONS = {"reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"}


Evaluate = Callable[[Array, Sequence[Array]], list[Array]]


def in_parts(program: Program, whole: Evaluate, others: int = 0) -> Evaluate:
    """Evaluates a program in parts on one device, if it computes large arrays from smaller ones.

    The scores of an attention, for example, take parts of one example or one head after the other.

    Args:
        program: The program, flat.
        whole: Evaluates it as a whole, from a cotangent that it waits for and the arguments.
        others: Elements of the largest array besides. With a larger one, such as the logits of a
            large vocabulary, the peak is there, and parts would take time for nothing. On a TPU
            they take less time.

    Returns:
        A function from the cotangent and the program's arguments to its results.
    """
    evaluate = whole
    for platform, nbytes, least in ((None, _PART, others + 1), ("tpu", _PART_OF_TPU, 0)):
        run = _run_of_parts(program, nbytes, least)
        evaluate = evaluate if run is None else on_one(platform, run, evaluate)
    return evaluate


def largest_size(program: Program) -> int:
    """Elements of the largest array that a program makes."""
    return max((v.aval.size for e in program.jaxpr.eqns for v in e.outvars), default=0)


def _run_of_parts(program: Program, nbytes: int, least: int) -> Evaluate | None:
    """Evaluates a program in parts of some bytes, where that is worth it and possible."""
    arguments, results = avals(program.jaxpr.invars), avals(program.jaxpr.outvars)
    largest = largest_size(program)
    count = -(-4 * largest // nbytes)
    if count > 1 and largest >= max(least, _RATIO * sum(kind.size for kind in arguments)):
        for axis, number in _divisions([kind.shape for kind in results], count):
            run = functools.partial(_run, program, axis, number)
            with contextlib.suppress(WholeError):
                traced = jaxpr_as_fun(jax.make_jaxpr(run)(arguments))
                return lambda _, arguments: traced(*arguments)
    return None


def _divisions(shapes: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, int]]:
    """Axes, each with a number of parts: the first with half of `count` or more, else the most.

    An axis has the same size in all shapes.
    """
    found = []
    for axis, sizes in enumerate(zip(*shapes, strict=False)):
        most = min(sizes[0], _EXCESS * count)
        divisors = [n for n in range(1, most + 1) if sizes[0] % n == 0]
        number = min((n for n in divisors if n >= count), default=max(divisors, default=0))
        if len({*sizes}) == 1 and number > 1:
            found.append((axis, number))
    return sorted(found, key=lambda division: -min(2 * division[1], count))


def _run(program: Program, axis: int, count: int, arguments: Sequence[Array]) -> list[Array]:
    """The results, of which each iteration of a loop evaluates a part along the axis."""
    # The arrays that the parts are written to are not made before the arguments are there.
    arguments, zero = lax.optimization_barrier((arguments, jnp.zeros(())))
    zero = vary_like(zero, arguments)
    results = avals(program.jaxpr.outvars)

    def step(made: list[Array], number: Array) -> tuple[list[Array], None]:
        parts = _Parts(program, arguments, count, number)
        found = [parts.result(i, axis) for i in range(len(made))]
        start = number * found[0].shape[axis]
        pairs = zip(made, found, strict=True)
        return [lax.dynamic_update_slice_in_dim(*pair, start, axis) for pair in pairs], None

    made = [jnp.full(kind.shape, zero, kind.dtype) for kind in results]
    return lax.scan(step, made, jnp.arange(count))[0]


class _Parts:
    """A program at some arguments, of which results are evaluated in parts.

    Args:
        program: The program, flat.
        arguments: Its arguments.
        count: How many parts there are, which divides each axis that is asked for.
        number: Which part is evaluated.
    """

    def __init__(
        self, program: Program, arguments: Sequence[Array], count: int, number: Array
    ) -> None:
        jaxpr = self._jaxpr = program.jaxpr
        self._count, self._number = count, number
        self._made_by = {v: e for e in jaxpr.eqns for v in e.outvars}
        self._whole = dict(zip(jaxpr.constvars, program.consts, strict=True))
        self._whole |= dict(zip(jaxpr.invars, arguments, strict=True))
        self._most = max(array.size for array in arguments)
        self._parts: dict[Any, Array] = {}
        self._asked: dict[Any, int] = {}  # the axis of each large product, computed along one alone
        self._constants = constants(jaxpr)  # such as a causal mask, which XLA fuses into readers

    def result(self, position: int, axis: int) -> Array:
        """A part of a result along an axis.

        Raises:
            WholeError: If it takes a whole array with more elements than each argument that is
                no constant, or such a product along two axes.
        """
        return self._part(self._jaxpr.outvars[position], axis)

    def _part(self, atom: Any, axis: int) -> Array:
        key = atom, axis
        if key not in self._parts:
            equation = self._made_by.get(atom)
            found = None if equation is None else self._step(equation, atom, axis)
            self._parts[key] = self._slice(self._all(atom), axis) if found is None else found
        return self._parts[key]

    def _slice(self, whole: Array, axis: int) -> Array:
        size = whole.shape[axis] // self._count
        return lax.dynamic_slice_in_dim(whole, self._number * size, size, axis)

    def _all(self, atom: Any) -> Array:
        if is_variable(atom) and atom not in self._whole:
            equation = self._made_by[atom]
            if atom.aval.size > self._most and atom not in self._constants:
                raise WholeError(f"{equation.primitive} of shape {atom.aval.shape}")
            made = apply(self._jaxpr, equation, [self._all(v) for v in equation.invars])
            self._whole |= dict(zip(equation.outvars, made, strict=True))
        return read(self._whole, atom)

    def _step(self, equation: JaxprEqn, result: Any, axis: int) -> Array | None:
        """A part of what an equation makes from parts of its operands; None if it cannot."""
        name, params = equation.primitive.name, equation.params
        if is_placed(equation):
            return None
        operands: list[Any] = equation.invars
        shape = [*result.aval.shape]
        size = shape[axis] // self._count
        part = tuple(size if i == axis else n for i, n in enumerate(shape))
        axes: list[int | None]  # of each operand, along which a part of it is read
        if name in POINTWISE | {"pvary"} and all(v.aval.ndim in (0, len(shape)) for v in operands):
            axes = [axis if v.aval.ndim and v.aval.shape[axis] > 1 else None for v in operands]
        elif name == "broadcast_in_dim":
            dims = params["broadcast_dimensions"]
            before = dims.index(axis) if axis in dims else None
            is_repeated = before is None or operands[0].aval.shape[before] == 1
            axes, params = [None if is_repeated else before], params | {"shape": part}
        elif name == "reshape":
            before = same_axis(operands[0].aval.shape, shape, axis)
            if before is None or params["dimensions"] is not None:
                return None
            axes, params = [before], params | {"new_sizes": part}
        elif name == "transpose":
            axes = [params["permutation"][axis]]
        elif name == "squeeze" or name in _REDUCTIONS:
            gone = params["dimensions"] if name == "squeeze" else params["axes"]
            axes = [[i for i in range(operands[0].aval.ndim) if i not in gone][axis]]
        elif name == "dot_general":
            if result.aval.size > self._most and self._asked.setdefault(result, axis) != axis:
                raise WholeError(f"dot_general of shape {result.aval.shape} along two axes")
            axes = [*_axes_of_product(equation, axis)]
        elif name in ("concatenate", "split"):
            if params["dimension" if name == "concatenate" else "axis"] == axis:
                return None
            axes = [axis] * len(operands)
        elif name == "pad" and params["padding_config"][axis] == (0, 0, 0):
            axes = [axis, None]
        elif name == "slice" and operands[0].aval.shape[axis] == shape[axis]:
            limits = tuple(size if i == axis else n for i, n in enumerate(params["limit_indices"]))
            axes, params = [axis], params | {"limit_indices": limits}
        else:
            return None
        values = [
            self._all(v) if at is None else self._part(v, at)
            for v, at in zip(operands, axes, strict=True)
        ]
        with scope_of(equation):
            made = equation.primitive.bind(*values, **params)
        if not equation.primitive.multiple_results:
            return made
        return made[equation.outvars.index(result)]


def _axes_of_product(equation: JaxprEqn, axis: int) -> tuple[int | None, int | None]:
    """The axes of a product's operands along which a part of the result takes a part of each."""
    contracted, batch = equation.params["dimension_numbers"]
    if axis < len(batch[0]):
        return batch[0][axis], batch[1][axis]
    left, right = (
        [i for i in range(v.ndim) if i not in (*c, *b)]
        for v, c, b in zip(avals(equation.invars), contracted, batch, strict=True)
    )
    axis -= len(batch[0])
    if axis < len(left):
        return left[axis], None
    return None, right[axis - len(left)]
