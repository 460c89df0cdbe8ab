"""What waits for the backward pass of a function, and how everything else is rebuilt from it."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from jaxcomp._core import remat3
from jaxcomp.codecs import Quantize
from jaxcomp.policies._policy import Policy
from jaxcomp.transform._choice import paths
from jaxcomp.transform._choice.bias import bias_of_mean, percent
from jaxcomp.transform._choice.bounds import bounds
from jaxcomp.transform._choice.chains import merge
from jaxcomp.transform._choice.choice import (
    BIASES,
    Demand,
    Stored,
    choose,
    coefficients_returned,
    total_bytes,
    without_codecs,
    without_products,
)
from jaxcomp.transform._choice.context import Context
from jaxcomp.transform._choice.decisions import Decision, decide
from jaxcomp.transform._choice.graph import Graph, nbytes, plain_nbytes
from jaxcomp.transform._choice.poles import with_whole_derivatives
from jaxcomp.transform._choice.recomputed_products import with_recomputed_products
from jaxcomp.transform._choice.rewrites import with_rewrites
from jaxcomp.transform._pieces.limits import Limits
from jaxcomp.transform._program.builder import Builder, flat
from jaxcomp.transform._program.custom_rules import is_rule_of_user
from jaxcomp.transform._program.linearized import Linearized, linearize, transpose
from jaxcomp.transform._program.opened_rules import nonlinear_rules
from jaxcomp.transform._program.primitives import tangents_of
from jaxcomp.transform._program.program import Program
from jaxcomp.transform._program.types import Atom, Equation, Variable, is_variable

_LARGER = "kept exactly: codes of all values take more bytes than what they follow from"


@dataclasses.dataclass(frozen=True)
class Coefficient:
    """A coefficient of the backward program.

    Attributes:
        value: The variable of the forward program, or a literal.
        codes: Which code of each stored value it is rebuilt from.
    """

    value: Atom
    codes: paths.Uses = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A function's forward and backward programs, and what passes from one to the other.

    Attributes:
        graph: The forward program; its first results are the function's.
        results: Number of the function's results.
        active: The arguments that are differentiated.
        smooth: The results that have cotangents.
        stored: What waits for the backward pass.
        decisions: What the policy said of each value.
        roles: What the backward pass does with each value.
        linear: From coefficients and the arguments' tangents to the results' tangents.
        coefficients: The coefficients of the linear and of the backward program.
        biased: Whether non-linear steps are computed again from codes.
        limits: Sizes of pieces of the backward pass.
    """

    graph: Graph
    results: int
    active: tuple[int, ...]
    smooth: tuple[int, ...]
    stored: dict[Variable, Stored]
    decisions: dict[Variable, Decision]
    roles: dict[Variable, str]
    linear: Program
    coefficients: list[Coefficient]
    biased: bool
    limits: Limits

    @property
    def encodes(self) -> bool:
        """Whether a value waits as a code, which is not exact."""
        return any(how.is_noisy for how in self.stored.values())

    @functools.cached_property
    def backward(self) -> Program:
        """From coefficients and cotangents to the arguments' cotangents.

        It is made where the backward pass begins, which is outside of the function's call. What
        replaces functions of JAX during the call, as quantization libraries do, would act on JAX's
        rules of transposition, too.
        """
        with remat3.traced_without():
            return transpose(self.linear, len(self.active))

    @property
    def nonlinear_rules(self) -> list[Equation]:
        """Users' rules in the backward program that are not linear in their cotangents."""
        if not any(map(is_rule_of_user, self.linear.equations)):
            return []
        arriving = self.backward.arguments[len(self.coefficients) :]
        return nonlinear_rules(self.backward, arriving)


