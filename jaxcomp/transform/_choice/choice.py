"""Which values of a forward program wait for the backward pass, so that it can be rebuilt."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jaxtyping import Array

from jaxcomp.codecs import Codec, Encoded, Packed, Quantize
from jaxcomp.transform._choice.cut import NEVER, cheapest
from jaxcomp.transform._choice.decisions import Decision
from jaxcomp.transform._choice.graph import REDUCED, Graph, coded_nbytes, nbytes, plain_nbytes
from jaxcomp.transform._program.custom_rules import is_rule_of_user
from jaxcomp.transform._program.linearized import Linearized
from jaxcomp.transform._program.primitives import is_affine, is_cheap, linear_uses, tangents_of
from jaxcomp.transform._program.program import Program
from jaxcomp.transform._program.types import Atom, Variable, is_variable

BIASES = "kept exactly: a code would bias what reads it"
_OF_A_RULE = "; Rule(codec, op='custom_vjp') encodes it all the same"
_MUCH = 8  # times as many bytes
_STEPS = 32  # of the search for what a value is made of
_IS_BIASED = "biased: the rule of a jax.custom_vjp function reads the code"


@dataclasses.dataclass(frozen=True)
class Stored:
    """How one value waits for the backward pass.

    Attributes:
        codec: The codec; None is as it is.
        copies: Codes of independent noise, one for each time that a path holds the value.
        offload: Whether it waits in the host's memory.
        note: What there is to say about it.
        bounds: Between which numbers all its elements are known to lie; for `Quantize`.
    """

    codec: Codec | None = None
    copies: int = 1
    offload: bool = False
    note: str = ""
    bounds: tuple[float, float] | None = None

    def encode(self, value: Array, seed: Array | None) -> Encoded:
        """Returns one code of a value, whose range is looked for only if it is not known."""
        assert self.codec is not None
        if self.bounds is None:
            return self.codec.encode(value, seed)
        return cast(Quantize, self.codec).encode_within(value, *self.bounds, seed)

    def nbytes(self, aval: ShapedArray) -> int:
        """Returns the bytes in the device's memory."""
        if self.offload or aval.memory_space == jax.memory.Space.Host:
            return 0
        if self.codec is None:
            return plain_nbytes(aval)
        if self.bounds is None:
            return self.copies * coded_nbytes(self.codec, aval.shape, aval.dtype)
        return self.copies * _nbytes_of_code(self, aval.shape, aval.dtype)

    @property
    def is_on_host(self) -> bool:
        """Whether it waits in the host's memory, as it is or as a code."""
        return self.offload or (self.codec is not None and self.codec.on_host)

    @property
    def is_noisy(self) -> bool:
        """Whether what comes back is not exact."""
        return self.codec is not None and self.codec != Packed(1)


@functools.lru_cache(4096)
def _nbytes_of_code(storing: Stored, shape: tuple[int, ...], dtype: Any) -> int:
    """Returns the bytes of one code, which is traced once for each shape."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    return int(jax.eval_shape(storing.encode, x, jnp.uint32(0)).nbytes)


@dataclasses.dataclass(frozen=True)
class Demand:
    """The values of the forward program that the linear program reads.

    Attributes:
        multiplied: Those that it only multiplies tangents by.
        residuals: Those that rules of users' `jax.custom_vjp` functions read, too.
        exact: Those that it reads in yet another way, too: predicates, indices, what an inner
            `jax.checkpoint` and loops read.
        roles: The role of each.
    """

    multiplied: set[Any]
    residuals: set[Any]
    exact: set[Any]
    roles: dict[Variable, str]

    @classmethod
    def of(cls, linearized: Linearized) -> "Demand":
        """Reads it off a linear program."""
        linear = linearized.linear
        count = len(linearized.coefficients)
        behind = dict(zip(linear.arguments, linearized.coefficients, strict=False))
        tangents = tangents_of(linear.equations, linear.arguments[count:])
        multiplied: set[Any] = set()
        residuals: set[Any] = set()
        exact: set[Any] = {behind[v] for v in coefficients_returned(linear, behind)}
        roles: dict[Variable, str] = {}
        for equation in linear.equations:
            uses = linear_uses(equation, tangents)
            operands = [behind.get(a) if is_variable(a) else None for a in equation.invars]
            values = {i: value for i, value in enumerate(operands) if is_variable(value)}
            if is_rule_of_user(equation):
                residuals.update(values.values())
                roles |= _roles_of_residuals([*values.values()])
                continue
            for position, value in values.items():
                if position not in uses:
                    exact.add(value)
                    continue
                multiplied.add(value)
                if roles.get(value) not in ("operand", "residual"):
                    roles[value] = uses[position]
        exact = {value for value in exact if is_variable(value)}
        residuals -= exact
        return cls(multiplied - residuals - exact, residuals, exact, roles)


def _roles_of_residuals(values: Sequence[Variable]) -> dict[Variable, str]:
    """Returns the roles of what a user's rule reads; small values are statistics of large ones."""
    largest = max((value.aval.size for value in values), default=0)
    is_small = {value: value.aval.size * REDUCED <= largest for value in values}
    return {value: "statistic" if small else "residual" for value, small in is_small.items()}


