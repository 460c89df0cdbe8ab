"""Reads a function as one of rows of channels, which a single kernel can compute.

Such a function takes arrays of one size with their channels last, and small arrays that broadcast
to them. It is elementwise, but for sums over all rows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core import Literal as Constant
from jaxtyping import Array

# Names of the calls of `codecs.packing`.
_PACK, _UNPACK = "pack", "unpack"
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
# Operations that kernels and XLA compute to the same bits.
_EXACT = {
    *("add", "sub", "mul", "max", "min", "neg", "abs", "sign", "square", "rsqrt", "clamp"),
    *("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor", "not", "select_n", "is_finite"),
    *("shift_left", "shift_right_logical", "shift_right_arithmetic"),
    *("convert_element_type", "bitcast_convert_type", "copy", "stop_gradient"),
}
# Operations that they compute to rounding.
_CLOSE = {"div", "sqrt", "exp", "exp2", "log", "log1p", "logistic", "tanh", "integer_pow"}
# Operations that leave the numbers of small arrays as they are.
SHAPING = {"reshape", "broadcast_in_dim", "squeeze", "expand_dims", "pvary"}


class NotOfRows(Exception):
    """The function is not one of rows of channels."""


class Axes(NamedTuple):
    """The axes along which a value differs.

    Attributes:
        sample: Whether it differs from sample to sample.
        row: Whether it differs along the rows of a sample, of which each has all channels.
        channel: Whether it differs from channel to channel.
    """

    sample: bool
    row: bool
    channel: bool


ALL, NONE = Axes(True, True, True), Axes(False, False, False)


class Part(NamedTuple):
    """The part of each code that an array stores.

    Attributes:
        first: Number of the first bit.
        bits: Number of bits.
    """

    first: int
    bits: int


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A value of a function of rows.

    Attributes:
        axes: The axes along which it differs; None if kernels do not read such a value.
        dtype: Its dtype.
        name: The operation that computes it from `operands`; "" if it is an argument, and "index"
            if it is the index of each element. Codes are unpacked ("unpack") from arrays that are
            "stored", whose operand is the argument, and packed ("pack").
        operands: Values that it is computed from.
        equation: The equation of the operation; None if there is none.
        array: Its value as XLA computes it; None for values of `ALL` axes.
        part: What an array stores of each code, if it is stored or packed.
    """

    axes: Axes | None
    dtype: Any
    name: str = ""
    operands: tuple["Value", ...] = ()
    equation: JaxprEqn | None = None
    array: Array | np.ndarray | None = None
    part: Part | None = None

    @functools.cached_property
    def is_exact(self) -> bool:
        """Whether a kernel computes it to the bits of XLA."""
        return self.name not in _CLOSE and all(o.is_exact for o in self.operands)

    @property
    def is_constant(self) -> bool:
        """Whether it is a number that is known when the kernel is compiled."""
        return isinstance(self.array, np.ndarray)

    @property
    def argument(self) -> "Value":
        """The argument that a stored value is, and any other value itself."""
        return self.operands[0] if self.name == "stored" else self

    @property
    def changes(self) -> bool:
        """Whether it differs from row to row."""
        return self.axes is not None and self.axes.row


@dataclasses.dataclass(frozen=True, eq=False)
class Sum:
    """The sum over all rows of a value."""

    of: Value


