"""`Policy`: ordered rules that say how each value that a backward pass needs is saved."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from jaxcomp._core import table
from jaxcomp.codecs import Codec, Exact, Offload
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.policies._codec_json import codec_from_dict, codec_to_dict
from jaxcomp.policies._rule import Rule

JaxPolicy = Callable[..., object]
"""One of `jax.checkpoint_policies`."""

_VERSION = 1  # of the JSON
_LONGEST = 2**20  # characters of it


@dataclasses.dataclass(frozen=True)
class Policy:
    """How each value that a backward pass needs is saved: the first rule that matches decides.

    A policy is plain data: it can be compared, hashed, printed (`print(policy)` shows a table), and
    written as JSON. `jaxcomp.compress`, `jaxcomp.checkpoint`, `jaxcomp.plan`, `jaxcomp.compare` and
    the command line take one, or what stands for one: a codec, or the spec of a recipe or codec.
    Two policies are joined by `+`; the rules of the first come first.

    What no rule matches is saved as it is where it has to be saved, and recomputed where cheap
    exact steps give it.

    Attributes:
        rules: The rules, in order of precedence.
        lossy_recomputation: Whether nonlinear steps may be recomputed from decoded values. That
            saves fewer bytes and makes the gradient biased.

    Raises:
        TypeError: If `rules` is not a sequence of `Rule`, or `lossy_recomputation` is no bool.

    Example:
        >>> from jaxcomp import Quantize
        >>> policy = Policy((Rule("keep", path="head"), Rule(Quantize(bits=4), min_size=1024)))
        >>> print(policy)
        rule  action                                                    for
        1     keep                                                      path='head'
        2     Quantize(bits=4, group='channel', rounding='stochastic')  min_size=1024
    """

    rules: Sequence[Rule]
    lossy_recomputation: bool = False

    def __post_init__(self) -> None:
        given = self.rules
        is_sequence = isinstance(given, Sequence) and not isinstance(given, str)
        if not is_sequence or not all(isinstance(rule, Rule) for rule in given):
            raise TypeError(f"rules={given!r}: expected a tuple of Rule")
        if not isinstance(self.lossy_recomputation, bool):
            raise TypeError(
                f"lossy_recomputation={self.lossy_recomputation!r}: expected True or False"
            )
        object.__setattr__(self, "rules", tuple(given))

    def __add__(self, other: "Policy") -> "Policy":
        """Returns the rules of both, those of the first in front."""
        if not isinstance(other, Policy):
            return NotImplemented
        lossy = self.lossy_recomputation or other.lossy_recomputation
        return Policy((*self.rules, *other.rules), lossy)

    def at(self, path: str) -> "Policy":
        """Returns the same rules for a part of a model alone.

        Args:
            path: Regular expression for the whole path of a module.

        Raises:
            ValueError: If `path` is not a regular expression, or a rule has a path already.

        Example:
            >>> from jaxcomp import Quantize
            >>> Policy((Rule(Quantize(bits=2)),)).at("blocks/0/.*").rules[0].path
            'blocks/0/.*'
        """
        if placed := [rule for rule in self.rules if rule.path]:
            raise ValueError(f"path={path!r}: expected rules without a path, found {placed[0]}")
        rules = tuple(dataclasses.replace(rule, path=path) for rule in self.rules)
        return Policy(rules, self.lossy_recomputation)

    def offloaded(self) -> "Policy":
        """Returns the same rules with all codes in the host's pinned memory.

        On a GPU the forward pass waits for each copy. A backend without such memory raises an error
        when the step is compiled.

        Example:
            >>> from jaxcomp import Quantize
            >>> Policy((Rule(Quantize(bits=2)),)).offloaded().rules[0].action.on_host
            True
        """

        def moved(rule: Rule) -> Rule:
            codec = rule.action
            if not isinstance(codec, Codec) or isinstance(codec, Exact):
                return rule
            return dataclasses.replace(rule, action=Offload(inner_codec(codec)))

        return Policy(tuple(map(moved, self.rules)), self.lossy_recomputation)

    def to_json(self) -> str:
        """Returns the policy as JSON text, which `from_json` reads.

        Raises:
            TypeError: If a codec is no dataclass of numbers, strings, tuples and codecs.
        """
        rules = []
        for rule in self.rules:
            fields = {f.name: getattr(rule, f.name) for f in dataclasses.fields(rule)}
            if isinstance(rule.action, Codec):
                fields["action"] = codec_to_dict(rule.action)
            rules.append(fields)
        content = {"version": _VERSION, "rules": rules}
        return json.dumps(content | {"lossy_recomputation": self.lossy_recomputation}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Policy":
        """Reads what `to_json` wrote.

        Args:
            text: The JSON text.

        Raises:
            ValueError: If `text` is not such JSON, names an unknown codec, field or version, or has
                more than 1 MiB.

        Example:
            >>> from jaxcomp import Quantize
            >>> policy = Policy((Rule(Quantize(bits=2), op="conv"),))
            >>> Policy.from_json(policy.to_json()) == policy
            True
        """
        try:
            if len(text) > _LONGEST:
                raise ValueError(f"{len(text):,} characters, expected {_LONGEST:,} at most")
            content = json.loads(text)
            if content["version"] != _VERSION:
                raise ValueError(f"version {content['version']!r}, expected {_VERSION}")
            rules = tuple(_read_rule(fields) for fields in content["rules"])
            return cls(rules, content["lossy_recomputation"])
        except Exception as error:  # of what a file may hold, down to a depth that ends the stack
            raise ValueError(f"text: expected JSON of Policy.to_json: {error!r}") from error

    def __str__(self) -> str:
        """Returns a table with a line for each rule."""
        rows = [("rule", "action", "for")]
        for number, rule in enumerate(self.rules, 1):
            conditions = [
                f"{f.name}={getattr(rule, f.name)!r}"
                for f in dataclasses.fields(rule)
                if f.name not in ("action", "required") and getattr(rule, f.name) != f.default
            ]
            place = ", ".join(conditions) or "everything"
            place += "" if rule.required else " (if there is any)"
            rows.append((str(number), str(rule.action), place))
        lines = table.lines(rows)
        if self.lossy_recomputation:
            lines.append("biased: nonlinear steps are recomputed from decoded values")
        return "\n".join(lines)


def has_codecs(policy: Policy | JaxPolicy) -> bool:
    """Returns whether a rule of a policy encodes values."""
    rules = policy.rules if isinstance(policy, Policy) else ()
    return any(isinstance(rule.action, Codec) and not rule.action.is_exact for rule in rules)


def _read_rule(fields: dict[str, Any]) -> Rule:
    action = fields["action"]
    if isinstance(action, dict):
        action = codec_from_dict(action)
    known = {f.name for f in dataclasses.fields(Rule)}
    if unknown := sorted(fields.keys() - known):
        raise ValueError(f"unknown fields of a rule: {unknown}")
    return Rule(**fields | {"action": action})
