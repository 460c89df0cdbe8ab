"""Regions that the user put under `jax.checkpoint`: kept as they are, or opened."""

import dataclasses
import posixpath
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from typing import Any, Literal, Protocol, cast

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from jaxcomp.codecs import Codec
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.memory._source_line import source_line
from jaxcomp.memory._tracing import CHECKPOINT_PRIMITIVES, inner_jaxprs
from jaxcomp.policies._policy import JaxPolicy, Policy
from jaxcomp.policies._rule import Rule
from jaxcomp.transform._choice.context import Context, Notes
from jaxcomp.transform._choice.graph import Graph
from jaxcomp.transform._choice.schedule import plain_bytes
from jaxcomp.transform._pieces.limits import Limits
from jaxcomp.transform._program.builder import Builder, flat
from jaxcomp.transform._program.origins import module_path
from jaxcomp.transform._program.primitives import HEAVY, tangents_of
from jaxcomp.transform._program.program import (
    BODIES,
    Program,
    avals,
    is_of_collective,
    passed,
    variables,
)
from jaxcomp.transform._program.types import Atom, Equation, Variable, is_variable
from jaxcomp.transform._recognition.attention import attentions
from jaxcomp.transform._recognition.pattern import Pattern

_ALL_AGAIN = None, jax.checkpoint_policies.nothing_saveable


class Scheduled(Protocol):
    """What is stored of a program, and of the loops and conditionals in it."""

    @property
    def waiting_bytes(self) -> int:
        """The bytes that wait for its backward pass."""

    @property
    def regions_inside(self) -> "Sequence[Region]":
        """The regions in its loops and conditionals."""


Schedule = Callable[[Program, Sequence[int], Collection[int], Context], Scheduled]


@dataclasses.dataclass(frozen=True)
class Region:
    """A region under `jax.checkpoint`, and what becomes of it.

    Attributes:
        path: Path of the innermost module that all of it is in, or "".
        source: `file:line` of its call, or "".
        action: "open": its body is compressed as plain code. "keep": the backward pass evaluates it
            again. A codec: it does so from inputs that are saved by the codec.
        is_asked: Whether a rule of the policy says so.
        has_parameters: Whether a product with a parameter is in it.
        iterations: Of the loops around it.
        kept_bytes: Bytes that wait if it is evaluated again, in one iteration.
        coded_bytes: Bytes that wait if it is open, in one iteration.
        recomputed_bytes: Bytes that are kept while it is evaluated again.
        is_sliced: Whether its large attentions are then evaluated in slices.
        encodes_again: Whether it then encodes values, as regions in it are open.
    """

    path: str
    source: str
    action: Codec | Literal["open", "keep"]
    is_asked: bool
    has_parameters: bool
    iterations: int
    kept_bytes: int
    coded_bytes: int
    recomputed_bytes: int
    is_sliced: bool
    encodes_again: bool

    @property
    def is_open(self) -> bool:
        """Whether its body is compressed as plain code."""
        return self.action == "open"


@dataclasses.dataclass(frozen=True)
class _Found:
    """A region, its body with the regions opened that are open in it, and all that are in it."""

    region: Region
    body: Program
    inside: Sequence[Region]


def with_open_regions(
    program: Program,
    active: Sequence[int],
    coded: Collection[int],
    context: Context,
    schedule: Schedule,
) -> tuple[Program, list[Region]]:
    """Returns the program with the regions opened that the policy opens, and all regions.

    The first rule for the operation "checkpoint" decides. Without one, a policy with codecs opens
    as many regions as it can without more bytes than these take as they are: what they read, and
    what is kept while the largest is evaluated again. A region without a product with a parameter,
    such as an attention, is left as it is; so are all with a policy without codecs, or with one
    that computes nonlinear steps again from decoded values. A region that is not open, in which
    regions are, encodes what it keeps while it is evaluated again.

    Args:
        program: The function.
        active: The arguments that are differentiated.
        coded: The arguments that the policy may store in another form.
        context: The policy, which takes note of the rules that decide.
        schedule: Schedules a program in which the regions are opened that are open.
    """
    if context.regions_are_decided or not _may_open(context.policy):
        return program, []
    reached = tangents_of(program.equations, [program.arguments[i] for i in active])
    free = Graph(program, {v for i, v in enumerate(program.arguments) if i not in coded}).free
    found = {
        number: _found(equation, reached, free, context, schedule)
        for number, equation in enumerate(program.equations)
        if is_region(equation) and _active(equation, reached)
    }
    if not found:
        return program, []
    chosen = _closed_until_they_fit({number: each.region for number, each in found.items()})
    changed = {
        id(program.equations[n]): (region, found[n].body)
        for n, region in chosen.items()
        if region.is_open or (region.action == "keep" and region.encodes_again)
    }
    builder = Builder()

    def step(equation: Equation, operands: list[Atom]) -> Sequence[Atom]:
        if id(equation) not in changed:
            return builder.add(equation, operands)
        region, body = changed[id(equation)]
        if region.is_open:
            return builder.inline(body, operands)
        operands = [*builder.constants_of(body).values(), *operands]
        return builder.add(_that_encodes(equation, body), operands)

    results = builder.inline(program, program.arguments, step)
    inside = [each for n, r in chosen.items() if r.is_open for each in found[n].inside]
    return builder.program(program, program.arguments, results), [*chosen.values(), *inside]


