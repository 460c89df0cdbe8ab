"""Stock operations of a program that are recognized, and what takes their place."""

import dataclasses
import functools
import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import DropVar, JaxprEqn, Var, jaxpr_as_fun
from jaxtyping import Array

from jaxcomp import ops
from jaxcomp.codecs import Codec, Offload, Packed, SignAware, noise
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.memory._source_line import source_line
from jaxcomp.ops._gate import gate
from jaxcomp.ops._norm import Norm
from jaxcomp.ops._norm_act import norms_act
from jaxcomp.ops._norm_act_vjp import Input
from jaxcomp.ops._norm_curve import norm_curve
from jaxcomp.ops._pooling import Window, index_codec
from jaxcomp.policies._policy import Policy
from jaxcomp.policies._rule import Rule
from jaxcomp.transform._activations import Activation, Gate, activation_of, gate_of
from jaxcomp.transform._algebra import tangents_of
from jaxcomp.transform._attention import Attention, attentions
from jaxcomp.transform._batch_norms import BatchNorm, Pattern, is_relu
from jaxcomp.transform._builder import Builder, renamed
from jaxcomp.transform._decisions import PolicyLog
from jaxcomp.transform._origins import module_path
from jaxcomp.transform._programs import Program, Values, avals, variables

# Of these kinds a policy's rules with `op` match stock operations, too.
KINDS = ("norm_act", "max_pool")
_LARGEST_WINDOW = 256


@dataclasses.dataclass(frozen=True, eq=False)
class NormAct:
    """Batch norms, a skip connection, a ReLU and a max pool, as far as they are there.

    Attributes:
        norms: The norm of the main branch and, if it has one, that of the skip connection.
        residual: Skip connection without a norm, or None.
        relu: Whether there is a ReLU.
        pool: Shape, strides and padding of a max pool's windows, or None.
        equation: The equation that makes the result.
        origin: The equation that makes the result of the first norm.
        activation: An activation function other than a ReLU, or None.
    """

    norms: tuple[BatchNorm, ...]
    residual: Any
    relu: bool
    pool: Any
    equation: JaxprEqn
    origin: JaxprEqn
    activation: Activation | None = None
    kind = "norm_act"

    @property
    def operands(self) -> list[Any]:
        """The variables that it reads."""
        given = [v for n in self.norms for v in (n.x, n.scale, n.bias)]
        return [v for v in (*given, self.residual) if v is not None]

    @property
    def results(self) -> list[Any]:
        """The variables that it makes."""
        return [self.equation.outvars[0], *(v for n in self.norms for v in (n.mean, n.variance))]

    @property
    def is_coded(self) -> bool:
        """Whether the result has a code."""
        return self.relu or self.activation is not None

    @property
    def saved(self) -> list[Any]:
        """Variables of the shapes and dtypes of the arrays that have a code."""
        makes = [self.equation.outvars[0]] if self.residual is not None or self.pool else []
        return [*(n.x for n in self.norms), *makes]


@dataclasses.dataclass(frozen=True, eq=False)
class MaxPool:
    """A max pool alone.

    Attributes:
        pool: Shape, strides and padding of its windows.
        equation: Its equation.
    """

    pool: Any
    equation: JaxprEqn
    kind = "max_pool"

    @property
    def origin(self) -> JaxprEqn:
        """Its equation."""
        return self.equation

    @property
    def operands(self) -> list[Any]:
        """The variable that it reads."""
        return variables(self.equation.invars)

    @property
    def results(self) -> list[Any]:
        """The variable that it makes."""
        return list(self.equation.outvars)

    @property
    def saved(self) -> list[Any]:
        """The variable of the shape of its index."""
        return list(self.equation.outvars)


Unit = NormAct | MaxPool | Gate | Attention


@dataclasses.dataclass(frozen=True, eq=False)
class Recognized:
    """A unit and what it saves by.

    Attributes:
        unit: The unit.
        codec: Its codec; None if it is recomputed.
    """

    unit: Unit
    codec: Codec | None

    @property
    def path(self) -> str:
        """Path of the norm's or the pool's module."""
        return module_path(self.unit.origin)

    @property
    def source(self) -> str:
        """Line of the user's code that calls it."""
        return source_line(self.unit.origin)


