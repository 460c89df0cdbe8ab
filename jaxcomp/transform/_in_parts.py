"""Evaluates the results of a program part by part along one axis of its arrays."""

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, jaxpr_as_fun
from jaxtyping import Array

from jaxcomp._core import platforms
from jaxcomp._core.one_device import on_one
from jaxcomp._core.shard_map import barrier_by_type, vary_like
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
    variables,
)

_PART = 3 * 2**25  # bytes of the largest array of a part, if of float32
_PART_OF_TPU = 2**25  # with fewer, XLA keeps more of a part in a TPU's fast memory
_EXCESS = 4  # times as many parts as asked for, at most: an axis may have few divisors
_RATIO = 8  # of what products read and make to the arguments that are copied in parts
_SUMS = 16  # times as large as all results that are sums over the parts is the largest array
_LINEAR = {
    *("add", "add_any", "sub", "neg", "copy"),
    *("broadcast_in_dim", "reshape", "squeeze", "transpose", "reduce_sum"),
}
_REDUCTIONS = {"reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"}


Evaluate = Callable[[Array, Sequence[Array]], list[Array]]


class _Division(NamedTuple):
    """How results are divided: the axis, the number of parts, and which results have parts."""

    axis: int
    parts: int
    is_cut: tuple[bool, ...]


def in_parts(program: Program, whole: Evaluate, others: int = 0) -> Evaluate:
    """Evaluates a program in parts on one device, if it computes large arrays from smaller ones.

    The scores of an attention, for example, take parts of one example or one head after the other,
    and a feed-forward network with frozen weights parts of the tokens. Small results, such as the
    gradients of adapters, may be sums over the parts. They are added in float32.

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
    largest = largest_size(program)
    count = -(-4 * largest // nbytes)
    if count > 1 and largest >= least:
        for division in _divisions(program, count):
            with contextlib.suppress(WholeError):
                return _traced(program, division)
    return None


def _traced(program: Program, division: _Division) -> Evaluate:
    """Evaluates a program in parts.

    Raises:
        WholeError: If that cannot be or is not worth it.
    """
    copied: set[Any] = set()
    run = functools.partial(_run, program, division, copied)
    traced = jaxpr_as_fun(jax.make_jaxpr(run)(avals(program.jaxpr.invars)))
    if _of_products(program) < _RATIO * sum(v.aval.size for v in copied):
        raise WholeError("arguments are large")
    return lambda _, arguments: traced(*arguments)


def _of_products(program: Program) -> int:
    """Elements of what products read and make, where that is larger than each argument."""
    most = max((kind.size for kind in avals(program.jaxpr.invars)), default=0)
    products = [e for e in program.jaxpr.eqns if e.primitive.name == "dot_general"]
    operands = {v for e in products for v in (*variables(e.invars), *e.outvars)}
    return sum(v.aval.size for v in operands if v.aval.size > most)


def _divisions(program: Program, count: int) -> list[_Division]:
    """The axes of the largest result, those with half of `count` parts or more first.

    Results of the same size along an axis have parts, and the others are sums over the parts. If
    that fails, small results of this size may be sums, too: a weight with as many features as there
    are tokens.
    """
    results = avals(program.jaxpr.outvars)
    if not results:
        return []
    largest = max(results, key=lambda kind: kind.size)
    most = largest_size(program) // _SUMS
    found = []
    for axis, size in enumerate(largest.shape):
        limit = min(size, _EXCESS * count)
        divisors = [n for n in range(1, limit + 1) if size % n == 0]
        number = min((n for n in divisors if n >= count), default=max(divisors, default=0))
        alike = [axis < kind.ndim and kind.shape[axis] == size for kind in results]
        large = [kind.size > min(most, largest.size - 1) for kind in results]
        for cut in dict.fromkeys([tuple(alike), tuple(map(operator.and_, alike, large))]):
            sums = sum(kind.size for kind, part in zip(results, cut, strict=True) if not part)
            if number > 1 and sums <= most:
                found.append(_Division(axis, number, cut))
    return sorted(found, key=lambda division: -min(2 * division.parts, count))


def _run(
    program: Program, division: _Division, copied: set[Any], arguments: Sequence[Array]
) -> list[Array]:
    """The results, of which each iteration of a loop evaluates a part.

    `copied` takes the arguments that are copied in parts.
    """
    # The arrays that the parts are written to are not made before the arguments are there.
    zero = vary_like(jnp.zeros(()), arguments)
    arguments, zero = barrier_by_type((arguments, zero))
    results = avals(program.jaxpr.outvars)
    axis, count, is_cut = division

    def step(made: list[Array], number: Array) -> tuple[list[Array], None]:
        parts = _Parts(program, arguments, count, number, copied)
        pairs = zip(made, program.jaxpr.outvars, is_cut, strict=True)
        return [
            _written(whole, parts.part(v, axis), number, axis) if part else whole + parts.total(v)
            for whole, v, part in pairs
        ], None

    made = [
        jnp.full(kind.shape, zero, kind.dtype if part else _wide(kind.dtype))
        for kind, part in zip(results, is_cut, strict=True)
    ]
    made = lax.scan(step, made, jnp.arange(count))[0]
    return [x.astype(kind.dtype) for x, kind in zip(made, results, strict=True)]


def _written(whole: Array, part: Array, number: Array, axis: int) -> Array:
    return lax.dynamic_update_slice_in_dim(whole, part, number * part.shape[axis], axis)


def _wide(dtype: Any) -> Any:
    """The dtype in which sums over parts are made and added."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if is_narrow else dtype


