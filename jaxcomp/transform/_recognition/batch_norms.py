"""Finds batch norms in a program, whoever wrote them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxcomp._core.shard_map import match_varying, vary
from jaxcomp.codecs._codec import FLOATS
from jaxcomp.ops._norm import Norm
from jaxcomp.transform._program.program import Program, apply, avals, evaluate
from jaxcomp.transform._program.types import Atom, Equation, Variable, is_variable
from jaxcomp.transform._recognition.beginnings import beginning
from jaxcomp.transform._recognition.factors import layout_of, leaves
from jaxcomp.transform._recognition.means import Means
from jaxcomp.transform._recognition.norms import Centred, Power
from jaxcomp.transform._recognition.pattern import Pattern


@dataclasses.dataclass(frozen=True, eq=False)
class TracedNorm(Norm):
    """A batch norm with the formulas of a program: its results are that program's, to the bit.

    Its arrays have the features last.

    Attributes:
        feature: The feature axis in the program.
        of_statistics: From the input to its mean and variance.
        of_result: From the input, mean, variance and, as far as there are any, scale and bias, to
            the result.
        shapes: Shapes of mean, variance, and, as far as there are any, scale and bias.
        scaled_by: Whether `of_result` takes a scale and a bias.
    """

    feature: int = -1
    of_statistics: Program = dataclasses.field(kw_only=True)
    of_result: Program = dataclasses.field(kw_only=True)
    shapes: tuple[tuple[int, ...], ...] = ()
    scaled_by: tuple[bool, bool] = (True, True)

    def statistics(self, x: Array, mask: Array | None = None) -> tuple[Array, Array]:
        """Returns the mean and the variance of each feature."""
        mean, var = evaluated(self.of_statistics, [jnp.moveaxis(x, -1, self.feature)])
        return mean.reshape(-1), var.reshape(-1)

    def clip(self, var: Array) -> Array:
        """Returns the variance as it is."""
        return var

    def normalize(
        self, x: Array, mean: Array, var: Array, scale: Array | None, bias: Array | None
    ) -> Array:
        """Returns the normalised array."""
        affine: Any = zip((scale, bias), self.scaled_by, strict=True)
        parameters = [a for a, taken in affine if taken]
        of_x = [a.reshape(s) for a, s in zip((mean, var, *parameters), self.shapes, strict=True)]
        (y,) = evaluated(self.of_result, [jnp.moveaxis(x, -1, self.feature), *of_x])
        return jnp.moveaxis(y, self.feature, -1)


def evaluated(program: Program, arguments: Sequence[Array]) -> list[Array]:
    """Returns a program's results.

    Its arguments may vary over more mesh axes than they do in it.
    """

    def step(equation: Equation, operands: list[Array]) -> list[Any]:
        if equation.primitive.name == "pvary":
            return [vary(operands[0], equation.params["axes"])]
        return apply(equation, match_varying(operands))

    return evaluate(program, arguments, step)


@dataclasses.dataclass(frozen=True, eq=False)
class BatchNorm:
    """A batch norm of a program.

    Attributes:
        x: Variable that is normalised.
        mean: Variable of the means.
        variance: Variable of the variances.
        scale: Variable of the scale, of one value per feature, or None.
        bias: Variable of the bias, of one value per feature, or None.
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


