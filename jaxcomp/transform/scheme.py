"""What waits for the backward pass of a function, and how everything else is rebuilt from it."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.codecs import Codec, Packed
from jaxcomp.policies import CodecPolicy
from jaxcomp.transform import paths
from jaxcomp.transform.algebra import is_affine, is_cheap, linear_uses, tangents_of
from jaxcomp.transform.alternatives import with_alternatives
from jaxcomp.transform.cut import NEVER, cheapest
from jaxcomp.transform.decisions import Decision, Policy, decide
from jaxcomp.transform.derivatives import merge
from jaxcomp.transform.graph import Graph, coded_nbytes, nbytes, plain_nbytes
from jaxcomp.transform.programs import (
    Linearized,
    Program,
    apply,
    avals,
    is_variable,
    linearize,
    read,
    transpose,
)


@dataclasses.dataclass(frozen=True)
class Stored:
    """How one value waits for the backward pass.

    Attributes:
        codec: The codec; None is as it is.
        copies: Codes of independent noise, one for each time that a path holds the value.
        offload: Whether it waits in the host's memory.
        note: What there is to say about it.
    """

    codec: Codec | None = None
    copies: int = 1
    offload: bool = False
    note: str = ""

    def nbytes(self, aval: Any) -> int:
        """Bytes in the device's memory."""
        if self.offload:
            return 0
        if self.codec is None:
            return plain_nbytes(aval)
        return self.copies * coded_nbytes(self.codec, aval.shape, aval.dtype)


@dataclasses.dataclass(frozen=True)
class Coefficient:
    """A coefficient of the backward program.

    Attributes:
        value: The variable of the forward program, or a literal.
        codes: Which code of each stored value it is rebuilt from.
    """

    value: Any
    codes: paths.Uses = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Scheme:
    """A function's forward and backward programs, and what passes from one to the other.

    Attributes:
        graph: The forward program; its first results are the function's.
        constants: The forward program's constants.
        results: Number of the function's results.
        active: The arguments that are differentiated.
        smooth: The results that have cotangents.
        stored: What waits for the backward pass.
        decisions: What the policy said of each value.
        roles: What the backward pass does with each value.
        backward: From coefficients and cotangents to the arguments' cotangents.
        coefficients: The backward program's coefficients.
        plain_bytes: Bytes that JAX itself declares to keep, arguments not counted.
        biased: Whether non-linear steps are computed again from codes.
    """

    graph: Graph
    constants: Sequence[Any]
    results: int
    active: tuple[int, ...]
    smooth: tuple[int, ...]
    stored: dict[Any, Stored]
    decisions: dict[Any, Decision]
    roles: dict[Any, str]
    backward: Program
    coefficients: list[Coefficient]
    plain_bytes: int
    biased: bool


def scheme(
    program: Program, active: Sequence[int], coded: Collection[int], policy: Policy
) -> Scheme:
    """Decides what of a program waits for its backward pass.

    Args:
        program: The function, traced.
        active: The arguments that are differentiated.
        coded: The arguments that the policy may store in another form.
        policy: A codec or a policy.

    Raises:
        TypeError: If the policy answers what is no answer.
        ValueError: If a rule of the policy matches nothing.
    """
    linearized = linearize(program, active)
    before = _graph(linearized.forward, coded)
    plain_bytes = _plain_bytes(linearized, before)
    exact = before.free | before.statistics
    linearized = merge(
        linearized,
        lambda v: (
            is_variable(v)
            and v not in exact
            and v.aval.size > 1
            and jnp.issubdtype(v.aval.dtype, jnp.floating)
        ),
    )
    forward, same = with_alternatives(linearized.forward)
    linearized = dataclasses.replace(linearized, forward=forward)
    graph = _graph(forward, coded, same)
    demand = _Demand.of(linearized)
    roles = graph.roles(demand.roles)
    decisions = decide(policy, graph, roles)
    biased = isinstance(policy, CodecPolicy) and policy.lossy_recomputation
    stored = _Choice(graph, decisions, biased).store(demand)
    if not biased:
        exact_choice = _Choice(graph, {v: _without_codec(d) for v, d in decisions.items()}, biased)
        stored = min(stored, exact_choice.store(demand), key=_total)
    linearized, coefficients, copies, means = _number_codes(linearized, graph, stored, biased)
    for value, storing in stored.items():
        if storing.codec is not None and storing.codec != Packed(1):
            stored[value] = _with_copies(value, storing, copies.get(value, 1), means.get(value))
    return Scheme(
        graph,
        forward.consts,
        linearized.results,
        linearized.active,
        linearized.smooth,
        stored,
        decisions,
        roles,
        transpose(linearized),
        coefficients,
        plain_bytes,
        biased,
    )


def _without_codec(decision: Decision) -> Decision:
    if decision.codec is None:
        return decision
    return dataclasses.replace(decision, codec=None, note="kept exactly: codes take no fewer bytes")


def _total(stored: dict[Any, Stored]) -> int:
    return sum(how.nbytes(value.aval) for value, how in stored.items())