class _Parts:
    """A program at some arguments, of which results are evaluated in parts.

    Args:
        program: The program, flat.
        arguments: Its arguments.
        count: How many parts there are, which divides each axis that is asked for.
        number: Which part is evaluated.
        copied: Takes the arguments of which parts are read.
    """

    def __init__(
        self,
        program: Program,
        arguments: Sequence[Array],
        count: int,
        number: Array,
        copied: set[Any],
    ) -> None:
        jaxpr = self._jaxpr = program.jaxpr
        self._count, self._number, self._copied = count, number, copied
        self._made_by = {v: e for e in jaxpr.eqns for v in e.outvars}
        self._whole = dict(zip(jaxpr.constvars, program.consts, strict=True))
        self._whole |= dict(zip(jaxpr.invars, arguments, strict=True))
        self._most = max(array.size for array in arguments)
        self._parts: dict[Any, Array] = {}
        self._asked: dict[Any, int] = {}  # the axis of each large product, computed along one alone
        self._constants = constants(jaxpr)  # such as a causal mask, which XLA fuses into readers

    def part(self, atom: Any, axis: int) -> Array:
        """A part of a value along an axis.

        Raises:
            WholeError: If it takes a whole array with more elements than each argument that is
                no constant, or such a product along two axes.
        """
        key = atom, axis
        if key not in self._parts:
            equation = self._made_by.get(atom)
            found = None if equation is None else self._step(equation, atom, axis)
            self._parts[key] = self._slice(atom, axis) if found is None else found
        return self._parts[key]

    def total(self, atom: Any) -> Array:
        """What the part adds to a sum over all parts, in float32 or a wider dtype.

        Raises:
            WholeError: If the value is not a sum, or as in `part`.
        """
        equation = self._made_by.get(atom) if is_variable(atom) else None
        is_real = jnp.issubdtype(atom.aval.dtype, jnp.inexact)
        if equation is None or is_placed(equation) or not is_real:
            raise WholeError(f"{atom.aval.str_short()} is no sum")
        name, params, operands = equation.primitive.name, equation.params, equation.invars
        summed: Sequence[Sequence[int]] = [[]]  # the axes of each operand that are summed over
        if name in ("dot_general", "reduce_sum"):
            summed = params["dimension_numbers"][0] if name == "dot_general" else [params["axes"]]
        axes = self._largest(operands[0], summed)
        if axes is not None:
            values = [self.part(v, i) for v, i in zip(operands, axes, strict=True)]
            if name == "reduce_sum":
                values = [x.astype(_wide(x.dtype)) for x in values]
            else:
                with scope_of(equation):
                    return _product(values, params)
        elif name == "convert_element_type":
            (value,) = map(self.total, operands)
            return value.astype(_wide(params["new_dtype"]))
        elif name in _LINEAR:
            values = [self.total(v) for v in operands]
        else:
            raise WholeError(f"{name} of a sum")
        with scope_of(equation):
            made: Array = equation.primitive.bind(*values, **params)
        return made.astype(_wide(made.dtype))

    def _largest(self, x: Any, axes: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        """The largest axis of an operand that has parts, with those of others; None without one."""
        cut = [
            of_all
            for of_all in zip(*axes, strict=True)
            if x.aval.shape[of_all[0]] % self._count == 0
        ]
        return max(cut, key=lambda of_all: x.aval.shape[of_all[0]], default=None)

    def _slice(self, atom: Any, axis: int) -> Array:
        whole = self._all(atom)
        if is_variable(atom) and atom not in self._made_by:
            self._copied.add(atom)
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
            self._all(v) if at is None else self.part(v, at)
            for v, at in zip(operands, axes, strict=True)
        ]
        with scope_of(equation):
            made = equation.primitive.bind(*values, **params)
        if not equation.primitive.multiple_results:
            return made
        return made[equation.outvars.index(result)]


def _product(operands: list[Array], params: dict[str, Any]) -> Array:
    """A product in float32, or in a wider dtype."""
    dtype = _wide(params["preferred_element_type"])
    if isinstance(params["precision"], lax.DotAlgorithm | lax.DotAlgorithmPreset):  # tells a dtype
        return lax.dot_general_p.bind(*operands, **params).astype(dtype)
    params = params | {"preferred_element_type": dtype}
    multiply = functools.partial(lax.dot_general_p.bind, **params)
    return platforms.cast_to_multiply_on_cpu(
        operands,
        lambda operands: multiply(*(x.astype(dtype) for x in operands)),
        lambda operands: multiply(*operands),
    )


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
