"""Finds batch norms in a program, whoever wrote them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jaxtyping import Array

from jaxcomp.codecs._codec import FLOATS
from jaxcomp.ops._norm import Norm
from jaxcomp.transform._programs import Program, avals, closed, is_variable, variables

_LAYOUT = {"broadcast_in_dim", "convert_element_type", "expand_dims", "reshape", "squeeze"}


@dataclasses.dataclass(frozen=True, eq=False)
class TracedNorm(Norm):
    """A batch norm with the formulas of a program: its results are that program's, to the bit.

    Attributes:
        of_statistics: From the input to its mean and variance.
        of_result: From the input, mean, variance and, as far as there are any, scale and bias, to
            the result.
        shapes: Shapes of mean and variance in the program.
        scaled_by: Whether `of_result` takes a scale and a bias.
    """

    of_statistics: Program = None
    of_result: Program = None
    shapes: tuple[tuple[int, ...], ...] = ()
    scaled_by: tuple[bool, bool] = (True, True)

    def statistics(self, x: Array, mask: Array | None = None) -> tuple[Array, Array]:
        """Returns the mean and the variance of each feature."""
        mean, var = jaxpr_as_fun(self.of_statistics)(x)
        return mean.reshape(-1), var.reshape(-1)

    def clip(self, var: Array) -> Array:
        """Returns the variance as it is."""
        return var

    def normalize(
        self, x: Array, mean: Array, var: Array, scale: Array | None, bias: Array | None
    ) -> Array:
        """Returns the normalised array."""
        given = [a for a, taken in zip((scale, bias), self.scaled_by, strict=True) if taken]
        of_x = [a.reshape(shape) for a, shape in zip((mean, var), self.shapes, strict=True)]
        (y,) = jaxpr_as_fun(self.of_result)(x, *of_x, *given)
        return y


@dataclasses.dataclass(frozen=True, eq=False)
class BatchNorm:
    """A batch norm of a program.

    Attributes:
        x: Variable that is normalised, with the features last.
        mean: Variable of the means.
        variance: Variable of the variances.
        scale: Variable of the scale, of shape (features,), or None.
        bias: Variable of the bias, of shape (features,), or None.
        y: Variable of the result.
        norm: Its formulas.
    """

    x: Any
    mean: Any
    variance: Any
    scale: Any
    bias: Any
    y: Any
    norm: TracedNorm


class Pattern:
    """A program as a graph, in which patterns are looked for.

    Args:
        jaxpr: The program, flat.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr = jaxpr
        self.made_by: Mapping[Any, JaxprEqn] = {
            v: e for e in jaxpr.eqns for v in e.outvars if not isinstance(v, DropVar)
        }
        self.readers: dict[Any, list[JaxprEqn]] = {}
        for equation in jaxpr.eqns:
            for value in variables(equation.invars):
                self.readers.setdefault(value, []).append(equation)
        self.results = set(variables(jaxpr.outvars))

    def made(self, atom: Any, *primitives: str) -> JaxprEqn | None:
        """The equation that makes a variable, if it is of one of these primitives."""
        equation = self.made_by.get(atom) if is_variable(atom) else None
        return equation if equation and equation.primitive.name in primitives else None

    def only_reader(self, value: Any) -> JaxprEqn | None:
        """The one equation that reads a value that is no result; None if there is no such one."""
        readers = self.readers.get(value, [])
        alone = len(readers) == 1 and value not in self.results
        return readers[0] if alone else None

    def constant(self, atom: Any) -> float | None:
        """The number that an atom is for every input; None if it is none."""
        if isinstance(atom, Literal):
            return float(atom.val) if np.ndim(atom.val) == 0 else None
        equation = self.made(atom, "sub", "add", "mul", "div", "max", *_LAYOUT)
        if equation is None or math.prod(atom.aval.shape) != 1:
            return None
        operands = [self.constant(a) for a in equation.invars]
        if any(a is None for a in operands):
            return None
        numbers: list[Any] = operands
        steps: dict[str, Callable[..., float]] = {
            "sub": lambda a, b: a - b,
            "add": lambda a, b: a + b,
            "mul": lambda a, b: a * b,
            "div": lambda a, b: a / b if b else math.nan,
            "max": max,
        }
        return steps.get(equation.primitive.name, lambda a: a)(*numbers)

    def before_casts(self, atom: Any) -> Any:
        """The variable of the same values that an array is a cast of."""
        while equation := self.made(atom, "convert_element_type"):
            if not _keeps_values(equation):
                break
            atom = equation.invars[0]
        return atom

    def of_features(self, atom: Any) -> Any:
        """The variable of one value per feature that an atom repeats, or the atom itself.

        It is of shape (features,), unless another operation makes the values in another shape.
        """
        while is_variable(atom) and atom.aval.ndim != 1 and (equation := self.made(atom, *_LAYOUT)):
            operand: Any = equation.invars[0]
            if not is_variable(operand) or not _same_last(operand.aval.shape, atom.aval.shape):
                break
            dims = equation.params.get("broadcast_dimensions")
            if dims is not None and dims[-1] != atom.aval.ndim - 1:
                break
            if operand.aval.ndim != 1 and not self.made(operand, *_LAYOUT):
                break
            atom = operand
        return atom

    def slice(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Program | None:
        """The part of the program from some variables to others; None if it reads more."""
        known = set(inputs)
        wanted, taken = list(outputs), dict[int, JaxprEqn]()
        while wanted:
            value = wanted.pop()
            if value in known:
                continue
            known.add(value)
            equation = self.made_by.get(value)
            if equation is None or equation.effects:
                return None
            taken[id(equation)] = equation
            wanted += variables(equation.invars)
        # They take the scope of the operation that evaluates them.
        nowhere = source_info_util.NameStack()
        equations = [
            e.replace(source_info=e.source_info.replace(name_stack=nowhere))
            for e in self.jaxpr.eqns
            if id(e) in taken
        ]
        part = self.jaxpr.replace(
            constvars=[],
            invars=list(inputs),
            outvars=list(outputs),
            eqns=equations,
            effects=set(),
        )
        return closed(part, [])

    # Statistics

    def _mean_of(self, atom: Any, count: int, axes: tuple[int, ...]) -> Any:
        """What an atom is the mean of over `axes`; None if it is no mean."""
        atom = self._through(atom, _LAYOUT)
        equation = self.made(atom, "div", "mul")
        if equation is None:
            return None
        total, divisor = equation.invars
        if equation.primitive.name == "mul" and self.constant(total) is not None:
            total, divisor = divisor, total
        number = self.constant(divisor)
        expected = count if equation.primitive.name == "div" else 1 / count
        if number is None or not math.isclose(number, expected, rel_tol=1e-6):
            return None
        added = self.made(self._through(total, _LAYOUT), "reduce_sum")
        return added.invars[0] if added and tuple(added.params["axes"]) == axes else None

    def _through(self, atom: Any, primitives: set[str]) -> Any:
        while equation := self.made(atom, *primitives):
            atom = equation.invars[0]
        return atom

    def _square_of(self, atom: Any) -> Any:
        """What an atom is the square of; None if it is no square."""
        atom = self._through(atom, {"convert_element_type"})
        equation = self.made(atom, "square", "integer_pow", "mul")
        if equation is None:
            return None
        name, (first, *rest) = equation.primitive.name, equation.invars
        if name == "integer_pow" and equation.params["y"] != 2:
            return None
        return first if name != "mul" or rest[0] is first else None

    def _is_mean(self, atom: Any, x: Any, count: int, axes: tuple[int, ...]) -> bool:
        return self.before_casts(self._mean_of(atom, count, axes)) is x

    def _is_variance(self, atom: Any, x: Any, count: int, axes: tuple[int, ...]) -> bool:
        """Whether an atom is the (biased) variance of `x` over `axes`."""
        is_mean = functools.partial(self._is_mean, x=x, count=count, axes=axes)
        atom = self._through(atom, _LAYOUT)
        if equation := self.made(atom, "max"):  # of rounding below 0
            numbers = [self.constant(a) for a in equation.invars]
            rest = [a for a, number in zip(equation.invars, numbers, strict=True) if number is None]
            if 0.0 not in numbers or len(rest) != 1:
                return False
            atom = self._through(rest[0], _LAYOUT)
        if equation := self.made(atom, "select_n"):  # as jnp.var, NaN without elements
            predicate, *_, atom = equation.invars
            test = self.made(predicate, "gt")
            ends = [None, None] if test is None else [self.constant(a) for a in test.invars]
            if None in ends or not ends[0] > ends[1]:  # type: ignore[operator]
                return False
        if equation := self.made(atom, "sub"):
            squares, square = equation.invars
            squared = self._square_of(self._mean_of(squares, count, axes))
            mean = self._square_of(self._through(square, _LAYOUT))
            return self.before_casts(squared) is x and mean is not None and is_mean(mean)
        centred = self.made(
            self._through(
                self._square_of(self._mean_of(atom, count, axes)), {"convert_element_type"}
            ),
            "sub",
        )
        if centred is None:
            return False
        value, mean = centred.invars
        aligned = self._is_per_feature(mean, avals([value])[0].shape)
        return aligned and self.before_casts(value) is x and is_mean(mean)

    # Norms

    def batch_norm(self, equation: JaxprEqn) -> BatchNorm | None:
        """The batch norm that begins by an equation `x - mean`; None if there is none."""
        if equation.primitive.name != "sub" or not all(map(is_variable, equation.invars)):
            return None
        out: Any
        (out,) = equation.outvars
        wide, mean = equation.invars
        shape = out.aval.shape
        if (
            avals([wide])[0].shape != shape
            or len(shape) < 2
            or not self._is_per_feature(mean, shape)
        ):
            return None
        x = self.before_casts(wide)
        axes, count = tuple(range(len(shape) - 1)), math.prod(shape[:-1])
        if not is_variable(x) or not self._is_mean(mean, x, count, axes):
            return None
        steps = self._scaled(out, shape)
        if steps is None:
            return None
        y, factors, bias = steps
        if not {a.aval.dtype.name for a in (x, out, y)}.issubset(FLOATS):
            return None  # the backward pass is in float32
        found = [(f, self._deviation(f, x, count, axes)) for f in factors]
        variances = [d for _, d in found if d is not None]
        scales = [atom for (atom, exponent), d in found if d is None and exponent == 1]
        if len(variances) != 1 or len(scales) + 1 != len(found) or len(scales) > 1:
            return None
        variance, epsilon = variances[0]
        of_x = self.of_features(mean), variance
        affine = [None if a is None else self.of_features(a) for a in (*(scales or [None]), bias)]
        if any(a is not None and a.aval.shape != shape[-1:] for a in affine):
            return None
        given = [a for a in affine if a is not None]
        of_statistics = self.slice([x], of_x)
        of_result = self.slice([x, *of_x, *given], [y])
        if of_statistics is None or of_result is None or len({x, *of_x, *given}) < 3 + len(given):
            return None
        norm = TracedNorm(
            axes,
            axes,
            epsilon,
            use_fast_variance=True,
            of_statistics=of_statistics,
            of_result=of_result,
            shapes=tuple(a.aval.shape for a in of_x),
            scaled_by=(affine[0] is not None, affine[1] is not None),
        )
        scale, bias = affine
        return BatchNorm(x, *of_x, scale, bias, y, norm)

    def _is_per_feature(self, atom: Any, shape: tuple[int, ...]) -> bool:
        """Whether an atom has one value for each feature, also before it is broadcast."""
        return is_variable(atom) and _same_last(avals([self.of_features(atom)])[0].shape, shape)

    def _scaled(self, centred: Any, shape: tuple[int, ...]) -> tuple[Any, list[Any], Any] | None:
        """The result of scaling and shifting a centred array, its factors, and the bias or None."""
        value, factors, bias = centred, list[Any](), None
        while True:
            reader = self._next(value)
            if reader is None or avals(reader.outvars)[0].shape != shape:
                break
            name = reader.primitive.name
            other = [a for a in reader.invars if a is not value]
            if name == "convert_element_type" and (bias is not None or self._ends(reader, shape)):
                value = reader.outvars[0]
                break
            if len(other) != 1 or not self._is_per_feature(other[0], shape):
                break
            if name == "mul" and bias is None:
                factors += self._factors(other[0])
            elif name == "div" and bias is None and reader.invars[0] is value:
                factors.append((other[0], -1))
            elif name == "add" and bias is None and factors:
                bias = other[0]
            else:
                break
            value = reader.outvars[0]
        return (value, factors, bias) if factors else None

    def _ends(self, cast: JaxprEqn, shape: tuple[int, ...]) -> bool:
        """Whether no bias comes after a cast."""
        reader = self._next(cast.outvars[0])
        if reader is None or reader.primitive.name != "add":
            return True
        return not any(
            self._is_per_feature(a, shape) for a in reader.invars if a is not cast.outvars[0]
        )

    def _next(self, value: Any) -> JaxprEqn | None:
        """The one equation that reads a value, but for the squares of a variance."""
        readers = [
            e
            for e in self.readers.get(value, [])
            if e.primitive.name not in ("square", "integer_pow")
            and not (e.primitive.name == "mul" and e.invars[0] is e.invars[1])
        ]
        return readers[0] if len(readers) == 1 and value not in self.results else None

    def _factors(self, atom: Any) -> list[tuple[Any, int]]:
        """The factors of a product of values per feature, each with its exponent."""
        equation = self.made(self._inside(atom), "mul", "div")
        if equation is None or not all(map(is_variable, equation.invars)):
            return [(atom, 1)]
        first, second = equation.invars
        if equation.primitive.name == "div":
            return [*self._factors(first), (second, -1)]
        return [*self._factors(first), *self._factors(second)]

    def _inside(self, atom: Any) -> Any:
        return self._through(atom, _LAYOUT)

    def _deviation(
        self, factor: tuple[Any, int], x: Any, count: int, axes: tuple[int, ...]
    ) -> tuple[Any, float] | None:
        """The variance and epsilon of a factor 1 / sqrt(variance + epsilon); None if it is none."""
        atom, exponent = factor
        equation = self.made(self._inside(atom), "rsqrt", "sqrt", "pow", "div")
        if equation is None:
            return None
        (operand, *rest), name = equation.invars, equation.primitive.name
        if name == "div" and exponent == 1 and self.constant(operand) == 1.0:
            return self._deviation((rest[0], -1), x, count, axes)
        power = {"rsqrt": -0.5, "sqrt": 0.5}.get(name)
        if name == "pow":
            power = self.constant(rest[0])
        if power is None or power * exponent != -0.5:
            return None
        added = self.made(self._inside(operand), "add")
        if added is None:
            return None
        first, second = added.invars
        epsilon = self.constant(second)
        if epsilon is None:
            first, epsilon = second, self.constant(first)
        if epsilon is None or not self._is_variance(first, x, count, axes):
            return None
        return self.of_features(first), epsilon


def _keeps_values(cast: JaxprEqn) -> bool:
    """Whether a cast is from floating-point numbers to a dtype that holds all of them."""
    (before,), (after,) = avals(cast.invars), avals(cast.outvars)
    floating = jnp.issubdtype(before.dtype, jnp.floating)
    return floating and jnp.promote_types(before.dtype, after.dtype) == after.dtype


def _same_last(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two shapes have the same last axis, and what is before it in the first is 1."""
    return bool(one) and one[-1] == other[-1] and math.prod(one[:-1]) == 1


@functools.cache
def _relu_source() -> str:
    (equation,) = jax.make_jaxpr(jax.nn.relu)(0.0).eqns
    while equation.primitive.name != "custom_jvp_call":
        (equation,) = equation.params["jaxpr"].eqns
    return str(equation.params["call_jaxpr"].jaxpr.debug_info.func_src_info)


def is_relu(equation: JaxprEqn) -> bool:
    """Whether an equation is `jax.nn.relu`, whose derivative at 0 is 0."""
    if equation.primitive.name != "custom_jvp_call":
        return False
    called = equation.params["call_jaxpr"].jaxpr
    return str(called.debug_info.func_src_info) == _relu_source()