def _graph(forward: Program, coded: Collection[int], same: Any = None) -> Graph:
    held = {v for i, v in enumerate(forward.jaxpr.invars) if i not in coded}
    return Graph(forward.jaxpr, held, same or {})


def _plain_bytes(linearized: Linearized, graph: Graph) -> int:
    """Bytes of the coefficients of `jax.linearize` that are neither held nor constants."""
    constant = Graph(graph.jaxpr, set()).free
    values = {v for v in linearized.coefficients if is_variable(v)}
    return sum(plain_nbytes(v.aval) for v in values - constant - graph.held)


@dataclasses.dataclass(frozen=True)
class _Demand:
    """The values of the forward program that the linear program reads.

    Attributes:
        multiplied: Those that it only multiplies tangents by.
        exact: Those that it reads in another way, too: predicates, indices, residuals of
            `custom_vjp`, of an inner `jax.checkpoint` and of loops.
        roles: The role of each.
    """

    multiplied: set[Any]
    exact: set[Any]
    roles: dict[Any, str]

    @classmethod
    def of(cls, linearized: Linearized) -> "_Demand":
        linear = linearized.linear.jaxpr
        count = len(linearized.coefficients)
        behind = dict(zip(linear.invars, linearized.coefficients, strict=False))
        tangents = tangents_of(linear.eqns, linear.invars[count:])
        multiplied: set[Any] = set()
        exact = {behind[v] for v in _coefficients_returned(linear, behind)}
        roles: dict[Any, str] = {}
        for equation in linear.eqns:
            uses = linear_uses(equation, tangents)
            for position, atom in enumerate(equation.invars):
                value = behind.get(atom) if is_variable(atom) else None
                if value is None or not is_variable(value):
                    continue
                if position not in uses:
                    exact.add(value)
                    continue
                multiplied.add(value)
                if roles.get(value) != "operand":
                    roles[value] = uses[position]
        exact = {value for value in exact if is_variable(value)}
        return cls(multiplied - exact, exact, roles)


def _coefficients_returned(linear: Any, behind: dict[Any, Any]) -> list[Any]:
    """Coefficients that are results of the linear program: zeros, as of constant results."""
    return [atom for atom in linear.outvars if is_variable(atom) and atom in behind]


class _Choice:
    """Chooses what to store so that all coefficients can be rebuilt soundly."""

    def __init__(self, graph: Graph, decisions: dict[Any, Decision], biased: bool) -> None:
        self._graph = graph
        self._decisions = decisions
        self._biased = biased
        self._exact: set[Any] = set()  # what can be had exactly
        self._lossy: dict[Any, bool] = {}

    def store(self, demand: _Demand) -> dict[Any, Stored]:
        """How each value that is stored waits for the backward pass."""
        wanted = {*demand.multiplied, *demand.exact}
        lossless = not any(d.codec for d in self._decisions.values())
        first: set[Any] = set()
        if not self._biased:
            first = cheapest(
                wanted if lossless else demand.exact, self._exact_parents, self._exact_cost
            )
        self._exact = self._had_exactly(first)
        for value in self._graph.order:  # so that recursion stays shallow
            self._is_lossy(value)
        second = cheapest(wanted - self._exact, self._parents, self._cost)
        stored = {value: self._exactly(value, value in demand.exact) for value in first}
        for value in second:
            codec = self._decisions[value].codec
            stored[value] = Stored(codec) if codec else self._exactly(value, False)
        if not self._biased:
            # What exact values give, too, needs no code.
            exact = self._had_exactly({v for v, how in stored.items() if not _is_noisy(how)})
            stored = {v: how for v, how in stored.items() if not (_is_noisy(how) and v in exact)}
        order = {value: i for i, value in enumerate(self._graph.made_by)}
        return dict(sorted(stored.items(), key=lambda item: order.get(item[0], -1)))

    def _exactly(self, value: Any, is_read_exactly: bool) -> Stored:
        if value.aval.dtype == jnp.bool:
            return Stored(Packed(1))
        decision = self._decisions[value]
        note = decision.note
        if decision.codec is not None:
            note = "kept exactly: not only multiplied, or read by what is not looked into"
        elif decision.action == "recompute":
            note = "kept exactly: cannot be computed again from codes without bias"
        return Stored(offload=decision.action == "offload", note=note)

    def _had_exactly(self, stored: set[Any]) -> set[Any]:
        graph = self._graph
        found = {*graph.held, *graph.jaxpr.constvars, *stored}
        for value in graph.order:
            parents = self._exact_parents(value)
            if parents is not None and found.issuperset(parents):
                found.add(value)
        return found

    def _may_recompute(self, value: Any) -> bool:
        again = self._graph.again(value)
        if again is None or again[0].effects:
            return False
        return is_cheap(again[0]) or self._decisions[value].action == "recompute"

    def _exact_parents(self, value: Any) -> list[Any] | None:
        if value in self._graph.held or value in self._graph.jaxpr.constvars:
            return []
        return self._graph.operands(value) if self._may_recompute(value) else None

    def _exact_cost(self, value: Any) -> int:
        decision = self._decisions.get(value)
        if decision is None or decision.action == "offload":
            return 0
        if decision.action == "recompute" and self._may_recompute(value):
            return NEVER
        return nbytes(value.aval)

    def _is_lossy(self, value: Any) -> bool:
        """Whether a value, when the backward pass has it, may come from a code."""
        if not is_variable(value) or value in self._exact:
            return False
        if value not in self._lossy:
            decision = self._decisions[value]
            if decision.codec is not None:
                self._lossy[value] = True
            elif decision.action in ("store", "offload") or not self._may_recompute(value):
                self._lossy[value] = False
            else:
                self._lossy[value] = any(map(self._is_lossy, self._graph.operands(value)))
                if self._parents(value) is None:
                    self._lossy[value] = False
        return self._lossy[value]

    def _parents(self, value: Any) -> list[Any] | None:
        if value in self._exact:
            return []
        if not self._may_recompute(value):
            return None
        again = self._graph.again(value)
        assert again is not None
        operands = self._graph.operands(value)
        if not any(map(self._is_lossy, operands)) or self._biased:
            return operands
        if self._decisions[value].action in ("store", "offload") or not is_cheap(again[0]):
            return None
        return operands if is_affine(again[0], self._is_lossy) else None

    def _cost(self, value: Any) -> int:
        decision = self._decisions.get(value)
        if value in self._exact or decision is None or decision.action == "offload":
            return 0
        if decision.action == "recompute" and self._parents(value) is not None:
            return NEVER
        if decision.codec is not None:
            return coded_nbytes(decision.codec, value.aval.shape, value.aval.dtype)
        return nbytes(value.aval)


