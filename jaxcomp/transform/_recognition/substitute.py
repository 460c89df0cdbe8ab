"""What takes the place of recognized operations in a program."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxcomp import ops
from jaxcomp._core.shard_map import vary_like
from jaxcomp.codecs import Codec, Offload, Quantize, noise
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.ops._coded_argument import coded_activation
from jaxcomp.ops._coded_array import encode_operand
from jaxcomp.ops._concatenated import Concatenated, concatenate, sum_of_parts
from jaxcomp.ops._conv import coded_convolution
from jaxcomp.ops._gate import gate
from jaxcomp.ops._linear import bilinear
from jaxcomp.ops._norm_act import Statistics, norms_act
from jaxcomp.ops._norm_act_vjp import Input
from jaxcomp.ops._norm_curve import norm_curve
from jaxcomp.ops._pooling import Window, index_codec
from jaxcomp.transform._choice.graph import Graph
from jaxcomp.transform._program.builder import Builder, hashable, key_of_step, renamed
from jaxcomp.transform._program.program import Program, avals
from jaxcomp.transform._program.types import Atom, Equation, Renaming, Variable, is_variable
from jaxcomp.transform._recognition.activations import channel_axis
from jaxcomp.transform._recognition.layer_scale import LayerScale
from jaxcomp.transform._recognition.order import ordered
from jaxcomp.transform._recognition.products import CONV, evaluate_product, feature_axes
from jaxcomp.transform._recognition.unit import (
    CodedActivation,
    Codeless,
    Concatenation,
    Gate,
    MaxPool,
    NormAct,
    NormCurve,
    Product,
    Recognized,
)

# Called with a unit, its inputs, and the result, means and variances that `norms_act` returned.
Observe = Callable[[NormAct, tuple[Input, ...], ops.CodedArray, Statistics, Statistics], None]


def with_units(
    program: Program, units: Sequence[Recognized], observe: Observe | None = None
) -> Program:
    """Returns the program with units in place of the equations that they stand for.

    Its last argument is a seed. `observe` is called while norms without smooth activations are
    traced.
    """
    steps = ordered(program, units)
    assert steps is not None

    builder = Builder()
    seed = Variable(_type_of_seed(program.arguments))
    env = builder.constants_of(program) | {v: v for v in program.arguments}
    coded: dict[Variable, _Coded] = {}
    activations = [
        recognized.unit for recognized in units if isinstance(recognized.unit, CodedActivation)
    ]
    reading = {id(e): unit.results[0] for unit in activations for e in unit.readers}
    # Seeds of codes of values count up, those of units down.
    kinds = NormAct | NormCurve | Concatenation | CodedActivation | Product
    noisy = [recognized for recognized in units if isinstance(recognized.unit, kinds)]
    drawn = builder.trace(lambda seed: noise.counted(seed, len(noisy), -1), seed)
    seeds = dict(zip(noisy, drawn, strict=True))
    codes: dict[Any, _Coded] = {}  # of what several products read
    readers = Counter(_key(r.unit, r.codec) for r in units if isinstance(r.unit, Product))
    parameters = Graph(program, set(program.arguments)).free
    for step in steps:
        unit = step.unit if isinstance(step, Recognized) else None
        if isinstance(unit, LayerScale) and reading.get(id(unit.product)) == unit.operands[0]:
            _scaled_product(builder, unit, coded[unit.operands[0]], env)
            continue
        if unit is not None and not isinstance(unit, Product):
            _take(builder, step, env, coded, seeds.get(step), observe)
            continue
        equation = step if unit is None else unit.equation
        is_read = (
            _reads_code(equation, coded)
            or (unit is None and _multiplies_code(equation, coded, parameters))
            or id(equation) in reading
        )
        x = next((a for a in equation.invars if is_variable(a) and a in coded), None)
        if is_read and x is not None:
            _with_code(builder, equation, x, coded[x], env)
        elif unit is None:
            builder.copy(equation, env)
        elif (key := _key(unit, step.codec)) is not None and readers[key] > 1:
            if key not in codes:
                codes[key] = _encoded(builder, unit, step.codec, env, seeds[step])
            _with_code(builder, equation, unit.x, codes[key], env)
        else:
            encoded = functools.partial(evaluate_product, unit, step.codec)
            operands = *renamed(env, unit.operands), seeds[step]
            (env[equation.outvars[0]],) = builder.trace(encoded, *operands, at=equation)
    arguments = [*program.arguments, seed]
    return builder.program(program, arguments, renamed(env, program.results))


def _type_of_seed(arguments: Sequence[Atom]) -> Any:
    """Returns the type of a seed that varies over all mesh axes over which an argument varies."""

    def seed(*arguments: Array) -> Array:
        return vary_like(jnp.uint32(0), arguments)

    (kind,) = avals(Program.trace(seed, *avals(arguments)).results)
    return kind


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Coded:
    """An array, or an `ops.CodedArray`, with the features last, as its arrays or their variables.

    Attributes:
        leaves: The arrays, or the variables.
        tree: Their structure.
        feature: The feature axis in the program.
        is_concatenation: Whether it is an `ops._concatenated.Concatenated`.
    """

    leaves: list[Any]
    tree: Any = dataclasses.field(metadata={"static": True})
    feature: int = dataclasses.field(metadata={"static": True})
    is_concatenation: bool = dataclasses.field(default=False, metadata={"static": True})


def _convolve(params: dict[str, Any], tree: Any, leaves: list[Array], rhs: Array) -> list[Array]:
    """Returns a convolution whose input has a code."""
    lhs: ops.CodedArray | Concatenated = jax.tree.unflatten(tree, leaves)
    last = lhs.value.ndim - 1
    numbers = params["dimension_numbers"]
    numbers = numbers._replace(lhs_spec=(0, last, *range(1, last)))
    # A library that replaces `lax.conv_general_dilated` during the user's call has acted already.
    convolve = functools.partial(
        lax.conv_general_dilated_p.bind, **params | {"dimension_numbers": numbers}
    )
    names = "window_strides", "padding", "lhs_dilation", "feature_group_count", "precision"
    options: dict[str, Any] = {name: params[name] for name in names}

    def coded(lhs: ops.CodedArray, rhs: Array) -> Array:
        return coded_convolution(
            convolve, lhs, rhs, **options, dimension_numbers=numbers, codec=lhs.codec
        )

    if isinstance(lhs, Concatenated):
        return [sum_of_parts(convolve, coded, lhs, rhs, axis=numbers.rhs_spec[1])]
    return [coded(lhs, rhs)]


def _multiply(
    params: dict[str, Any], first: bool, x: _Coded, leaves: list[Array], other: Array
) -> list[Array]:
    """Returns a product of which one operand has a code, the first or the second."""
    operand = jax.tree.unflatten(x.tree, leaves)

    def product(value: Array, other: Array) -> Array:
        value = jnp.moveaxis(value, -1, x.feature)
        return lax.dot_general_p.bind(*((value, other) if first else (other, value)), **params)

    return [bilinear(product, operand.codec, operand.value, other, None, code=operand.code)]


def _scaled_product(builder: Builder, unit: LayerScale, x: _Coded, env: Renaming) -> None:
    """Adds a product with a scale of its features, of an activation that has a code."""

    def multiply(leaves: Sequence[Array], value: Array, weights: Array) -> Array:
        operand: ops.CodedArray = jax.tree.unflatten(x.tree, leaves)
        moved = dataclasses.replace(operand, value=jnp.moveaxis(value, x.feature, -1))
        coded = dataclasses.replace(x, leaves=jax.tree.leaves(moved))
        (y,) = _multiply(unit.product.params, True, coded, coded.leaves, weights)
        return y

    def scaled(leaves: list[Array], *operands: Array) -> list[Array]:
        return unit.evaluate_by(multiply, leaves, *operands)

    (env[unit.results[0]],) = builder.trace(scaled, x.leaves, *renamed(env, unit.operands))


def _reads_code(equation: Equation, coded: dict[Variable, _Coded]) -> bool:
    """Returns whether it is a convolution whose input has a code."""
    if equation.primitive.name != "conv_general_dilated":
        return False
    lhs, rhs = equation.invars
    if lhs not in coded or rhs in coded:
        return False
    return channel_axis(equation) == coded[lhs].feature


def _multiplies_code(
    equation: Equation, coded: dict[Variable, _Coded], parameters: set[Any]
) -> bool:
    """Returns whether it sums products of a parameter and an array that has a code, by feature."""
    if equation.primitive.name != "dot_general":
        return False
    operands: list[Any] = list(equation.invars)
    contracted, _ = equation.params["dimension_numbers"]
    return any(
        x in coded
        and not coded[x].is_concatenation
        and other in parameters
        and axes == (coded[x].feature,)
        for x, other, axes in zip(operands, reversed(operands), contracted, strict=True)
    )


def _with_code(
    builder: Builder, equation: Equation, x: Variable, coded: _Coded, env: Renaming
) -> None:
    """Adds a product of which one operand has a code."""
    position = equation.invars.index(x)
    other: Any = equation.invars[1 - position]
    if equation.primitive.name == "conv_general_dilated":
        function = functools.partial(_convolve, equation.params, coded.tree)
    else:
        function = functools.partial(_multiply, equation.params, position == 0, coded)
    operands = coded.leaves, *renamed(env, [other])
    equal = key_of_step(equation)
    key = equal and (equal, position, coded.tree, coded.feature)
    (env[equation.outvars[0]],) = builder.trace(function, *operands, at=equation, key=key)


def _key(unit: Product, codec: Codec | None) -> Hashable | None:
    """Returns what is equal for products that may read the same code of the same activation."""
    feature, *others = feature_axes(unit)
    is_plain = unit.kind != CONV or channel_axis(unit.equation) == feature
    is_elementwise = codec is not None and isinstance(inner_codec(codec), Quantize)
    return (unit.x, codec, feature) if is_elementwise and is_plain and not others else None


def _encoded(builder: Builder, unit: Product, codec: Codec, env: Renaming, seed: Atom) -> _Coded:
    """Adds the code of an activation that several products read."""
    (feature,) = feature_axes(unit)

    def encode(x: Array, seed: Array) -> _Coded:
        code = encode_operand(jnp.moveaxis(x, feature, -1), codec, seed)
        return _Coded(*jax.tree.flatten(code), feature)

    encoded: _Coded = builder.trace(encode, env[unit.x], seed, at=unit.equation)
    return encoded


def _take(
    builder: Builder,
    step: Recognized,
    env: Renaming,
    coded: dict[Variable, _Coded],
    seed: Atom | None,
    observe: Observe | None,
) -> None:
    """Adds a unit, and sets its results."""
    unit, codec = step.unit, step.codec
    if isinstance(unit, Codeless):
        operands = renamed(env, unit.operands)
        (env[unit.results[0]],) = builder.trace(unit.evaluate, *operands)
        return
    assert codec is not None
    if isinstance(unit, MaxPool):
        _pool(builder, unit, codec, env)
    elif isinstance(unit, Gate):
        _gate(builder, unit, env, coded)
    elif isinstance(unit, Concatenation):
        _concatenation(builder, unit, codec, env, coded, seed)
    elif isinstance(unit, CodedActivation):
        _activation(builder, unit, codec, env, coded, seed)
    elif isinstance(unit, NormAct):
        _norm_act(builder, unit, codec, env, coded, seed, observe)
    elif isinstance(unit, NormCurve):
        _norm_curve(builder, unit, codec, env, coded, seed)


def _pool(builder: Builder, unit: MaxPool, codec: Codec, env: Renaming) -> None:
    indices: Codec = index_codec(unit.pool[0])
    if isinstance(codec, Offload):
        indices = dataclasses.replace(codec, codec=indices)

    def pooled(x: Array) -> list[Array]:
        y = ops.max_pool(jnp.moveaxis(x, unit.feature, -1), *unit.pool, codec=indices)
        return [jnp.moveaxis(y, -1, unit.feature)]

    (x,), (out,) = renamed(env, unit.operands), unit.results
    (env[out],) = builder.trace(pooled, x, at=unit.origin)


def _gate(builder: Builder, unit: Gate, env: Renaming, coded: dict[Variable, _Coded]) -> None:
    x = coded[unit.x]

    def gated(leaves: list[Array], factor: Array) -> tuple[ops.CodedArray, list[Array]]:
        whole = jax.tree.unflatten(x.tree, leaves)
        return gate(whole, jnp.moveaxis(factor, x.feature, -1)), []

    operands = x.leaves, env[unit.factor]
    _set(builder, unit, gated, operands, x.feature, env, coded)


def _concatenation(
    builder: Builder,
    unit: Concatenation,
    codec: Codec,
    env: Renaming,
    coded: dict[Variable, _Coded],
    seed: Atom | None,
) -> None:
    # Another unit may have encoded the rest for what reads it, with other features.
    parts = [None if x in unit.saved else coded[x] for x in unit.operands]

    def joined(arrays: list[Any], seed: Array) -> tuple[Concatenated, list[Array]]:
        operands = [
            jnp.moveaxis(array, unit.feature, -1)
            if part is None
            else jax.tree.unflatten(part.tree, array)
            for part, array in zip(parts, arrays, strict=True)
        ]
        return concatenate(operands, codec, seed), []

    arrays = [
        env[x] if part is None else part.leaves
        for x, part in zip(unit.operands, parts, strict=True)
    ]
    _set(builder, unit, joined, (arrays, seed), unit.feature, env, coded)


def _activation(
    builder: Builder,
    unit: CodedActivation,
    codec: Codec,
    env: Renaming,
    coded: dict[Variable, _Coded],
    seed: Atom | None,
) -> None:
    function = _with_features_last(unit.program, unit.feature)

    def made(operands: list[Array], seed: Array) -> tuple[ops.CodedArray, list[Array]]:
        operands = [jnp.moveaxis(x, unit.feature, -1) for x in operands]
        return coded_activation(operands, unit.curve, function, codec, seed), []

    _set(builder, unit, made, (renamed(env, unit.operands), seed), unit.feature, env, coded)


def _with_features_last(program: Program, feature: int) -> Callable[..., Array]:
    def function(*operands: Array) -> Array:
        (y,) = program(*(jnp.moveaxis(x, -1, feature) for x in operands))
        return jnp.moveaxis(y, feature, -1)

    return function


def _norm_act(
    builder: Builder,
    unit: NormAct,
    codec: Codec,
    env: Renaming,
    coded: dict[Variable, _Coded],
    seed: Atom | None,
    observe: Observe | None,
) -> None:
    operands_of_norms = [
        [None if v is None else env[v] for v in (n.x, n.scale, n.bias)] for n in unit.norms
    ]
    before = coded.get(unit.residual)
    if before is not None and before.feature != unit.feature:
        before = None
    residual = None if unit.residual is None else env[unit.residual]

    def evaluated(
        operands_of_norms: list[Any], residual: Any, seed: Array
    ) -> tuple[ops.CodedArray, list[Array]]:
        if before is not None:
            added = jax.tree.unflatten(before.tree, residual)
        else:
            added = None if residual is None else jnp.moveaxis(residual, unit.feature, -1)
        return _evaluate(unit, codec, operands_of_norms, added, seed, observe)

    operands = operands_of_norms, residual if before is None else before.leaves, seed
    norms, tree = tuple(norm.norm for norm in unit.norms), None if before is None else before.tree
    shapes = tuple(v.aval.shape for v in unit.results[1:])
    alike = norms, unit.relu, unit.pool, unit.feature, codec, tree, shapes
    key = hashable(alike) if observe is None else None  # each unit is observed
    _set(builder, unit, evaluated, operands, unit.feature, env, coded, key=key)


def _norm_curve(
    builder: Builder,
    unit: NormCurve,
    codec: Codec,
    env: Renaming,
    coded: dict[Variable, _Coded],
    seed: Atom | None,
) -> None:
    activation = _with_features_last(unit.activation.program, unit.feature)

    def made(x: Array, parameters: tuple[Array, ...], seed: Array) -> Any:
        x = jnp.moveaxis(x, unit.feature, -1)
        norm, curve = unit.norm.norm, unit.activation.curve
        result, x_with_code, *statistics = norm_curve(
            norm, x, parameters, curve, activation, codec, seed
        )
        return result, statistics, x_with_code

    x, *parameters = renamed(env, unit.operands)
    operands = x, tuple(parameters), seed
    _set(builder, unit, made, operands, unit.feature, env, coded, also=[unit.norm.x])


def _set(
    builder: Builder,
    unit: NormAct | NormCurve | Gate | Concatenation | CodedActivation,
    function: Callable[..., tuple[Any, ...]],
    operands: Sequence[Any],
    feature: int,
    env: Renaming,
    coded: dict[Variable, _Coded],
    also: Sequence[Variable] = (),
    key: Hashable | None = None,
) -> None:
    """Adds a function that makes a unit's results.

    It returns the result, features last, a list of the unit's other results, and then the
    variables in `also`, features last and with codes. With a key, it is traced once for all units
    of equal keys.
    """

    def run(*operands: Any) -> tuple[list[Array], list[_Coded | None]]:
        result, others, *of_operands = function(*operands)
        with_codes = [
            _Coded(*jax.tree.flatten(x), feature, isinstance(x, Concatenated))
            if _has_code(x)
            else None
            for x in (result, *of_operands)
        ]
        return [jnp.moveaxis(result.value, -1, feature), *others], with_codes

    results, with_codes = builder.trace(run, *operands, at=unit.origin, key=key)
    env.update(zip(unit.results, results, strict=True))
    for value, with_code in zip((unit.results[0], *also), with_codes, strict=True):
        if with_code is not None:
            coded.setdefault(value, with_code)


def _has_code(result: ops.CodedArray | Concatenated) -> bool:
    return isinstance(result, Concatenated) or result.code is not None


def _evaluate(
    unit: NormAct,
    codec: Codec,
    operands_of_norms: list[Any],
    residual: Any,
    seed: Array,
    observe: Observe | None,
) -> tuple[ops.CodedArray, list[Array]]:
    """Returns the unit's result, and the mean and variance of each of its norms."""
    inputs = tuple(_input(unit.feature, *arrays) for arrays in operands_of_norms)
    norms = tuple(norm.norm for norm in unit.norms)
    window = None if unit.pool is None else Window(inputs[0].x.shape, *unit.pool)
    result, means, variances = norms_act(norms, inputs, residual, unit.relu, window, codec, seed)
    if observe is not None:
        observe(unit, inputs, result, means, variances)
    statistics = [a for pair in zip(means, variances, strict=True) for a in pair]
    shapes = [v.aval.shape for n in unit.norms for v in (n.mean, n.variance)]
    return result, [a.reshape(shape) for a, shape in zip(statistics, shapes, strict=True)]


def _input(feature: int, x: Array, scale: Array | None, bias: Array | None) -> Input:
    x = jnp.moveaxis(x, feature, -1)
    features = x.shape[-1:]
    return Input(
        x,
        jnp.ones(features) if scale is None else scale.reshape(features),
        jnp.zeros(features) if bias is None else bias.reshape(features),
    )
