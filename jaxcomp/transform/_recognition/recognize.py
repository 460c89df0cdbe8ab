"""Stock operations of a program that are recognized."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxcomp.codecs import Codec, Packed, SignAware
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.policies._policy import Policy
from jaxcomp.policies._rule import Rule
from jaxcomp.transform._choice.context import Context
from jaxcomp.transform._program.origins import module_path
from jaxcomp.transform._program.primitives import tangents_of
from jaxcomp.transform._program.program import Program, avals
from jaxcomp.transform._program.types import Equation, Variable, is_variable
from jaxcomp.transform._recognition.activations import (
    activation_of,
    coded_activations,
    gate_of,
    is_relu,
    relu_of,
)
from jaxcomp.transform._recognition.attention import Attention, attentions
from jaxcomp.transform._recognition.batch_norms import BatchNorm, TracedNorm, batch_norm
from jaxcomp.transform._recognition.concatenations import concatenations
from jaxcomp.transform._recognition.curved_norms import curved_norm
from jaxcomp.transform._recognition.layer_scale import LayerScale, layer_scales
from jaxcomp.transform._recognition.order import ordered
from jaxcomp.transform._recognition.pattern import Labels, Pattern, relabelled
from jaxcomp.transform._recognition.products import (
    CONV,
    DOT,
    features_last,
    made_for_kernels,
    products,
)
from jaxcomp.transform._recognition.unit import (
    Activation,
    Codeless,
    MaxPool,
    NormAct,
    NormCurve,
    Product,
    Recognized,
    Unit,
)

# What finds operations that save no code.
CODELESS: dict[type[Codeless], Callable[[Pattern], Iterable[Codeless]]] = {
    Attention: attentions,
    LayerScale: layer_scales,
}
# Of these kinds a policy's rules with `op` match stock operations, too.
KINDS = (NormAct.kind, MaxPool.kind, CONV, DOT, *(unit.kind for unit in CODELESS))
_LARGEST_WINDOW = 256


def recognize(
    program: Program, active: Sequence[int], coded: Collection[int], context: Context
) -> list[Recognized]:
    """Returns the units of a flat program that the policy has a codec for; `context` takes note.

    Args:
        program: The program.
        active: The arguments that are differentiated.
        coded: The arguments that the policy may store in another form.
        context: The policy.
    """
    if not isinstance(context.policy, Policy):
        return []
    if not any(isinstance(rule.action, Codec) for rule in context.policy.rules):
        context.notes.matched.update(
            rule for rule in context.policy.rules if is_for_units(rule)
        )  # all is kept
        return _large_attentions(program, active, context) if context.is_region_body else []
    pattern = Pattern(program)
    reached = tangents_of(program.equations, [program.arguments[i] for i in active])
    units: list[Recognized] = []
    rules: dict[Recognized, Rule] = {}
    pooled: set[int] = set()  # by a pool that belongs to a norm
    of_parameters = list(products(program, coded))
    of_kernels = made_for_kernels(program, of_parameters)
    for unit in (*_units(pattern), *of_parameters):
        if reached.isdisjoint(unit.operands) or id(unit.equation) in pooled:
            continue
        if not of_kernels.isdisjoint(unit.equation.outvars):
            continue  # the backward pass has it from the parameters
        path = module_path(unit.origin)
        codeless = isinstance(unit, Codeless)
        rule = next(
            (
                r
                for r in context.policy.rules
                if r.op
                and r.matches_layer(path, unit.kind)
                and not (codeless and isinstance(r.action, Codec))
            ),
            None,
        )
        if codeless:
            if rule is None:
                units.append(Recognized(unit, None))
            else:
                context.notes.matched.add(rule)
        elif isinstance(unit, Product) and unit.kernel not in reached:
            context.notes.matched.update([] if rule is None else [rule])  # it saves nothing
        elif rule is not None and isinstance(rule.action, Codec) and _fits(unit, rule, context):
            units.append(Recognized(unit, rule.action))
            rules[units[-1]] = rule
            if isinstance(unit, NormAct):
                pooled.add(id(unit.pooled_by))
    taken = {id(recognized.unit.equation) for recognized in units}
    for activation, codec in coded_activations(pattern, reached, context):
        if id(activation.equation) not in taken:
            taken.add(id(activation.equation))  # silu(a) * gelu(b) is a gate of each
            units.append(Recognized(activation, codec))
    units = _without_cycles(program, units)
    units = _with_gates(program, units)
    units += concatenations(pattern, units, reached, context)
    context.notes.matched.update(rules[recognized] for recognized in units if recognized in rules)
    return units


def _large_attentions(
    program: Program, active: Sequence[int], context: Context
) -> list[Recognized]:
    """Returns the attentions that are evaluated in slices."""
    reached = tangents_of(program.equations, [program.arguments[i] for i in active])
    limits, units = context.limits, []
    for unit in attentions(Pattern(program)):
        if unit.is_sliced(reached, limits):
            forward = 4 * unit.scores.aval.size >= limits.forward_nbytes
            units.append(Recognized(dataclasses.replace(unit, slices_forward=forward), None))
    return _without_cycles(program, units)


def _with_gates(program: Program, units: list[Recognized]) -> list[Recognized]:
    """Returns the units and the gates of what they encode."""
    coded = [
        (recognized.unit, recognized.codec)
        for recognized in units
        if isinstance(recognized.unit, NormAct | NormCurve) and recognized.unit.is_coded
    ]
    by = {unit.equation.outvars[0]: codec for unit, codec in coded}
    features = {unit.equation.outvars[0]: unit.feature for unit, _ in coded}
    gates = [g for e in program.equations if (g := gate_of(e, features)) is not None]
    return [*units, *(Recognized(g, by[g.x]) for g in gates)]


def _without_cycles(program: Program, units: list[Recognized]) -> list[Recognized]:
    """Returns the units but for those that read what is computed from their own results.

    An example is a skip connection that is scaled by the norm's variance.
    """
    if ordered(program, units) is not None:
        return units
    acyclic: list[Recognized] = []
    for recognized in units:
        if ordered(program, [*acyclic, recognized]) is not None:
            acyclic.append(recognized)
    return acyclic


def is_for_units(rule: Rule, kinds: Collection[str] = KINDS) -> bool:
    """Returns whether a rule names stock operations, of some kinds, that are recognized."""
    anywhere = dataclasses.replace(rule, path="")
    return bool(rule.op) and any(anywhere.matches_layer("", kind) for kind in kinds)


def _fits(unit: Unit, rule: Rule, context: Context) -> bool:
    """Returns whether the codec of a rule can store for a unit."""
    assert isinstance(rule.action, Codec)
    by = inner_codec(rule.action)
    if isinstance(unit, Product):
        return unit.kind in by.kinds and _can_store(unit, rule, context)
    if unit.kind == "max_pool":
        return isinstance(by, Packed)
    if not isinstance(by, SignAware):
        return False
    ranges = isinstance(unit, NormCurve) or by.scale_source == "range"
    return len(unit.operands[0].aval.shape) > 2 or not ranges


def _can_store(unit: Product, rule: Rule, context: Context) -> bool:
    """Returns whether a rule's codec can store an activation with its features last.

    It need not store that of each product, such as that of a low rank. `context` takes note.
    """
    assert isinstance(rule.action, Codec)
    (x,) = avals(unit.saved)
    try:
        rule.action.check(features_last(unit, x.shape), x.dtype)
    except (TypeError, ValueError) as error:
        where = module_path(unit.origin) or unit.kind
        context.notes.unfit.setdefault(rule, type(error)(f"{rule} matches {where}: {error}"))
        return False
    return True


def _units(pattern: Pattern) -> list[Unit]:
    units: list[Unit] = []
    norms: list[BatchNorm] = []
    for equation in pattern.program.equations:
        norm = batch_norm(pattern, equation)
        curved = _norm_curve(pattern, equation, norm)
        if curved is not None:
            units.append(curved)
        elif norm is not None:
            norms.append(norm)
    by_result = {n.y: n for n in norms}
    done: set[Any] = set()
    for norm in norms:
        if norm.y not in done:
            unit = _unit(pattern, norm, by_result)
            done.update(n.y for n in unit.norms)
            units.append(unit)
    pools = [e for e in pattern.program.equations if e.primitive.name == "reduce_window_max"]
    for equation in pools:
        axes: Labels = list(range(len(equation.params["window_dimensions"])))
        for feature in (len(axes) - 1, 1):
            pool = _pool(equation, axes, feature)
            if pool is not None:
                units.append(MaxPool(pool, equation, feature))
                break
    return [*units, *(unit for find in CODELESS.values() for unit in find(pattern))]


def _norm_curve(
    pattern: Pattern, equation: Equation, batch_norm: BatchNorm | None
) -> NormCurve | None:
    """Returns the norm that begins by an equation, and its activation function, if it has one.

    A batch norm with a ReLU is a `NormAct`.
    """

    def activation(value: Variable) -> Activation | None:
        relu = relu_of(pattern, value) if batch_norm is None else None
        return relu or activation_of(pattern, value)

    found = curved_norm(pattern, equation, activation)
    return None if found is None else NormCurve(*found, pattern.made_by[found[0].y])


def _unit(pattern: Pattern, norm: BatchNorm, norms: dict[Variable, BatchNorm]) -> NormAct:
    """Returns the unit that begins with a norm."""
    origin = pattern.made_by[norm.y]
    alone = NormAct((norm,), None, False, None, origin, origin)
    reader = pattern.only_reader(norm.y)
    if reader is None:
        return alone
    if is_relu(reader):
        return _with_pool(pattern, NormAct((norm,), None, True, None, reader, origin))
    if reader.primitive.name != "add":
        return alone
    others = [a for a in reader.invars if a is not norm.y]
    relu = pattern.only_reader(reader.outvars[0])
    if len(others) != 1 or relu is None or not is_relu(relu):
        return alone
    (other,) = others
    if not is_variable(other) or other.aval != norm.y.aval:
        return alone
    second = norms.get(other)
    if second is not None and pattern.only_reader(other) is reader:
        if _alike(second.norm, norm.norm) and second.x.aval == norm.x.aval:
            return NormAct((norm, second), None, True, None, relu, origin)
        return alone
    return NormAct((norm,), other, True, None, relu, origin)


def _alike(first: TracedNorm, second: TracedNorm) -> bool:
    """Returns whether norms differ in nothing but how they compute."""
    names = "epsilon", "feature", "axis_name", "axis_index_groups"
    return all(getattr(first, name) == getattr(second, name) for name in names)


def _with_pool(pattern: Pattern, unit: NormAct) -> NormAct:
    """Returns the unit with the max pool that alone reads its result, if there is one.

    The axes may be moved before the pool and back after it, as in Equinox.
    """
    value: Any = unit.equation.outvars[0]
    axes: Labels = list(range(value.aval.ndim))
    labels: Labels | None = axes
    pool, pooled_by = None, None
    while labels is not None and (reader := pattern.only_reader(value)) is not None:
        before, value = value, reader.outvars[0]
        name = reader.primitive.name
        if name == "reduce_window_max" and pool is None:
            pool, pooled_by = _pool(reader, labels, unit.feature), reader
            labels = labels if pool else None
        elif name == "transpose":
            labels = [labels[axis] for axis in reader.params["permutation"]]
        elif name in ("broadcast_in_dim", "reshape", "squeeze"):
            labels = relabelled(labels, before.aval.shape, value.aval.shape)
        else:
            break
        if pool is not None and labels == axes:
            return dataclasses.replace(unit, pool=pool, equation=reader, pooled_by=pooled_by)
    return unit


def _pool(equation: Equation, labels: Labels, feature: int) -> tuple[Any, Any, Any] | None:
    """Returns shape, strides and padding of a max pool over the spatial axes; None if it is none.

    These are all but the first axis and the feature axis.

    Args:
        equation: An equation `reduce_window_max`.
        labels: Which axis of the array that is pooled each axis of the operand is; None if none.
        feature: The array's feature axis.
    """
    names = "window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation"
    windows = list(zip(labels, *(equation.params[name] for name in names), strict=True))
    spatial = sorted(w for w in windows if w[0] not in (None, 0, feature))
    rest = [w for w in windows if w[0] in (None, 0, feature)]
    (x, *_), (out,) = avals(equation.invars), avals(equation.outvars)
    if not spatial or 0 in out.shape or not jnp.issubdtype(x.dtype, jnp.floating):
        return None
    if any(w[1:] != (1, 1, (0, 0), 1, 1) for w in rest) or any(w[4:] != (1, 1) for w in spatial):
        return None
    _, sizes, strides, padding, *_ = zip(*spatial, strict=True)
    if math.prod(sizes) > _LARGEST_WINDOW or min(p for pair in padding for p in pair) < 0:
        return None
    return sizes, strides, padding