def recognize(program: Program, active: Sequence[int], log: PolicyLog) -> list[Recognized]:
    """The units of a flat program that the policy has a codec for; `log` takes note.

    Args:
        program: The program.
        active: The arguments that are differentiated.
        log: The policy.
    """
    if not isinstance(log.policy, Policy):
        return []
    if not any(isinstance(rule.action, Codec) for rule in log.policy.rules):
        return []
    jaxpr = program.jaxpr
    pattern = Pattern(jaxpr)
    reached = tangents_of(jaxpr.eqns, [jaxpr.invars[i] for i in active])
    found: list[Recognized] = []
    rules: dict[Recognized, Rule] = {}
    for unit in _units(pattern):
        if reached.isdisjoint(unit.operands):
            continue
        path = module_path(unit.origin)
        rule = next(
            (r for r in log.policy.rules if r.op and r.matches_layer(path, unit.kind)), None
        )
        if isinstance(unit, Attention):
            if rule is None:
                found.append(Recognized(unit, None))
            else:
                log.matched.add(rule)
        elif rule is not None and isinstance(rule.action, Codec) and _fits(unit, rule.action):
            found.append(Recognized(unit, rule.action))
            rules[found[-1]] = rule
    found = _without_cycles(jaxpr, found)
    found = _with_gates(jaxpr, found)
    log.matched.update(rules[one] for one in found if one in rules)
    return found


def _with_gates(jaxpr: Any, found: list[Recognized]) -> list[Recognized]:
    """The units and the gates of what they encode."""
    by = {
        one.unit.equation.outvars[0]: one.codec
        for one in found
        if isinstance(one.unit, NormAct) and one.unit.is_coded
    }
    gates = [g for e in jaxpr.eqns if (g := gate_of(e, {*by})) is not None]
    return [*found, *(Recognized(g, by[g.x]) for g in gates)]


def _without_cycles(jaxpr: Any, found: list[Recognized]) -> list[Recognized]:
    """The units but for those that read what is computed from their own results.

    An example is a skip connection that is scaled by the norm's variance.
    """
    if _ordered(jaxpr, found) is not None:
        return found
    kept: list[Recognized] = []
    for one in found:
        if _ordered(jaxpr, [*kept, one]) is not None:
            kept.append(one)
    return kept


def is_for_units(rule: Rule) -> bool:
    """Whether a rule names stock operations that are recognized, and has a codec for them."""
    anywhere = dataclasses.replace(rule, path="")
    named = bool(rule.op) and isinstance(rule.action, Codec)
    return named and any(anywhere.matches_layer("", kind) for kind in KINDS)


def _fits(unit: Unit, codec: Codec) -> bool:
    by = inner_codec(codec)
    if unit.kind == "max_pool":
        return isinstance(by, Packed)
    if not isinstance(by, SignAware) or (isinstance(codec, Offload) and codec.in_turn):
        return False
    shape = unit.operands[0].aval.shape
    return by.scale_source == "norm" or len(shape) > 2


def _units(pattern: Pattern) -> list[Unit]:
    norms = [n for e in pattern.jaxpr.eqns if (n := pattern.batch_norm(e)) is not None]
    by_result = {n.y: n for n in norms}
    done: set[Any] = set()
    found: list[Unit] = []
    for norm in norms:
        if norm.y not in done:
            unit = _unit(pattern, norm, by_result)
            done.update(n.y for n in unit.norms)
            found.append(unit)
    taken = {id(u.equation) for u in found}
    for equation in pattern.jaxpr.eqns:
        pool = _window(equation)
        if pool is not None and id(equation) not in taken:
            found.append(MaxPool(pool, equation))
    return [*found, *attentions(pattern)]


def _unit(pattern: Pattern, norm: BatchNorm, norms: dict[Any, BatchNorm]) -> NormAct:
    """The unit that begins with a norm."""
    origin = pattern.made_by[norm.y]
    alone = NormAct((norm,), None, False, None, origin, origin)
    activation = activation_of(pattern, norm.y)
    if activation is not None:
        return dataclasses.replace(alone, equation=activation.equation, activation=activation)
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
    if getattr(other, "aval", None) is None or other.aval != norm.y.aval:
        return alone
    second = norms.get(other)
    if second is not None and pattern.only_reader(other) is reader:
        if second.norm.epsilon == norm.norm.epsilon and second.x.aval == norm.x.aval:
            return NormAct((norm, second), None, True, None, relu, origin)
        return alone
    return NormAct((norm,), other, True, None, relu, origin)


def _with_pool(pattern: Pattern, unit: NormAct) -> NormAct:
    reader = pattern.only_reader(unit.equation.outvars[0])
    pool = None if reader is None else _window(reader)
    if reader is None or pool is None:
        return unit
    return dataclasses.replace(unit, pool=pool, equation=reader)