def _may_open(policy: Policy | JaxPolicy) -> bool:
    """Returns whether a policy encodes values, and computes none again from codes, or says so."""
    if not isinstance(policy, Policy) or policy.lossy_recomputation:
        return False
    if any(rule.is_for_regions for rule in policy.rules):
        return True
    codecs = [rule.action for rule in policy.rules if isinstance(rule.action, Codec)]
    return any(not inner_codec(codec).is_exact for codec in codecs)


def is_region(equation: Equation) -> bool:
    """Returns whether it is a region of the user's, and not of a derivative in his function."""
    name = equation.primitive.name
    return name in CHECKPOINT_PRIMITIVES and not equation.params["differentiated"]


def is_scheduled(equation: Equation, reached: Collection[Variable], limits: Limits) -> bool:
    """Returns whether an equation is a region that is evaluated again by a schedule of ours."""
    return encodes_again(equation) or is_sliced(equation, reached, limits)


def encodes_again(equation: Equation) -> bool:
    """Returns whether an equation is a region that encodes while it is evaluated again."""
    return is_region(equation) and equation.params["policy"] is _codes_saveable


def _codes_saveable(*_: object, **__: object) -> bool:
    """Is the policy of regions that encode while they are evaluated again; JAX never asks it."""
    return False


def _that_encodes(equation: Equation, body: Program) -> Equation:
    """Returns a region of another body, whose constants come first, that encodes."""
    arguments = [*body.constants, *body.arguments]
    jaxpr = body.jaxpr.replace(constvars=[], invars=arguments)
    params = equation.params | {"jaxpr": jaxpr, "policy": _codes_saveable}
    return equation.replace(invars=arguments, params=params)


def is_sliced(equation: Equation, reached: Collection[Variable], limits: Limits) -> bool:
    """Returns whether an equation is a region of which large attentions are evaluated in slices.

    A region that is an attention alone is evaluated in slices as a whole. Regions with effects, and
    those whose author chose what is saved, are left to JAX.

    Args:
        equation: The equation.
        reached: The variables of its program that are differentiated.
        limits: Sizes of the slices.
    """
    if not _is_all_again(equation):
        return False
    return _large_attentions(equation, reached, limits) == "beside products"


def _is_all_again(equation: Equation) -> bool:
    """Returns whether it is a region of which its author saves nothing, without effects."""
    return (
        is_region(equation)
        and all(map(is_of_collective, equation.effects))
        and equation.params["policy"] in _ALL_AGAIN
    )


def _large_attentions(
    call: Equation, reached: Collection[Variable], limits: Limits
) -> Literal["", "alone", "beside products"]:
    """Returns whether large attentions are in a call or in calls of it, and beside what."""
    result: Literal["", "alone"] = ""
    for jaxpr in inner_jaxprs(call):
        if not limits.slices(_largest_size(jaxpr)):
            continue
        program = flat(Program(jaxpr))
        inside = tangents_of(program.equations, passed(program, call, reached))
        calls = {*BODIES, *CHECKPOINT_PRIMITIVES}
        inner = [
            _large_attentions(e, inside, limits)
            for e in program.equations
            if e.primitive.name in calls
        ]
        own = list(attentions(Pattern(program)))
        if any(inner) or any(attention.is_sliced(inside, limits) for attention in own):
            others = _products(program) - sum(_products(attention.program) for attention in own)
            if others or "beside products" in inner:
                return "beside products"
            result = "alone"
    return result


def _largest_size(jaxpr: Jaxpr) -> int:
    """Returns the elements of the largest array that is made in a jaxpr and those in it."""
    sizes = [v.aval.size for e in jaxpr.eqns for v in e.outvars if hasattr(v.aval, "size")]
    inner = [_largest_size(one) for e in jaxpr.eqns for one in inner_jaxprs(e)]
    return max(*sizes, *inner, 0, 0)


def _products(program: Program) -> int:
    return sum(equation.primitive.name in HEAVY for equation in program.equations)