def schedule(
    program: Program,
    active: Sequence[int],
    coded: Collection[int],
    context: Context,
) -> Schedule:
    """Decides what of a program waits for its backward pass.

    Chains of elementwise derivatives are one coefficient each. If nothing can be encoded and no
    rule recomputes values, chains of several dtypes have the steps and the rounding of JAX's.

    Args:
        program: The function, traced.
        active: The arguments that are differentiated.
        coded: The arguments that the policy may store in another form.
        context: The policy, which takes note of what it decides.

    Raises:
        TypeError: If the policy answers what is no answer.
    """
    linearized = linearize(program, active, opens=context.opens_rules)
    why_exact = ""
    if context.encodes:
        merged = _with_merged_derivatives(linearized, coded, casts=True)
        chosen = _of_linearized(merged, coded, context)
        if chosen.encodes:
            return chosen
        are_larger = any(how.note == _LARGER for how in chosen.stored.values())
        why_exact = _LARGER if are_larger else BIASES
    if linearized.opened:
        linearized = linearize(program, active)
    recomputes = any(rule.action == "recompute" for rule in context.rules)
    exact = _with_merged_derivatives(linearized, coded, casts=recomputes)
    return _of_linearized(exact, coded, context, why_exact)


def _of_linearized(
    linearized: Linearized, coded: Collection[int], context: Context, why_exact: str = ""
) -> Schedule:
    """Schedules a linearized program. Nothing is encoded if a note says why."""
    forward, same = with_rewrites(linearized.forward)
    linearized = dataclasses.replace(linearized, forward=forward)
    graph = _graph(forward, coded, same)
    demand = Demand.of(linearized)
    roles = graph.roles(demand.roles)
    decisions = asked = decide(graph, roles, demand.multiplied, context)
    if context.is_region_body:
        decisions = with_recomputed_products(linearized, decisions, context.limits)
    if why_exact:
        decisions = without_codecs(decisions, why_exact)
    biased = isinstance(context.policy, Policy) and context.policy.lossy_recomputation
    stored, numbered, coefficients = _complete(
        linearized, graph, choose(graph, decisions, demand, biased=biased), roles, biased
    )
    if not biased and any(decision.codec for decision in decisions.values()):
        # No product is computed again: a function is not run twice to save codes.
        exact = without_products(without_codecs(decisions, _LARGER))
        others = (
            choose(graph, decisions, demand, biased=False, instead_of=stored),
            choose(graph, exact, demand, biased=False),
        )
        for other in others:
            if total_bytes(other) < total_bytes(stored):
                stored, numbered, coefficients = _complete(linearized, graph, other, roles, biased)
    return Schedule(
        graph,
        numbered.results,
        numbered.active,
        numbered.smooth,
        stored,
        asked,
        roles,
        numbered.linear,
        coefficients,
        biased,
        context.limits,
    )


def _with_merged_derivatives(
    linearized: Linearized, coded: Collection[int], *, casts: bool
) -> Linearized:
    graph = _graph(linearized.forward, coded)
    if casts:
        linearized = with_whole_derivatives(linearized, graph.is_costly)
    return merge(linearized, graph.is_costly, casts=casts)


def _complete(
    linearized: Linearized,
    graph: Graph,
    chosen: dict[Variable, Stored],
    roles: Mapping[Variable, str],
    biased: bool,
) -> tuple[dict[Variable, Stored], Linearized, list[Coefficient]]:
    """Gives each stored value as many codes as its uses need, and each use its code."""
    numbered, coefficients, copies, means = _number_codes(linearized, graph, chosen, biased)
    stored = dict(chosen)
    for value, storing in chosen.items():
        if storing.is_noisy:
            stored[value] = _with_copies(value, storing, copies.get(value, 1), means.get(value))
            if roles.get(value) == "derivative" and isinstance(stored[value].codec, Quantize):
                stored[value] = dataclasses.replace(stored[value], bounds=bounds(graph, value))
    return stored, numbered, coefficients


def _graph(forward: Program, coded: Collection[int], same: Any = None) -> Graph:
    held = {v for i, v in enumerate(forward.arguments) if i not in coded}
    return Graph(forward, held, same or {})