def coefficients_returned(linear: Program, behind: dict[Variable, Atom]) -> list[Any]:
    """Returns coefficients that are results of the linear program: zeros, as of constants."""
    return [atom for atom in linear.results if is_variable(atom) and atom in behind]


def choose(
    graph: Graph,
    decisions: dict[Variable, Decision],
    demand: Demand,
    *,
    biased: bool,
    instead_of: Mapping[Variable, Stored] = MappingProxyType({}),
) -> dict[Variable, Stored]:
    """Chooses what to store so that all coefficients can be rebuilt soundly.

    Args:
        graph: The forward program.
        decisions: What the policy said of each value.
        demand: What the backward pass reads.
        biased: Whether non-linear steps may be computed again from codes.
        instead_of: Another choice. A value that it has a code for costs that much less if it is
            stored exactly, as it then needs no code.

    Returns:
        How each value that is stored waits for the backward pass, in the order they are made.
    """
    return _Choice(graph, decisions, biased, instead_of).store(demand)


def without_codecs(decisions: dict[Variable, Decision], note: str) -> dict[Variable, Decision]:
    """Returns the same decisions, with values that have a codec left as they are, and a note."""

    def exact(decision: Decision) -> Decision:
        has_codec = decision.codec is not None
        return dataclasses.replace(decision, codec=None, note=note) if has_codec else decision

    return {value: exact(decision) for value, decision in decisions.items()}


def without_products(decisions: dict[Variable, Decision]) -> dict[Variable, Decision]:
    """Returns the same decisions, with no product computed again where that is open."""
    return {
        value: dataclasses.replace(decision, action="either") if is_open(decision) else decision
        for value, decision in decisions.items()
    }


def is_open(decision: Decision) -> bool:
    """Returns whether it is open if a product is computed again."""
    return decision.action == "cheapest"


def total_bytes(stored: dict[Variable, Stored]) -> int:
    """Returns the bytes of all stored values in the device's memory."""
    return sum(how.nbytes(value.aval) for value, how in stored.items())


