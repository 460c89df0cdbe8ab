"""Finds products of an activation and a parameter: convolutions and linear layers."""

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import cast

import jax.numpy as jnp
from jaxtyping import Array

from jaxcomp.codecs import Codec
from jaxcomp.codecs._codec import FLOATS
from jaxcomp.ops._conv import coded_convolution
from jaxcomp.ops._linear import bilinear, gradient_of_layer
from jaxcomp.policies._value import dtype_name
from jaxcomp.transform._choice.graph import Graph
from jaxcomp.transform._program.program import Program, variables
from jaxcomp.transform._program.types import Atom, Equation, Variable, is_variable
from jaxcomp.transform._recognition.unit import Product

CONV, DOT = "conv", "dot"


def products(program: Program, coded: Collection[int]) -> Iterator[Product]:
    """Returns the products of which one operand follows from held arguments, and the other not.

    A kernel may be normalized. If what is multiplied by it follows from held arguments by such
    steps, too, either may be the kernel, and the product is left out.

    Args:
        program: The program.
        coded: The arguments that are not held.
    """
    held = {v for i, v in enumerate(program.arguments) if i not in coded}
    graph = Graph(program, held)
    for equation in program.equations:
        kind = _kind(equation)
        if kind is None:
            continue
        x, kernel = equation.invars[:2]
        pairs = [(x, kernel), (kernel, x)] if kind == DOT else [(x, kernel)]
        for x, kernel in pairs:
            if is_variable(x) and _is_float(x) and _is_parameter(graph, kernel, beside=x):
                yield Product(kind, x, kernel, equation)
                break


def made_for_kernels(program: Program, found: Iterable[Product]) -> set[Variable]:
    """Returns the values that kernels of products are made of, as by weight standardization."""
    made: set[Variable] = set()
    pending = [product.kernel for product in found]
    while pending:
        value = pending.pop()
        if value not in made and value in program.made_by:
            made.add(value)
            pending += variables(program.made_by[value].invars)
    return made


def _is_parameter(graph: Graph, kernel: Atom, beside: Variable) -> bool:
    """Returns whether one operand of a product follows from what is held, and the other not."""
    return is_variable(kernel) and any(
        kernel in made and beside not in made for made in (graph.free, graph.derived)
    )


def features_last(product: Product, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape in which a codec sees an activation: with one axis of features, the last.

    The features are those over which a linear layer sums, or the channels of a convolution.
    """
    features = feature_axes(product)
    others = [size for axis, size in enumerate(shape) if axis not in features]
    return *others, math.prod(shape[axis] for axis in features)


def evaluate_product(
    product: Product, codec: Codec, x: Array, kernel: Array, seed: Array
) -> list[Array]:
    """Returns the result of a product, whose backward pass reads the activation's code.

    The function is that of the program: a library that replaces JAX's during the user's call has
    acted already.
    """
    stock = functools.partial(product.equation.primitive.bind, **product.equation.params)
    params = product.equation.params
    if product.kind == CONV:
        names = "window_strides", "padding", "lhs_dilation", "dimension_numbers", "precision"
        options = {name: params[name] for name in (*names, "feature_group_count")}
        return [coded_convolution(stock, x, kernel, **options, codec=codec, seed=seed)]
    is_first = product.x is product.equation.invars[0]
    gradient = None
    if is_first:
        numbers = params["dimension_numbers"]
        gradient = gradient_of_layer(codec, x, kernel, numbers, params["precision"])
    axes = feature_axes(product)
    last = tuple(range(x.ndim - len(axes), x.ndim))
    features = tuple(x.shape[axis] for axis in axes)

    def multiply(rows: Array, kernel: Array) -> Array:
        x = jnp.moveaxis(rows.reshape(*rows.shape[:-1], *features), last, axes)
        return cast(Array, stock(*((x, kernel) if is_first else (kernel, x))))

    rows = jnp.moveaxis(x, axes, last).reshape(features_last(product, x.shape))
    return [bilinear(multiply, codec, rows, kernel, seed, weight_gradient=gradient)]


def feature_axes(product: Product) -> tuple[int, ...]:
    """Returns the axes of an activation over which a product sums, all or those of channels."""
    params = product.equation.params
    if product.kind == CONV:
        return (params["dimension_numbers"].lhs_spec[1],)
    contracted, _ = params["dimension_numbers"]
    return tuple(contracted[0 if product.x is product.equation.invars[0] else 1])


def _kind(equation: Equation) -> str | None:
    params = equation.params
    if equation.primitive.name == "conv_general_dilated":
        return CONV if params["batch_group_count"] == 1 else None
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return DOT if contracted else None
    return None


def _is_float(value: Variable) -> bool:
    return dtype_name(value.aval.dtype) in FLOATS