@dataclasses.dataclass(frozen=True)
class _Search(Centred):
    """Looks for the batch norm of an array and its mean.

    Attributes:
        feature: The feature axis.
    """

    feature: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `x`."""
        return self.means.shape

    def is_per_feature(self, atom: Atom) -> bool:
        """Returns whether an atom has one value for each feature."""
        return self.pattern.feature_axis(atom, self.shape) == self.feature

    def of_features(self, atom: Atom) -> Any:
        """Returns the variable of these values."""
        return self.pattern.of_features(atom, self.shape[self.feature])

    def scaled(
        self, value: Variable, factors: list[Power], bias: Atom | None
    ) -> tuple[Any, list[Power], Any] | None:
        """Returns the scaled and shifted result of a centred array, its factors and its bias.

        Args:
            value: The array, which may be scaled and shifted already.
            factors: What it is scaled by.
            bias: What it is shifted by, or None.
        """
        while True:
            reader = self.next(value)
            if reader is None or avals(reader.outvars)[0].shape != self.shape:
                break
            name = reader.primitive.name
            other = [a for a in reader.invars if a is not value]
            if name == "convert_element_type" and (bias is not None or self._ends(reader)):
                value = reader.outvars[0]
                break
            if len(other) != 1 or not self.is_per_feature(other[0]):
                break
            if name == "mul" and bias is None:
                factors = [*factors, *self.factors(other[0])]
            elif name == "div" and bias is None and reader.invars[0] is value:
                factors = [*factors, (other[0], -1)]
            elif name == "add" and bias is None and factors:
                bias = other[0]
            else:
                break
            value = reader.outvars[0]
        return (value, factors, bias) if factors else None

    def _ends(self, cast: Equation) -> bool:
        """Returns whether no bias comes after a cast."""
        reader = self.next(cast.outvars[0])
        if reader is None or reader.primitive.name != "add":
            return True
        return not any(self.is_per_feature(a) for a in reader.invars if a is not cast.outvars[0])


def batch_norm(pattern: Pattern, equation: Equation) -> BatchNorm | None:
    """Returns the batch norm that begins by an equation; None if there is none."""
    begins = beginning(pattern, equation)
    if begins is None:
        return None
    wide, mean, out = begins.x, begins.mean, begins.value
    shape = out.aval.shape
    of_feature = mean if begins.factor is None else begins.factor
    feature = None if len(shape) < 2 else pattern.feature_axis(of_feature, shape)
    if not feature or 0 in shape or wide.aval.shape != shape:  # axis 0 is the batch
        return None
    x = pattern.before_casts(wide)
    means = Means(pattern, layout_of(shape))
    statistics = means.mean(mean)
    if (
        statistics is None
        or leaves(means.layout[feature]) != list(statistics.kept)
        or len(statistics.axis_names) > 1
        or not is_variable(x)
    ):
        return None
    statistics = dataclasses.replace(statistics, of=pattern.before_casts(statistics.of))
    if statistics.of is not x:
        return None
    search = _Search(pattern, means, statistics, feature)
    factors = [] if begins.factor is None else search.factors(begins.factor)
    scaled = search.scaled(out, factors, begins.bias)
    if scaled is None:
        return None
    y, factors, bias = scaled
    if not {a.aval.dtype.name for a in (x, out, y)}.issubset(FLOATS):
        return None  # the backward pass is in float32
    deviations = [(factor, search.deviation(factor)) for factor in factors]
    variances = [d for _, d in deviations if d is not None]
    scales = [atom for (atom, exponent), d in deviations if d is None and exponent == 1]
    if len(variances) != 1 or len(scales) + 1 != len(deviations) or len(scales) > 1:
        return None
    variance, epsilon = variances[0]
    of_x = search.of_features(mean), search.of_features(variance)
    scale = search.of_features(scales[0]) if scales else None
    bias = None if bias is None else search.of_features(bias)
    parameters = [a for a in (scale, bias) if a is not None]
    if any(a.aval.size != shape[feature] for a in (*of_x, *parameters)):
        return None
    of_statistics = pattern.slice([x], of_x)
    of_result = pattern.slice([x, *of_x, *parameters], [y])
    if (
        of_statistics is None
        or of_result is None
        or len({x, *of_x, *parameters}) < 3 + len(parameters)
    ):
        return None
    axes = tuple(range(len(shape) - 1))
    norm = TracedNorm(
        axes,
        axes,
        epsilon,
        use_fast_variance=True,
        axis_name=next(iter(statistics.axis_names), None),
        axis_index_groups=statistics.axis_index_groups,
        feature=feature,
        of_statistics=of_statistics,
        of_result=of_result,
        shapes=tuple(a.aval.shape for a in (*of_x, *parameters)),
        scaled_by=(scale is not None, bias is not None),
    )
    return BatchNorm(x, *of_x, scale, bias, y, norm)
