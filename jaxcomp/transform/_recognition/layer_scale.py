"""Finds products whose features are scaled after them, such as LayerScale."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxcomp.transform._program.program import scope_of
from jaxcomp.transform._program.types import Equation, Variable, is_variable
from jaxcomp.transform._recognition.pattern import Pattern
from jaxcomp.transform._recognition.unit import Codeless

Multiply = Callable[[Sequence[Array], Array, Array], Array]


@dataclasses.dataclass(frozen=True, eq=False)
class LayerScale(Codeless):
    """A matrix product, a bias or none, and a scale of each feature.

    The scale's gradient follows from that of the scaled weights, so that nothing is saved for it:
    `(x @ w + b) * s` is differentiated as `x @ (w * s) + b * s`. It reads the product's two
    operands, the bias if there is one, and the scale. In float16, `w * s` would underflow for the
    scales that training begins with, so there it is left as it is.

    Attributes:
        product: The equation of the product.
    """

    product: Equation
    kind = "scaled_linear"
    decision = "not needed"

    @property
    def saved(self) -> list[Any]:
        """The variable of the shape and dtype of what is not saved."""
        return list(self.product.outvars)

    def evaluate(self, *operands: Array) -> list[Array]:
        """Returns the result by the program's own steps, with the derivative of scaled weights."""
        product = functools.partial(lax.dot_general_p.bind, **self.product.params)
        return self.evaluate_by(lambda _, x, w: product(x, w), (), *operands)

    def evaluate_by(
        self, multiply: Multiply, code: Sequence[Array], *operands: Array
    ) -> list[Array]:
        """Returns the same, whose derivative multiplies by `multiply(code, x, w)`.

        Args:
            multiply: Returns the product of the activation and scaled weights.
            code: The arrays of the activation's code, if it has one.
            *operands: The variables' values.
        """

        @jax.custom_jvp
        def scaled(code: Sequence[Array], operands: Sequence[Array]) -> list[Array]:
            return list(self.program(*operands))

        @scaled.defjvp
        def _(primals: Any, tangents: Any) -> tuple[list[Array], list[Array]]:
            (code, operands), (_, moves) = primals, tangents
            scaled_first = functools.partial(self._scaled_first, functools.partial(multiply, code))
            with scope_of(self.product):
                _, tangent = jax.jvp(scaled_first, operands, moves)
            return list(self.program(*operands)), [tangent]

        return scaled(code, operands)

    def _scaled_first(
        self, multiply: Callable[[Array, Array], Array], x: Array, w: Array, *rest: Array
    ) -> Array:
        """Returns the same result by the weights times the scale, up to rounding."""
        *bias, scale = (jnp.ravel(values) for values in rest)
        (_, contracted), _ = self.product.params["dimension_numbers"]
        (free,) = set(range(w.ndim)) - set(contracted)
        by = lax.broadcast_in_dim(scale, w.shape, (free,))
        y = multiply(x, (w * by).astype(w.dtype))
        (out,) = self.results
        y = y.astype(out.aval.dtype)
        if not bias:
            return y
        offset = (bias[0] * scale).astype(y.dtype)
        return y + jnp.expand_dims(offset, range(y.ndim - 1))


def layer_scales(pattern: Pattern) -> Iterator[LayerScale]:
    """Returns the products of which every feature is scaled, and nothing else reads."""
    for equation in pattern.program.equations:
        if _has_features_last(equation):
            layer_scale = _layer_scale(pattern, equation)
            if layer_scale is not None:
                yield layer_scale


def _has_features_last(equation: Equation) -> bool:
    if equation.primitive.name != "dot_general":
        return False
    (_, contracted), (batch, _) = equation.params["dimension_numbers"]
    weights: Any = equation.invars[1]
    if not is_variable(weights) or weights.aval.dtype == jnp.float16:
        return False
    return not batch and weights.aval.ndim == len(contracted) + 1


def _layer_scale(pattern: Pattern, product: Equation) -> LayerScale | None:
    (value,) = product.outvars
    features: list[Any] = []
    while (reader := pattern.only_reader(value)) is not None:
        name = reader.primitive.name
        if name == "convert_element_type":
            if not jnp.issubdtype(reader.params["new_dtype"], jnp.floating):
                return None
        elif name in ("add", "mul"):
            feature = _of_features(pattern, reader, value)
            if feature is None or (name == "add" and features):
                return None
            features.append(feature)
        else:
            return None
        if name == "mul":
            operands = [*product.invars, *features]
            if not all(map(is_variable, operands)) or len({*operands}) < len(operands):
                return None
            program = pattern.slice(operands, reader.outvars, scoped=True)
            return None if program is None else LayerScale(operands, reader, program, product)
        (value,) = reader.outvars
    return None


def _of_features(pattern: Pattern, reader: Equation, value: Variable) -> Any:
    """Returns the variable of one value per feature that an equation takes too, or None."""
    others = [atom for atom in reader.invars if atom is not value]
    if len(others) != 1 or not is_variable(others[0]):
        return None
    shape = value.aval.shape
    if pattern.feature_axis(others[0], shape) != len(shape) - 1 or shape[-1] == 1:
        return None
    variable = pattern.of_features(others[0], shape[-1])
    real = jnp.issubdtype(variable.aval.dtype, jnp.floating)
    return variable if real and variable.aval.size == shape[-1] else None