@dataclasses.dataclass(frozen=True)
class Rows:
    """A function of rows.

    Attributes:
        shape: Samples, rows of a sample, channels.
        arguments: Values of its arguments.
        results: Values and sums that it returns.
        exact: Values that have to have the bits of XLA.
    """

    shape: tuple[int, int, int]
    arguments: list[Value]
    results: list[Value | Sum]
    exact: set[Value]

    @classmethod
    def of(cls, program: Jaxpr, arguments: Sequence[Array], *, exact: bool) -> "Rows":
        """Reads a traced function.

        Args:
            program: The function.
            arguments: Its constants and arguments.
            exact: Whether results in floating point have to have the bits of XLA.

        Raises:
            NotOfRows: If it is not a function of rows.
        """
        made: list[Any] = [variable.aval for variable in program.outvars]
        largest = max((array.shape for array in (*arguments, *made)), key=math.prod)
        reader = _Reader(largest)
        if len(largest) < 2 or not math.prod(largest) or reader.axes(largest) != ALL:
            raise NotOfRows(f"arrays of shape {largest}")
        values = [reader.argument(a) for a in arguments]
        results = reader.run(program, (), values)
        rows = cls(reader.sizes, values, results, set())
        strict = {*with_operands([v for v in rows.made if exact and v.part is None])}
        if any(v.changes and v.name in _CLOSE for v in strict):
            raise NotOfRows("a result is not to the bit")
        rows = dataclasses.replace(rows, exact=strict)
        read = rows.read
        if not rows.made_in_kernel or any(v.axes is None for v in read):
            raise NotOfRows("a value is not of rows")
        if any(v.axes == ALL and v.argument not in values for v in read):
            raise NotOfRows("a constant is of rows")
        if any(v.dtype == jnp.uint4 for v in (*read, *rows.made)):
            raise NotOfRows("numbers of four bits that `codecs.packing` did not make")
        return rows

    @property
    def by_sample(self) -> bool:
        """Whether it reads values that differ from sample to sample, besides those of `ALL`."""
        return any(v.axes not in (None, ALL) and (v.axes.sample or v.axes.row) for v in self.read)

    @property
    def made(self) -> list[Value]:
        """The values of rows among the results."""
        return [r for r in dict.fromkeys(self.results) if isinstance(r, Value) and r.axes == ALL]

    @property
    def sums(self) -> list[Sum]:
        """The sums among the results."""
        return [r for r in dict.fromkeys(self.results) if isinstance(r, Sum)]

    @property
    def made_in_kernel(self) -> list[Value]:
        """The values of rows that are results or summed."""
        return [*self.made, *(s.of for s in self.sums)]

    @functools.cached_property
    def read(self) -> list[Value]:
        """The values that a kernel reads."""
        needed = with_operands(self.made_in_kernel, until=self._is_read)
        return [v for v in needed if self._is_read(v)]

    def _is_read(self, value: Value) -> bool:
        if value.is_constant or value.name == "index":
            return False
        has_array = value.array is not None
        is_argument = value.name in ("", "stored")
        return is_argument or (has_array and value in self.exact and not value.is_exact)


