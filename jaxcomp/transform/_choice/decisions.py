"""Applies a policy to every value of a program."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Literal, cast

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jaxcomp._core.custom_derivative import without_undivided
from jaxcomp.codecs import Codec
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.memory._source_line import source_line
from jaxcomp.policies._policy import Policy
from jaxcomp.policies._rule import Rule
from jaxcomp.policies._value import Value, dtype_name
from jaxcomp.transform._choice.context import Context
from jaxcomp.transform._choice.graph import Graph, coded_nbytes, nbytes
from jaxcomp.transform._choice.outliers import Outliers, outliers
from jaxcomp.transform._choice.poles import masked_later
from jaxcomp.transform._program.origins import module_path
from jaxcomp.transform._program.types import Equation, Variable

Action = Literal["either", "cheapest", "keep", "recompute", "offload"]

# What JAX's policies may return besides booleans, by the names of their types.
_ANSWERS: dict[str, Action] = {
    "SaveableType": "keep",
    "RecomputeType": "recompute",
    "Offloadable": "offload",
}
_EXPECTED = "a boolean or an answer of a policy of jax.checkpoint_policies"


@dataclasses.dataclass(frozen=True)
class Decision:
    """What is done with a value that the backward pass needs.

    Attributes:
        action: "keep" it or "offload" it as it is, "recompute" it, or whichever takes fewer bytes:
            "either" recomputes cheap steps alone, "cheapest" products, too.
        codec: What encodes it; None saves it as it is.
        note: Why it is saved as it is after all.
        is_named: Whether a rule is for the value by its name.
        may_bias: Whether the codec is also for what a `jax.custom_vjp` function's rule reads.
    """

    action: Action = "either"
    codec: Codec | None = None
    note: str = ""
    is_named: bool = False
    may_bias: bool = False


def decide(
    graph: Graph, roles: Mapping[Variable, str], multiplied: Set[Variable], context: Context
) -> dict[Variable, Decision]:
    """Returns the decision for every value that is not held; `context` takes note.

    Args:
        graph: The forward program.
        roles: What the backward pass does with each value.
        multiplied: Those that it multiplies cotangents by.
        context: The policy.

    Raises:
        TypeError: If the policy answers what is no answer, or a codec for a value that it cannot
            store.
    """
    arguments = [v for v in graph.program.arguments if v not in graph.held]
    large = outliers(graph.program, context.outliers) if context.encodes else Outliers({}, {})
    factors = [v for v in large.held if v in multiplied]
    hidden = masked_later(graph.program, graph.is_costly) if context.encodes else set()
    decisions = {}
    for variable in (*arguments, *graph.program.made_by):
        names = graph.names_of(variable)
        if graph.is_own(variable):
            decisions[variable] = Decision("keep")
            continue
        made_by = graph.program.made_by.get(variable)
        step = None if made_by is None else without_undivided(made_by)
        value = Value(
            variable.aval.shape,
            variable.aval.dtype,
            step.primitive.name if step is not None else "",
            names,
            roles.get(variable, "other") if made_by is not None else "input",
            source_line(made_by),
            module_path(made_by),
            context.iterations,
        )
        context.notes.values.append(value)
        named = graph.names.get(variable, [])
        decision = _decide(context, value, step, named)
        if decision.action == "recompute" and value.primitive == "scan":
            decision = Decision("keep", note="kept: a loop is not run again as a whole")
        if decision.codec is not None and variable in large.held:
            constant = f"{large.held[variable].constant:g}"
            note = f"kept exactly: next to its {constant} a code has no levels for other numbers"
            decision = dataclasses.replace(decision, codec=None, note=note)
        elif decision.codec is not None and factors and large.behind.get(variable) == 0:
            constant = f"{large.held[factors[0]].constant:g}"
            note = f"kept exactly: it may be multiplied by {constant} where it is 0"
            decision = dataclasses.replace(decision, codec=None, note=note)
        elif decision.codec is not None and variable in hidden:
            note = "kept exactly: it may be large where it is masked later"
            decision = dataclasses.replace(decision, codec=None, note=note)
        decisions[variable] = decision
    return decisions


def _decide(
    context: Context, value: Value, equation: JaxprEqn | None, named: list[Equation]
) -> Decision:
    policy = context.policy
    if isinstance(policy, Policy):
        fitting = [rule for rule in policy.rules if rule.matches_value(value, size=False)]
        too_large = [rule for rule in fitting if rule.min_size > value.elements]
        context.notes.matched.update(too_large)
        rule = next((rule for rule in fitting if rule not in too_large), None)
        if rule is None:
            least = min((rule.min_size for rule in too_large), default=0)
            note = f"fewer than {least:,} elements" if least else _note_of_dtype(policy, value)
            return Decision(note=note)
        context.notes.matched.add(rule)
        if not rule.is_for_values_alone and all(r.action == "keep" for r in policy.rules):
            return Decision()
        return _by_rule(rule, value)
    answers = [
        _by_answer(policy(e.primitive, *[a.aval for a in e.invars], **e.params), value)
        for e in ([equation] if equation is not None else []) + named
    ]
    for action in ("offload", "keep", "either", "recompute"):
        for decision in answers:
            if decision.action == action:
                return decision
    return Decision()


def codec_in_roles(
    value: Value, roles: Sequence[str], serves: Callable[[Codec], bool], context: Context
) -> Codec | None:
    """Returns the codec that a policy has for a value whatever it is of some roles.

    `context` takes note of it. None if it has another for each role, or one that does not serve.
    """
    assert isinstance(context.policy, Policy)
    values = [dataclasses.replace(value, role=role) for role in roles]
    first_rules = [
        next((r for r in context.policy.rules if r.matches_value(v)), None) for v in values
    ]
    rules = [rule for rule in first_rules if rule is not None]
    if len(rules) < len(values) or len({rule.action for rule in rules}) > 1:
        return None
    action = rules[0].action
    if not isinstance(action, Codec) or not serves(action):
        return None
    codec = _by_rule(rules[0], value).codec
    if codec is not None:
        context.notes.values.extend(values)
        context.notes.matched.update(rules)
    return codec


def _note_of_dtype(policy: Policy, value: Value) -> str:
    """Says that a codec would encode a value if it were of another dtype."""
    if value.is_float or not jnp.issubdtype(value.dtype, jnp.inexact):
        return ""
    single = dataclasses.replace(value, dtype=jnp.float32)
    rules = [rule for rule in policy.rules if isinstance(rule.action, Codec)]
    is_asked = any(rule.matches_value(single) for rule in rules)
    return f"no codec encodes {dtype_name(value.dtype)}" if is_asked else ""


def _by_rule(rule: Rule, value: Value) -> Decision:
    codec = rule.action
    if not isinstance(codec, Codec):
        return Decision(cast(Action, codec))  # only rules for regions have others
    if inner_codec(codec).is_exact:
        return Decision("offload" if codec.on_host else "keep")
    if not set(codec.kinds) & set(Codec.kinds):
        raise ValueError(
            f"{rule} matches {describe(value)}: {codec} is only for layers of jaxcomp.nn of the "
            f"kinds {', '.join(codec.kinds)}"
        )
    try:
        if not value.is_float:
            raise TypeError("only float32, bfloat16 and float16 can be encoded")
        coded, exact = coded_nbytes(codec, value.shape, value.dtype), nbytes(value)
    except (TypeError, ValueError) as error:
        if not rule.required:
            return Decision(note=str(error))
        raise type(error)(f"{rule} matches {describe(value)}: {error}") from error
    if coded >= exact:
        return Decision(note=f"{codec} takes no fewer bytes")
    return Decision(codec=codec, is_named=bool(rule.names), may_bias=rule.is_for_residuals)


def _by_answer(answer: object, value: Value) -> Decision:
    """Returns what an answer of one of `jax.checkpoint_policies` says."""
    if isinstance(answer, bool):
        return Decision("keep" if answer else "recompute")
    action = _ANSWERS.get(type(answer).__name__)
    if action is None:
        raise TypeError(f"policy answers {answer!r} for {describe(value)}: expected {_EXPECTED}")
    return Decision(action)


def describe(value: Value) -> str:
    """Returns a value in words."""
    name = f" named {', '.join(value.names)}" if value.names else ""
    maker = f" of {value.primitive}" if value.primitive else ""
    where = f" at {value.source}" if value.source else ""
    return f"{dtype_name(value.dtype)}{list(value.shape)}{name}{maker}{where}"