def plain_bytes(program: Program, active: Sequence[int], coded: Collection[int]) -> int:
    """Returns the bytes that JAX itself declares to keep for a program's backward pass.

    Those of the coefficients of `jax.linearize` that are neither held nor constants, nor in the
    host's memory.
    """
    linearized = linearize(flat(program), active)
    graph = _graph(linearized.forward, coded)
    constant = Graph(graph.program, set()).free
    values = {v for v in linearized.coefficients if is_variable(v)} - constant - graph.held
    on_device = jax.memory.Space.Device
    return sum(plain_nbytes(v.aval) for v in values if v.aval.memory_space == on_device)


def _number_codes(
    linearized: Linearized, graph: Graph, stored: dict[Variable, Stored], biased: bool
) -> tuple[Linearized, list[Coefficient], dict[Any, int], dict[Any, int]]:
    """Gives each use of a coefficient its own input of the linear program, with its codes."""
    linear = linearized.linear
    count = len(linearized.coefficients)
    behind = dict(zip(linear.arguments, linearized.coefficients, strict=False))
    tangents = tangents_of(linear.equations, linear.arguments[count:])
    roots = paths.coded_roots(graph, {v: storing.is_noisy for v, storing in stored.items()})

    def roots_of(atom: Atom) -> paths.Roots:
        value = behind.get(atom) if is_variable(atom) else None
        return roots.get(value, {}) if is_variable(value) else {}

    assignment = paths.Assignment({}, {})
    if not biased:
        assignment = paths.assign(linear, tangents, roots_of)
    inputs: dict[tuple[Any, paths.Uses], None] = {}
    for index, equation in enumerate(linear.equations):
        for position, atom in enumerate(equation.invars):
            if is_variable(atom) and atom in behind:
                inputs[atom, assignment.uses.get((index, position), ())] = None
    returned = coefficients_returned(linear, behind)
    inputs |= {(atom, ()): None for atom in returned}

    builder = Builder()
    variable_of = {key: Variable(key[0].aval) for key in inputs}
    positions = {id(equation): index for index, equation in enumerate(linear.equations)}

    def numbered(atom: Atom, uses: paths.Uses = ()) -> Atom:
        return variable_of[atom, uses] if is_variable(atom) and atom in behind else atom

    def step(equation: Equation, operands: list[Atom]) -> Sequence[Atom]:
        index = positions[id(equation)]
        with_codes = [
            numbered(atom, assignment.uses.get((index, position), ()))
            for position, atom in enumerate(operands)
        ]
        return builder.add(equation, with_codes)

    results = builder.inline(linear, linear.arguments, step)
    arguments = [*variable_of.values(), *linear.arguments[count:]]
    split = builder.program(linear, arguments, list(map(numbered, results)))
    copies: dict[Any, int] = {}
    for uses in assignment.uses.values():
        for root, number in uses:
            copies[root] = max(number + 1, copies.get(root, 1))
    coefficients = [Coefficient(behind[atom], uses) for atom, uses in inputs]
    return dataclasses.replace(linearized, linear=split), coefficients, copies, assignment.means


def _with_copies(value: Variable, storing: Stored, copies: int, mean: int | None) -> Stored:
    several = dataclasses.replace(storing, copies=copies)
    if several.nbytes(value.aval) >= nbytes(value.aval):
        return Stored(note=f"kept exactly: {copies} codes take no fewer bytes")
    if mean is not None:
        assert several.codec is not None
        bias = bias_of_mean(several.codec, value.aval.shape, mean)
        number = "" if bias is None else f", {percent(bias)}"
        several = dataclasses.replace(
            several,
            note=f"used twice, across a mean of {mean}: bias of about its rounding variance / "
            f"{mean}{number}",
        )
    elif copies > 1:
        several = dataclasses.replace(
            several, note=f"multiplied {copies} times: {copies} independent codes"
        )
    return several