def _number_codes(
    linearized: Linearized, graph: Graph, stored: dict[Any, Stored], biased: bool
) -> tuple[Linearized, list[Coefficient], dict[Any, int], dict[Any, int]]:
    """Gives each use of a coefficient its own input of the linear program, with its codes."""
    linear = linearized.linear.jaxpr
    count = len(linearized.coefficients)
    behind = dict(zip(linear.invars, linearized.coefficients, strict=False))
    tangents = tangents_of(linear.eqns, linear.invars[count:])
    roots = _roots(graph, stored)

    def roots_of(atom: Any) -> Collection[Any]:
        value: Any = behind.get(atom) if is_variable(atom) else None
        return roots.get(value, ()) if is_variable(value) else ()

    assignment = paths.Assignment({}, {})
    if not biased:
        assignment = paths.assign(linear, tangents, roots_of)
    inputs: dict[tuple[Any, paths.Uses], None] = {}
    for index, equation in enumerate(linear.eqns):
        for position, atom in enumerate(equation.invars):
            if is_variable(atom) and atom in behind:
                inputs[atom, assignment.uses.get((index, position), ())] = None
    returned = _coefficients_returned(linear, behind)
    inputs |= {(atom, ()): None for atom in returned}

    def split(*given: Any) -> list[Any]:
        coefficients = dict(zip(inputs, given, strict=False))
        env = dict(zip(linear.invars[count:], given[len(inputs) :], strict=True))
        for index, equation in enumerate(linear.eqns):
            values = [
                coefficients[atom, assignment.uses.get((index, position), ())]
                if is_variable(atom) and atom in behind
                else read(env, atom)
                for position, atom in enumerate(equation.invars)
            ]
            env |= dict(zip(equation.outvars, apply(linear, equation, values), strict=True))
        return [
            coefficients[atom, ()] if is_variable(atom) and atom in behind else read(env, atom)
            for atom in linear.outvars
        ]

    arguments = avals([*(atom for atom, _ in inputs), *linear.invars[count:]])
    copies: dict[Any, int] = {}
    for uses in assignment.uses.values():
        for root, number in uses:
            copies[root] = max(number + 1, copies.get(root, 1))
    numbered = dataclasses.replace(linearized, linear=jax.make_jaxpr(split)(*arguments))
    coefficients = [Coefficient(behind[atom], uses) for atom, uses in inputs]
    return numbered, coefficients, copies, assignment.means


def _roots(graph: Graph, stored: dict[Any, Stored]) -> dict[Any, list[Any]]:
    """The codes that each value is rebuilt from."""
    roots: dict[Any, list[Any]] = {}
    for value in (*graph.jaxpr.invars, *graph.order):
        if value in stored:
            roots[value] = [value] if _is_noisy(stored[value]) else []
        else:
            found = [roots.get(operand, []) for operand in graph.operands(value)]
            roots[value] = list(dict.fromkeys(root for part in found for root in part))
    return roots


def _is_noisy(storing: Stored) -> bool:
    return storing.codec is not None and storing.codec != Packed(1)


def _with_copies(value: Any, storing: Stored, copies: int, mean: int | None) -> Stored:
    several = dataclasses.replace(storing, copies=copies)
    if several.nbytes(value.aval) >= nbytes(value.aval):
        return Stored(note=f"kept exactly: {copies} codes take no fewer bytes")
    if mean is not None:
        several = dataclasses.replace(
            several,
            note=f"comes twice on a path, across a mean of {mean}: bias of its variance / {mean}",
        )
    elif copies > 1:
        several = dataclasses.replace(
            several, note=f"comes {copies} times on a path: {copies} independent codes"
        )
    return several