def _found(
    equation: Equation,
    reached: Collection[Variable],
    free: Collection[Variable],
    context: Context,
    schedule: Schedule,
) -> _Found:
    """Returns a region with its bytes; open if a rule says so, or if nothing speaks against it."""
    closed = region_body(equation)
    active = _active(equation, reached)
    coded = [i for i, atom in enumerate(equation.invars) if is_variable(atom) and atom not in free]
    path = _common_path(closed)
    rule = _rule_for(path, context)
    if rule is not None:
        context.notes.matched.add(rule)
    aside = dataclasses.replace(context, notes=Notes(), keeps_rules=True)
    body, inside = with_open_regions(closed, active, coded, aside, schedule)
    context.notes.regions.extend([path, *aside.notes.regions])
    context.notes.matched.update(r for r in aside.notes.matched if r.is_for_regions)
    held = {v for i, v in enumerate(closed.arguments) if i not in coded}
    has_parameters = _has_parameters(closed, held)
    by_default: Any = "open" if has_parameters else "keep"
    opened = schedule(body, active, coded, aside)
    context.notes.in_regions.update(aside.notes.matched, aside.notes.in_regions)
    in_slices = is_sliced(equation, reached, context.limits)
    all_inside = [*inside, *opened.regions_inside]
    encoded = opened.waiting_bytes + _largest_again(r for r in all_inside if not r.is_open)
    if in_slices:
        recomputed = schedule(closed, active, (), context.of_region()).waiting_bytes
    else:
        recomputed = plain_bytes(closed, active, coded) + _largest_again(all_inside)
    is_encoded = (
        not in_slices
        and has_parameters
        and _is_all_again(equation)
        and any(r.is_open or r.encodes_again for r in all_inside)
        and encoded < recomputed
    )
    region = Region(
        path,
        source_line(equation),
        by_default if rule is None else cast(Any, rule.action),
        rule is not None,
        has_parameters,
        context.iterations,
        plain_bytes(region_alone(equation), active, coded),
        opened.waiting_bytes,
        encoded if is_encoded else recomputed,
        in_slices,
        is_encoded,
    )
    return _Found(region, body, inside)


def _active(equation: Equation, reached: Collection[Variable]) -> list[int]:
    """Returns the operands of a region that have a derivative; integers have none."""
    operands = enumerate(equation.invars)
    moved = [i for i, atom in operands if is_variable(atom) and atom in reached]
    return [i for i in moved if jnp.issubdtype(equation.invars[i].aval.dtype, jnp.inexact)]


def codec_of_inputs(equation: Equation, context: Context) -> Codec | None:
    """Returns the codec that a rule has for the inputs of a region; None of any other equation."""
    if not is_region(equation) or not any(rule.is_for_regions for rule in context.rules):
        return None
    rule = _rule_for(_common_path(region_body(equation)), context)
    return rule.action if rule is not None and isinstance(rule.action, Codec) else None


def region_body(equation: Equation) -> Program:
    """Returns the program of a region, in the name scope of its call."""
    body = Program(equation.params["jaxpr"])
    builder = Builder()
    results = builder.inline(body, body.arguments, call=equation)
    return builder.program(body, body.arguments, results)


def region_alone(equation: Equation) -> Program:
    """Returns a program that calls a region, and does nothing else."""
    body = Program(equation.params["jaxpr"])
    results = [Variable(aval) for aval in avals(body.results)]
    call = equation.replace(invars=body.arguments, outvars=results)
    return Program(body.jaxpr.replace(eqns=[call], outvars=results))


def _common_path(body: Program) -> str:
    """Returns the path of the innermost module that all equations of a region are in."""
    paths = [path for e in body.equations if (path := module_path(e))]
    return posixpath.commonpath(paths) if paths else ""


def _rule_for(path: str, context: Context) -> Rule | None:
    """Returns the first rule for a region of a path."""
    return next((rule for rule in context.rules if rule.matches_region(path)), None)


def _has_parameters(program: Program, held: Set[Variable]) -> bool:
    """Returns whether an operand of a product follows from what is held, as a parameter does."""
    free = Graph(program, held).free
    for equation in program.equations:
        if equation.primitive.name in HEAVY and not free.isdisjoint(variables(equation.invars)):
            return True
        for jaxpr in inner_jaxprs(equation):
            body = Program(jaxpr)
            if _has_parameters(body, {*passed(body, equation, free)}):
                return True
    return False


def _closed_until_they_fit(regions: dict[int, Region]) -> dict[int, Region]:
    """Closes regions of which no rule says anything, those first that closing saves the most."""
    others = {n: region for n, region in regions.items() if not region.is_asked}
    most = _bytes([dataclasses.replace(r, action="keep") for r in others.values()])
    open_ones = [n for n, region in others.items() if region.is_open]
    open_ones.sort(key=lambda n: others[n].coded_bytes - others[n].kept_bytes)
    while open_ones and _bytes(others.values()) > most:
        number = open_ones.pop()
        others[number] = dataclasses.replace(others[number], action="keep")
    return regions | others


def _bytes(regions: Collection[Region]) -> int:
    """Returns the bytes that wait, and those of the largest region that is evaluated again."""
    waiting = sum(r.iterations * (r.coded_bytes if r.is_open else r.kept_bytes) for r in regions)
    return waiting + _largest_again(r for r in regions if not r.is_open)


def _largest_again(regions: Iterable[Region]) -> int:
    """Returns the bytes that are kept while the largest of some regions is evaluated again."""
    return max((region.recomputed_bytes for region in regions), default=0)