def _window(equation: JaxprEqn) -> tuple[Any, Any, Any] | None:
    """Shape, strides and padding of a max pool over the spatial axes; None if it is none."""
    if equation.primitive.name != "reduce_window_max":
        return None
    shape, strides, padding = (
        tuple(equation.params[name]) for name in ("window_dimensions", "window_strides", "padding")
    )
    dilated = {*equation.params["base_dilation"], *equation.params["window_dilation"]} != {1}
    outer = {shape[0], shape[-1], strides[0], strides[-1]} != {1} or any(
        (*padding[0], *padding[-1])
    )
    (x, *_), (out,) = avals(equation.invars), avals(equation.outvars)
    count = 1
    for size in shape:
        count *= size
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    if dilated or outer or len(shape) < 3 or count > _LARGEST_WINDOW or not floating:
        return None
    if min(p for pair in padding for p in pair) < 0 or 0 in out.shape:
        return None
    return shape[1:-1], strides[1:-1], padding[1:-1]


def with_units(program: Program, found: Sequence[Recognized]) -> Program:
    """The program with units in place of the equations that they stand for.

    Its last argument is a seed.
    """
    jaxpr = program.jaxpr
    steps = _ordered(jaxpr, found)
    assert steps is not None

    builder = Builder()
    seed = Var(jax.typeof(jnp.uint32(0)))
    env = builder.constants_of(program) | {v: v for v in jaxpr.invars}
    coded: dict[Any, _Coded] = {}
    numbers = {one: number for number, one in enumerate(found)}
    for step in steps:
        if isinstance(step, Recognized):
            _take(builder, step, numbers[step], env, coded, seed)
        elif step.primitive.name == "conv_general_dilated" and _reads_code(step, coded):
            lhs, rhs = coded[step.invars[0]], env[step.invars[1]]
            convolve = functools.partial(_convolve, step.params, lhs.tree)
            (env[step.outvars[0]],) = builder.trace(convolve, lhs.leaves, rhs, at=step)
        else:
            builder.copy(step, env)
    return builder.program(jaxpr, [*jaxpr.invars, seed], renamed(env, jaxpr.outvars))


class _Coded(NamedTuple):
    """The variables of an array, or of an `ops.CodedArray`, and its structure."""

    leaves: list[Any]
    tree: Any = jax.tree.structure(0)


def _convolve(params: dict[str, Any], tree: Any, leaves: list[Array], rhs: Array) -> list[Array]:
    """A convolution whose input has a code."""
    lhs = jax.tree.unflatten(tree, leaves)
    return [ops.conv_general_dilated(lhs, rhs, **params, codec=lhs.codec)]


def _reads_code(equation: JaxprEqn, coded: dict[Any, _Coded]) -> bool:
    """Whether a convolution's input has a code, with the features last."""
    lhs, rhs = equation.invars
    numbers = equation.params["dimension_numbers"]
    last = len(numbers.lhs_spec) - 1
    return (
        lhs in coded
        and rhs not in coded
        and tuple(numbers.lhs_spec) == (0, last, *range(1, last))
        and equation.params["batch_group_count"] == 1
    )


def _take(
    builder: Builder,
    step: Recognized,
    number: int,
    env: Values,
    coded: dict[Any, _Coded],
    seed: Any,
) -> None:
    """Adds a unit of some number, and sets its results."""
    unit = step.unit
    add = functools.partial(builder.trace, at=unit.origin)
    if isinstance(unit, Attention):
        attention = jax.checkpoint(jaxpr_as_fun(unit.program))
        (env[unit.results[0]],) = add(attention, *renamed(env, unit.operands))
        return
    codec = step.codec
    assert codec is not None
    if isinstance(unit, MaxPool):
        indices: Codec = index_codec(unit.pool[0])
        if isinstance(codec, Offload):
            indices = dataclasses.replace(codec, codec=indices)
        (x,) = renamed(env, unit.operands)
        (env[unit.results[0]],) = add(lambda x: [ops.max_pool(x, *unit.pool, codec=indices)], x)
        return
    if isinstance(unit, Gate):
        x, factor = coded[unit.x], env[unit.factor]
        structures: list[Any] = []

        def gated(leaves: list[Array], factor: Array) -> list[Array]:
            made = gate(jax.tree.unflatten(x.tree, leaves), factor)
            structures.append(jax.tree.structure(made))
            return jax.tree.leaves(made)

        leaves = add(gated, x.leaves, factor)
        (out,) = unit.results
        env[out], coded[out] = leaves[0], _Coded(leaves, *structures)
        return
    given = [[None if v is None else env[v] for v in (n.x, n.scale, n.bias)] for n in unit.norms]
    other = unit.residual
    before = None if other is None else coded.get(other, _Coded([env[other]]))
    structures = []

    def norm_act(given: list[Any], residual: list[Array], seed: Array) -> list[Array]:
        added = None if before is None else jax.tree.unflatten(before.tree, residual)
        own = seed * jnp.uint32(noise.GOLDEN) - jnp.uint32(number + 1)  # codes of values count up
        made, statistics = _norm_act(unit, codec, given, added, own)
        plain = made.value if made.code is None else made
        structures.append(jax.tree.structure(plain))
        return [*statistics, *jax.tree.leaves(plain)]

    made = add(norm_act, given, before.leaves if before else [], seed)
    out, *statistics = unit.results
    count = len(statistics)
    env.update(zip(statistics, made[:count], strict=True))
    result = _Coded(made[count:], *structures)
    env[out] = result.leaves[0]
    if len(result.leaves) > 1:
        coded[out] = result