class _Choice:
    """Chooses what to store so that all coefficients can be rebuilt soundly."""

    def __init__(
        self,
        graph: Graph,
        decisions: dict[Variable, Decision],
        biased: bool,
        instead_of: Mapping[Variable, Stored],
    ) -> None:
        self._graph = graph
        self._decisions = decisions
        self._biased = biased
        self._instead_of = instead_of
        self._exact: set[Any] = set()  # what can be had exactly
        self._lossy: dict[Any, bool] = {}
        self._residuals: set[Any] = set()
        self._recomputable = {v for v in graph.order if self._is_recomputable(v)}

    def store(self, demand: Demand) -> dict[Variable, Stored]:
        """Returns how each value that is stored waits for the backward pass."""
        self._residuals = demand.residuals
        exactly = demand.exact | {v for v in demand.residuals if not self._may_be_coded(v)}
        wanted = demand.multiplied | demand.residuals | demand.exact
        lossless = not any(d.codec for d in self._decisions.values())
        first, again = set[Any](), set[Any]()
        if not self._biased:
            if not lossless:
                exactly |= set(filter(self._is_of_few_bytes, demand.multiplied))
            first, again = cheapest(
                wanted if lossless else exactly,
                self._exact_parents,
                self._exact_cost,
                self._recompute_cost,
            )
        self._exact = self._had_exactly(first, again)
        for value in self._graph.order:  # so that recursion stays shallow
            self._is_lossy(value)
        second, _ = cheapest(wanted - self._exact, self._parents, self._cost, self._recompute_cost)
        stored = {value: self._exactly(value) for value in first}
        for value in second:
            codec = self._decisions[value].codec
            note = _IS_BIASED if self._may_be_coded(value) else ""
            stored[value] = Stored(codec, note=note) if codec else self._exactly(value)
        if not self._biased:
            # What exact values give, too, needs no code.
            exact = self._had_exactly({v for v, how in stored.items() if not how.is_noisy}, again)
            stored = {v: how for v, how in stored.items() if not (how.is_noisy and v in exact)}
            stored |= self._codes_between(stored, wanted)
        order = {value: i for i, value in enumerate(self._graph.program.made_by)}
        return dict(sorted(stored.items(), key=lambda item: order.get(item[0], -1)))

    def _codes_between(
        self, stored: Mapping[Variable, Stored], wanted: Set[Any]
    ) -> dict[Variable, Stored]:
        """Returns codes of values that would otherwise be made of more bytes than they have.

        Such are the sums of a residual stream: each is made of the codes of all terms before it.
        """
        needed, pending = set[Any](), [*wanted]
        while pending:
            value = pending.pop()
            if value not in needed and value not in self._exact:
                needed.add(value)
                pending += () if value in stored else self._parents(value) or ()
        between: dict[Variable, Stored] = {}
        made_of: dict[Any, dict[Variable, int]] = {}  # the bytes of codes, by what they encode
        for value in filter(needed.__contains__, self._graph.order):
            codec = self._decisions[value].codec
            if value in stored:
                made_of[value] = {value: stored[value].nbytes(value.aval)}
                continue
            parents = self._parents(value) or ()
            made_of[value] = {k: n for v in parents for k, n in made_of.get(v, {}).items()}
            if codec is not None and sum(made_of[value].values()) > nbytes(value.aval):
                between[value] = Stored(codec)
                made_of[value] = {value: between[value].nbytes(value.aval)}
        return between

    def _is_of_few_bytes(self, value: Variable) -> bool:
        """Returns whether cheap steps make a value of exact ones that take less than its code.

        These are much smaller, as the factors of an outer product. A step is not affine, or it
        could be taken from their codes.
        """
        decision = self._decisions.get(value)
        if decision is None or decision.codec is None or value in self._graph.free:
            return False
        pending, seen, needed_bytes, are_affine = [value], {value}, 0, True
        while pending and len(seen) <= _STEPS:
            one = pending.pop()
            if one in self._graph.free:
                continue
            if one is not value and nbytes(one.aval) * _MUCH <= nbytes(value.aval):
                needed_bytes += nbytes(one.aval)
                continue
            parents = self._exact_parents(one)
            if parents is None or self._recompute_cost(one):
                return False
            defined = self._graph.defining_equation(one)
            are_affine = are_affine and (
                defined is None
                or is_affine(defined[0], lambda a: is_variable(a) and a not in self._graph.free)
            )
            pending += [v for v in parents if v not in seen]
            seen.update(parents)
        code = coded_nbytes(decision.codec, value.aval.shape, value.aval.dtype)
        return not (pending or are_affine) and needed_bytes < code

    def _may_be_coded(self, value: Variable) -> bool:
        """Returns whether a rule has a codec for a residual of a `jax.custom_vjp` function."""
        decision = self._decisions.get(value)
        return decision is not None and decision.codec is not None and decision.may_bias

    def _exactly(self, value: Variable) -> Stored:
        if value.aval.dtype == jnp.bool:
            return Stored(Packed(1))
        decision = self._decisions[value]
        note = decision.note
        if decision.codec is not None:
            note = BIASES
        elif decision.action == "recompute":
            note = "kept exactly: cannot be computed again from codes without bias"
        if note == BIASES and value in self._residuals:
            note += _OF_A_RULE
        on_host = decision.codec is not None and decision.codec.on_host
        return Stored(offload=on_host or decision.action == "offload", note=note)

    def _had_exactly(self, stored: set[Variable], again: set[Variable]) -> set[Any]:
        """Returns what follows from exact values; products only if they are made `again` anyway."""
        graph = self._graph
        found = {*graph.held, *graph.program.constants, *stored}
        for value in graph.order:
            parents = self._exact_parents(value)
            free = value in again or not self._recompute_cost(value)
            if parents is not None and free and found.issuperset(parents):
                found.add(value)
        return found

    def _is_recomputable(self, value: Variable) -> bool:
        defined = self._graph.defining_equation(value)
        if defined is None or defined[0].effects or self._graph.is_own(value):
            return False
        decision = self._decisions[value]
        action = decision.action
        # With bias, a code that is asked for by name is where steps start again.
        starts = self._biased and decision.codec is not None and decision.is_named
        if (action == "keep" or starts) and value not in self._graph.free:
            return False
        return is_cheap(defined[0]) or action in ("recompute", "cheapest")

    def _recompute_cost(self, value: Variable) -> int:
        """Returns the cost, in bytes, of making a product again if the policy allows it."""
        decision = self._decisions.get(value)
        if decision is None or not is_open(decision):
            return 0
        defined = self._graph.defining_equation(value)
        if defined is None or is_cheap(defined[0]):
            return 0
        return nbytes(value.aval) // 2

    def _exact_parents(self, value: Variable) -> list[Any] | None:
        if value in self._graph.held or value in self._graph.program.constants:
            return []
        return self._graph.operands(value) if value in self._recomputable else None

    def _exact_cost(self, value: Variable) -> int:
        decision = self._decisions.get(value)
        if decision is None or decision.action == "offload":
            return 0
        if decision.action == "recompute" and value in self._recomputable:
            return NEVER
        before = self._instead_of.get(value)
        without = before.nbytes(value.aval) if before is not None and before.is_noisy else 0
        return nbytes(value.aval) - without

    def _is_lossy(self, value: Variable) -> bool:
        """Returns whether a value, when the backward pass has it, may come from a code."""
        if not is_variable(value) or value in self._exact:
            return False
        if value not in self._lossy:
            decision = self._decisions[value]
            if decision.codec is not None:
                self._lossy[value] = True
            elif decision.action in ("keep", "offload") or value not in self._recomputable:
                self._lossy[value] = False
            else:
                self._lossy[value] = any(map(self._is_lossy, self._graph.operands(value)))
                if self._parents(value) is None:
                    self._lossy[value] = False
        return self._lossy[value]

    def _parents(self, value: Variable) -> list[Any] | None:
        if value in self._exact:
            return []
        if value not in self._recomputable:
            return None
        defined = self._graph.defining_equation(value)
        assert defined is not None
        if is_open(self._decisions[value]) and not is_cheap(defined[0]):
            return None  # what needs no exact value has a code
        operands = self._graph.operands(value)
        if not any(map(self._is_lossy, operands)) or self._biased:
            return operands
        if self._decisions[value].action in ("keep", "offload") or not is_cheap(defined[0]):
            return None
        return operands if is_affine(defined[0], self._is_lossy) else None

    def _cost(self, value: Variable) -> int:
        decision = self._decisions.get(value)
        if value in self._exact or decision is None or decision.action == "offload":
            return 0
        if decision.action == "recompute" and self._parents(value) is not None:
            return NEVER
        if decision.codec is not None:
            return coded_nbytes(decision.codec, value.aval.shape, value.aval.dtype)
        return nbytes(value.aval)
