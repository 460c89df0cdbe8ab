"""Asks a policy about every value of a program."""

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jax.extend.core import JaxprEqn

from jaxcomp.codecs import Codec, Exact
from jaxcomp.policies._policies import RECOMPUTABLE, CodecPolicy, Match, Value, dtype_name
from jaxcomp.transform._graph import LOOP, Graph, coded_nbytes, nbytes
from jaxcomp.transform._origins import module_path, source

Policy = Codec | CodecPolicy | Callable[..., Any]
Action = typing.Literal["either", "again", "store", "recompute", "offload"]

# What JAX's policies may return besides booleans, by the names of their types.
_ANSWERS: dict[str, Action] = {
    "SaveableType": "store",
    "RecomputeType": "recompute",
    "Offloadable": "offload",
}
_EXPECTED = "a codec, a boolean, None, or an answer of a jax.checkpoint policy"


@dataclasses.dataclass(frozen=True)
class Decision:
    """What is done with a value that the backward pass needs.

    Attributes:
        action: "store" it or "offload" it as it is, "recompute" it, or "either": whatever takes
            fewer bytes, as "again", with which products count among what may be computed.
        codec: How it is stored; None is exactly.
        note: Why it is stored exactly after all.
    """

    action: Action = "either"
    codec: Codec | None = None
    note: str = ""


def check_policy(policy: Any) -> None:
    """Raises a TypeError unless `policy` is a codec or a function."""
    if not isinstance(policy, Codec) and (isinstance(policy, type) or not callable(policy)):
        raise TypeError(
            f"policy={policy!r}: expected a codec such as Quantize(bits=4), a policy of "
            "jaxcomp.policies, or one of jax.checkpoint_policies"
        )


@dataclasses.dataclass(frozen=True)
class Asked:
    """A policy, what it was asked about a function, and by which of its rules it answered.

    Attributes:
        policy: A codec or a policy.
        values: In the function itself and in the iterations of its loops.
        hits: The rules that had an answer.
    """

    policy: Policy
    values: list[Value] = dataclasses.field(default_factory=list)
    hits: set[Any] = dataclasses.field(default_factory=set)

    def check(self) -> None:
        """Raises a ValueError if a rule of the policy has matched nothing."""
        if isinstance(self.policy, CodecPolicy):
            _check_hits(self.policy, self.hits, self.values)


def decide(graph: Graph, roles: Mapping[Any, str], asked: Asked) -> dict[Any, Decision]:
    """The decision for every value that is not held; `asked` is told.

    Raises:
        TypeError: If the policy answers what is no answer, or a codec for a value that it cannot
            store.
    """
    arguments = [v for v in graph.jaxpr.invars if v not in graph.held]
    decisions = {}
    for variable in (*arguments, *graph.made_by):
        names = graph.names_of(variable)
        if any(name.startswith(LOOP) for name in names):
            decisions[variable] = Decision("store")  # the policy was asked in the loop
            continue
        made_by = graph.made_by.get(variable)
        value = Value(
            variable.aval.shape,
            variable.aval.dtype,
            made_by.primitive.name if made_by is not None else "",
            names,
            roles.get(variable, "other") if made_by is not None else "input",
            source(made_by),
            module_path(made_by),
        )
        asked.values.append(value)
        named = graph.names.get(variable, [])
        decision = _decide(asked.policy, value, made_by, named, asked.hits)
        if decision.action == "recompute" and value.primitive == "scan":
            decision = Decision("store", note="kept: a loop is not run again as a whole")
        decisions[variable] = decision
    return decisions


def _decide(
    policy: Policy,
    value: Value,
    equation: JaxprEqn | None,
    named: list[JaxprEqn],
    hits: set[Any],
) -> Decision:
    if isinstance(policy, Codec):
        if isinstance(policy, Exact) or value.role == "statistic" or not value.is_float:
            return Decision()
        try:
            return _by_codec(policy, value)
        except (TypeError, ValueError) as error:
            return Decision(note=str(error))
    if isinstance(policy, CodecPolicy):
        for rule in policy.rules:
            answer = rule(value)
            if answer is not None:
                hits.add(rule)
                return _decision(answer, value)
        return Decision()
    found = [
        _decision(policy(e.primitive, *[a.aval for a in e.invars], **e.params), value)
        for e in ([equation] if equation is not None else []) + named
    ]
    for action in ("offload", "store", "either", "recompute"):
        for decision in found:
            if decision.action == action:
                return decision
    return Decision()


def _decision(answer: Any, value: Value) -> Decision:
    if isinstance(answer, Exact):
        return Decision("store")
    if isinstance(answer, Codec):
        if not value.is_float:
            raise TypeError(
                f"policy answers {answer} for {describe(value)}: only float32, bfloat16 and "
                "float16 can have a codec"
            )
        try:
            return _by_codec(answer, value)
        except ValueError as error:
            raise ValueError(f"policy answers {answer} for {describe(value)}: {error}") from error
    if answer is None:
        return Decision()
    if isinstance(answer, str) and answer == RECOMPUTABLE:
        return Decision("again")
    if isinstance(answer, bool):
        return Decision("store" if answer else "recompute")
    action = _ANSWERS.get(type(answer).__name__)
    if action is None:
        raise TypeError(f"policy answers {answer!r} for {describe(value)}: expected {_EXPECTED}")
    return Decision(action)


def _by_codec(codec: Codec, value: Value) -> Decision:
    coded, exact = coded_nbytes(codec, value.shape, value.dtype), nbytes(value)
    if coded >= exact:
        return Decision(note=f"{codec} takes no fewer bytes")
    return Decision(codec=codec)


def describe(value: Value) -> str:
    """A value in words."""
    name = f" named {', '.join(value.names)}" if value.names else ""
    made = f" of {value.primitive}" if value.primitive else ""
    where = f" at {value.source}" if value.source else ""
    return f"{dtype_name(value.dtype)}{list(value.shape)}{name}{made}{where}"


def _check_hits(policy: CodecPolicy, hits: set[Any], values: list[Value]) -> None:
    for rule in policy.rules:
        if isinstance(rule, Match) and rule.required and rule not in hits:
            names, primitives, roles, paths = (
                ", ".join(sorted(found)) or "none"
                for found in (
                    {name for value in values for name in value.names},
                    {value.primitive for value in values if value.primitive},
                    {value.role for value in values},
                    {value.path for value in values if value.path},
                )
            )
            raise ValueError(
                f"{rule} matches nothing, or only what an earlier rule took; the function has "
                f"names: {names}; primitives: {primitives}; roles: {roles}; paths: {paths}; at "
                f"most {max((math.prod(v.shape) for v in values), default=0)} elements"
            )