def _norm_act(
    unit: NormAct, codec: Codec, given: list[Any], residual: Any, seed: Array
) -> tuple[Any, list[Array]]:
    """The unit's result, and the mean and variance of each of its norms."""
    inputs = tuple(_input(*arrays) for arrays in given)
    x = inputs[0].x
    window = None if unit.pool is None else Window(x.shape, *unit.pool)
    norms = tuple(norm.norm for norm in unit.norms)
    made, means, variances = _made(unit, norms, inputs, residual, window, codec, seed)
    statistics = [a for pair in zip(means, variances, strict=True) for a in pair]
    shapes = [v.aval.shape for n in unit.norms for v in (n.mean, n.variance)]
    return made, [a.reshape(shape) for a, shape in zip(statistics, shapes, strict=True)]


def _made(
    unit: NormAct,
    norms: tuple[Norm, ...],
    inputs: tuple[Input, ...],
    residual: Any,
    window: Window | None,
    codec: Codec,
    seed: Array,
) -> tuple[ops.CodedArray, Sequence[Array], Sequence[Array]]:
    if unit.activation is None:
        return norms_act(norms, inputs, residual, unit.relu, window, codec, seed)
    curve, evaluate = unit.activation.curve, jaxpr_as_fun(unit.activation.program)
    made, mean, variance = norm_curve(
        norms[0], inputs[0], curve, lambda z: evaluate(z)[0], codec, seed
    )
    return made, [mean], [variance]


def _input(x: Array, scale: Array | None, bias: Array | None) -> Input:
    features = x.shape[-1:]
    return Input(
        x,
        jnp.ones(features) if scale is None else scale,
        jnp.zeros(features) if bias is None else bias,
    )


def _ordered(jaxpr: Any, found: Sequence[Recognized]) -> list[Any] | None:
    """Units and the equations that are needed besides, each after those that it reads.

    None if there is no such order, because a unit reads what depends on its results. The order is
    that of the program, as far as possible. Without units it is the program's.
    """
    made_by_units = {v for r in found for v in r.unit.results}
    position = {id(e): i for i, e in enumerate(jaxpr.eqns)}
    steps: list[tuple[int, Any, list[Any], list[Any]]] = [
        (i, e, variables(e.invars), [v for v in e.outvars if not isinstance(v, DropVar)])
        for i, e in enumerate(jaxpr.eqns)
        if not made_by_units.intersection(e.outvars)
    ]
    steps += [(position[id(r.unit.equation)], r, r.unit.operands, r.unit.results) for r in found]
    maker: dict[Any, Any] = {v: step for step in steps for v in step[3]}
    # What is needed.
    live, pending = set[int](), list(variables(jaxpr.outvars))
    effects = [s for s in steps if getattr(s[1], "effects", None)]
    for step in effects:
        live.add(id(step))
        pending += step[2]
    while pending:
        needed = maker.get(pending.pop())
        if needed is not None and id(needed) not in live:
            live.add(id(needed))
            pending += needed[2]
    chosen = [s for s in steps if id(s) in live]
    waits = {id(s): len({id(maker[v]) for v in s[2] if v in maker}) for s in chosen}
    after: dict[int, list[Any]] = {}
    for step in chosen:
        for number in {id(maker[v]) for v in step[2] if v in maker}:
            after.setdefault(number, []).append(step)
    ready = [(s[0], n, s) for n, s in enumerate(chosen) if not waits[id(s)]]
    count = len(chosen)
    heapq.heapify(ready)
    order = []
    while ready:
        *_, step = heapq.heappop(ready)
        order.append(step[1])
        for following in after.get(id(step), ()):
            waits[id(following)] -= 1
            if not waits[id(following)]:
                count += 1
                heapq.heappush(ready, (following[0], count, following))
    return order if len(order) == len(chosen) else None