def with_operands(
    values: Sequence[Value], until: Callable[[Value], bool] = lambda _: False
) -> list[Value]:
    """Returns values and all that they are computed from, except from those of `until`."""
    found: dict[Value, None] = {}
    stack = list(values)
    while stack:
        value = stack.pop()
        if value not in found:
            found[value] = None
            if not until(value):
                stack.extend(value.operands)
    return list(found)


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads the equations of a function.

    Attributes:
        shape: Shape of the arrays of rows.
    """

    shape: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Samples, rows of a sample, channels."""
        return self.shape[0], math.prod(self.shape[1:-1]), self.shape[-1]

    @property
    def count(self) -> int:
        """Number of elements of the arrays of rows."""
        return math.prod(self.shape)

    @functools.cached_property
    def index(self) -> Value:
        """The index of each element."""
        return Value(ALL, jnp.dtype(jnp.uint32), "index")

    def argument(self, array: Array) -> Value:
        """Returns an array as a value."""
        axes = self.axes(array.shape)
        return Value(axes, array.dtype, array=None if axes == ALL else jnp.asarray(array))

    def axes(self, shape: Sequence[int]) -> Axes | None:
        """Returns the axes along which a value of some shape differs."""
        size, rank = math.prod(shape), len(self.shape)
        if size == 1:
            return NONE
        if size == self.count:
            return ALL  # whatever its shape: it is in the order of rows
        if len(shape) == 1:
            return Axes(False, False, True) if size == self.shape[-1] else None
        if len(shape) != rank:
            return None
        sizes = shape[0], math.prod(shape[1:-1]), shape[-1]
        if any(n not in (1, whole) for n, whole in zip(sizes, self.sizes, strict=True)):
            return None
        axes = Axes(*(n > 1 for n in sizes))
        return None if axes.row and axes.channel else axes

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        """Returns the results of a program for some values and sums."""
        known: dict[Any, Any] = {}
        inputs = [*jaxpr.constvars, *jaxpr.invars]
        values = [*(self.argument(jnp.asarray(c)) for c in consts), *arguments]
        known.update(zip(inputs, values, strict=True))

        def read(atom: Any) -> Any:
            if not isinstance(atom, Constant):
                return known[atom]
            aval: Any = atom.aval
            number = np.asarray(atom.val, aval.dtype)
            return Value(NONE, aval.dtype, array=number)

        for equation in jaxpr.eqns:
            made = self._equation(equation, [read(a) for a in equation.invars])
            known.update(zip(equation.outvars, made, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def _equation(self, equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        name = equation.primitive.name
        aval: Any = equation.outvars[0].aval
        if name in _CALLS:
            called = equation.params.get("name")
            if called == _PACK and isinstance(operands[0], Value) and operands[0].axes == ALL:
                return self._packed(equation, operands[0])
            if called == _UNPACK and self.axes(aval.shape) == ALL:
                return self._unpacked(equation, operands)
            return self._called(equation.params[_CALLS[name]], operands)
        if name == "platform_index":
            return [None]
        if name == "cond":
            return self._branch(equation, operands[1:])
        if name == "on_one":
            return self._branch(equation, operands)
        if any(isinstance(o, Sum) for o in operands):
            if name in SHAPING or (name == "reduce_sum" and not equation.params["axes"]):
                return operands
            raise NotOfRows("a sum is used")
        if all(o.axes != ALL for o in operands):
            return self._of_small(equation, operands)
        rest = (*range(len(self.shape) - 1),)
        if name == "reduce_sum" and equation.params["axes"] == rest and aval.size == self.shape[-1]:
            if aval.dtype != jnp.float32:
                raise NotOfRows(f"a sum in {aval.dtype}")
            return [Sum(operands[0])]
        if self.axes(aval.shape) != ALL or name not in {"reshape", "pvary", *_EXACT, *_CLOSE}:
            raise NotOfRows(name)
        if name in ("reshape", "pvary"):
            return operands
        return [Value(ALL, aval.dtype, name, tuple(operands), equation)]

    def _called(self, program: Any, operands: list[Any]) -> list[Any]:
        jaxpr = getattr(program, "jaxpr", program)
        return self.run(jaxpr, getattr(program, "consts", ()), operands)

    def _packed(self, equation: JaxprEqn, codes: Value) -> list[Value]:
        """Returns the arrays that store codes."""
        parts = self._parts([v.aval for v in equation.outvars])
        dtype = jnp.dtype(jnp.uint8)
        return [Value(ALL, dtype, "pack", (codes,), equation, part=part) for part in parts]

    def _unpacked(self, equation: JaxprEqn, arrays: list[Value | Sum]) -> list[Value]:
        """Returns the codes that arguments store."""
        aval: Any = equation.outvars[0].aval
        given = [a for a in arrays if isinstance(a, Value) and not a.name]
        if len(given) < len(arrays):
            raise NotOfRows("codes that are no arguments")
        parts = self._parts([v.aval for v in equation.invars])
        stored = tuple(
            Value(ALL, jnp.dtype(jnp.uint8), "stored", (a,), part=part)
            for a, part in zip(given, parts, strict=True)
        )
        return [Value(ALL, aval.dtype, "unpack", stored, equation)]

    def _parts(self, stored: Sequence[Any]) -> list[Part]:
        """Returns which bits of each code each array stores.

        Their number follows from the size of an array, so there must be no padding: the part of a
        row that any array stores has to fill bytes.
        """
        parts, first = [], 0
        for aval in stored:
            bits, rest = divmod(jax.dtypes.itemsize_bits(aval.dtype) * aval.size, self.count)
            if rest or bits not in (1, 2, 4, 8) or self.shape[-1] % 8:
                raise NotOfRows(f"codes of {self.shape} in an array of {aval.shape}")
            parts.append(Part(first, bits))
            first += bits
        return parts

    def _branch(self, equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Takes the branch for GPUs, or the one for all platforms if that is not of rows."""
        platforms = equation.params.get("branches_platforms") or ()
        branches = [*zip(equation.params["branches"], platforms, strict=bool(platforms))]
        own = [b for b, names in branches if names and "cuda" in names]
        others = [b for b, names in branches if not names]
        for branch in (*own, *others):
            try:
                return self._called(branch, operands)
            except NotOfRows:
                continue
        raise NotOfRows(equation.primitive.name)

    def _of_small(self, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Computes an equation of small arrays, and keeps what it is for a kernel."""
        name, params = equation.primitive.name, equation.params
        aval: Any = equation.outvars[0].aval
        axes = self.axes(aval.shape)
        if axes == ALL:
            if name == "iota" and len(aval.shape) == 1 and aval.dtype == self.index.dtype:
                return [self.index]
            if name == "broadcast_in_dim" and params["shape"] == self.shape:
                return [Value(ALL, aval.dtype, "copy", (self._widened(params, operands[0]),))]
            if name == "broadcast_in_dim" and operands[0].axes == NONE:
                return [Value(ALL, aval.dtype, "copy", tuple(operands))]
            if name in _EXACT | _CLOSE:
                return [Value(ALL, aval.dtype, name, tuple(operands), equation)]
            raise NotOfRows(name)
        made = equation.primitive.bind(*(o.array for o in operands), **params)
        if equation.primitive.multiple_results:
            return [self.argument(a) for a in made]
        same = name not in SHAPING or operands[0].axes in (NONE, axes)
        if name not in _EXACT | _CLOSE | SHAPING or not same or None in {o.axes for o in operands}:
            return [self.argument(made)]
        return [Value(axes, aval.dtype, name, tuple(operands), equation, made)]

    def _widened(self, params: Any, operand: Value) -> Value:
        """Returns a small array with its axes where a broadcast has them."""
        if operand.axes == NONE or operand.array is None:
            return operand
        wide = [1] * len(self.shape)
        for axis, size in zip(params["broadcast_dimensions"], operand.array.shape, strict=True):
            wide[axis] = size
        axes = self.axes(wide)
        if axes == operand.axes:
            return operand
        return Value(axes, operand.dtype, array=jnp.asarray(operand.array).reshape(wide))
