"""Evaluates one part of a value along one of its axes, without the rest of what it is made of."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxcomp._core import platforms
from jaxcomp.memory._tracing import inner_jaxprs
from jaxcomp.transform._program.primitives import POINTWISE
from jaxcomp.transform._program.program import (
    Program,
    apply,
    avals,
    fixed_values,
    is_placed,
    read,
    scope_of,
)
from jaxcomp.transform._program.types import Equation, is_variable

_LINEAR = {
    *("add", "add_any", "sub", "neg", "copy"),
    *("broadcast_in_dim", "reshape", "squeeze", "transpose", "reduce_sum"),
}
_REDUCTIONS = {"reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"}


class WholeError(Exception):
    """A program cannot be evaluated for a part of the arrays along an axis."""


class Part:
    """One of several parts of the values of a program, along axes of these.

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
        self._count, self._number, self._copied = count, number, copied
        self._made_by = program.made_by
        self._whole = dict(zip(program.constants, program.consts, strict=True))
        self._whole |= dict(zip(program.arguments, arguments, strict=True))
        self._most = max(array.size for array in arguments)
        self._parts: dict[Any, Array] = {}
        self._asked: dict[Any, int] = {}  # the axis of each large product, computed along one alone
        self._constants = fixed_values(
            program
        )  # such as a causal mask, which XLA fuses into readers

    def part(self, atom: Any, axis: int) -> Array:
        """Returns a part of a value along an axis.

        Raises:
            WholeError: If it takes a whole array that is no constant, and is larger than every
                argument or made by a loop; or parts of a large product along two axes.
        """
        key = atom, axis
        if key not in self._parts:
            equation = self._made_by.get(atom)
            computed = None if equation is None else self._step(equation, atom, axis)
            self._parts[key] = self._slice(atom, axis) if computed is None else computed
        return self._parts[key]

    def total(self, atom: Any) -> Array:
        """Returns what the part adds to a sum over all parts, in float32 or a wider dtype.

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
                values = [x.astype(wide(x.dtype)) for x in values]
            else:
                with scope_of(equation):
                    return _product(values, params, wide(atom.aval.dtype))
        elif name == "convert_element_type":
            (value,) = map(self.total, operands)
            return value.astype(wide(params["new_dtype"]))
        elif name in _LINEAR:
            values = [self.total(v) for v in operands]
        else:
            raise WholeError(f"{name} of a sum")
        with scope_of(equation):
            result: Array = equation.primitive.bind(*values, **params)
        return result.astype(wide(result.dtype))

    def _largest(self, x: Any, axes: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        """Returns the largest axis of an operand that has parts, with those of others.

        It is None without one.
        """
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
            is_costly = atom.aval.size > self._most or any(inner_jaxprs(equation))
            if is_costly and atom not in self._constants:
                raise WholeError(f"{equation.primitive} of shape {atom.aval.shape}")
            results = apply(equation, [self._all(v) for v in equation.invars])
            self._whole |= dict(zip(equation.outvars, results, strict=True))
        return read(self._whole, atom)

    def _step(self, equation: Equation, result: Any, axis: int) -> Array | None:
        """Returns a part of what an equation makes from parts of its operands.

        It is None if it cannot.
        """
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
            before = _same_axis(operands[0].aval.shape, shape, axis)
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
            results = equation.primitive.bind(*values, **params)
        if not equation.primitive.multiple_results:
            return results
        return results[equation.outvars.index(result)]


def _product(operands: list[Array], params: dict[str, Any], dtype: Any) -> Array:
    """Returns a product in a dtype that may be wider than that of its equation."""
    if isinstance(params["precision"], lax.DotAlgorithm | lax.DotAlgorithmPreset):  # tells a dtype
        return lax.dot_general_p.bind(*operands, **params).astype(dtype)
    params = params | {"preferred_element_type": dtype}
    multiply = functools.partial(lax.dot_general_p.bind, **params)
    return platforms.cast_to_multiply_on_cpu(
        operands,
        lambda operands: multiply(*(x.astype(dtype) for x in operands)),
        lambda operands: multiply(*operands),
    )


def _same_axis(before: Sequence[int], after: Sequence[int], axis: int) -> int | None:
    """Returns the axis of an array before a reshape that is an axis of it afterwards."""
    outer = math.prod(after[:axis])
    for i, size in enumerate(before):
        if math.prod(before[:i]) == outer and size == after[axis]:
            return i
    return None


def _axes_of_product(equation: Equation, axis: int) -> tuple[int | None, int | None]:
    """Returns the axes of a product's operands of which a part of the result takes a part."""
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


def wide(dtype: Any) -> Any:
    """Returns the dtype in which sums over parts are made and added."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if is_narrow else dtype
