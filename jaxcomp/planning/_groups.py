"""The parts of a model that a plan decides about, and the policy that a decision makes."""

import dataclasses
import functools
import re
from collections.abc import Collection, Iterable, Mapping

from flax import nnx

from jaxcomp.codecs import SignAware
from jaxcomp.nn._coded import coded_modules
from jaxcomp.policies import recipes
from jaxcomp.policies._policy import Policy
from jaxcomp.policies._rule import Rule

_ATTENTION = "attention"
_UNIT = "norm_act"
_MIN_SIZE = 2**14  # elements of what is worth a copy to the host


@dataclasses.dataclass(frozen=True)
class Groups:
    """The modules of a model, and the group of each.

    A block is a module in a list, such as `blocks/3`. A child of a block that has children of its
    own, such as `blocks/3/attn`, is a group. All else of a block is one group. A block with a batch
    norm is one group as a whole, since its convolutions read the codes of its norms. Outside of
    blocks each module of the model's own attributes is a group. What no module computes is the
    group "".

    Attributes:
        paths: The paths of all modules.
        whole: The blocks with a batch norm.
        has_layers: Whether the model has layers of `jaxcomp.nn`.
    """

    paths: frozenset[str]
    whole: frozenset[str] = frozenset()
    has_layers: bool = False

    @classmethod
    def of(cls, models: Iterable[object]) -> "Groups":
        """The groups of what a step factory applied a strategy to; functions have no modules."""
        paths: set[str] = set()
        whole: set[str] = set()
        has_layers = False
        for model in models:
            if isinstance(model, nnx.Module):
                paths |= {"/".join(map(str, path)) for path, _ in nnx.iter_modules(model)}
                for path, _ in nnx.to_flat_state(nnx.state(model, nnx.BatchStat)):
                    whole.add(block_of("/".join(map(str, path))))
                has_layers = has_layers or bool(coded_modules(model))
        return cls(frozenset(paths - {""}), frozenset(whole - {""}), has_layers)

    @functools.cached_property
    def _parents(self) -> set[str]:
        return {path.rpartition("/")[0] for path in self.paths}

    def group_of(self, path: str) -> str:
        """The group of a module."""
        block = block_of(path)
        if not block:
            return path.partition("/")[0]
        if block in self.whole:
            return block
        child = path.removeprefix(block).removeprefix("/").partition("/")[0]
        inner = f"{block}/{child}"
        return inner if child and inner in self._parents else block

    @functools.cached_property
    def _starts(self) -> set[str]:
        return {path.partition("/")[0] for path in self.paths}

    def group_in(self, scope: str) -> str:
        """The group of the module that a scope of the compiled program names; "" for none."""
        parts = scope.split("/")
        found = ""
        for first, part in enumerate(parts):
            if part in self._starts:
                for end in range(len(parts), first, -1):
                    path = "/".join(parts[first:end])
                    if path in self.paths and len(path) > len(found):
                        found = path
        return self.group_of(found) if found else ""


def block_of(path: str) -> str:
    """The outermost module in a list that a path lies in; "" if there is none.

    Example:
        >>> block_of("blocks/3/attn/query"), block_of("head")
        ('blocks/3', '')
    """
    keys = path.split("/")
    end = next((i for i, key in enumerate(keys) if _is_index(key)), None)
    if end is None:
        return ""
    while end + 1 < len(keys) and _is_index(keys[end + 1]):  # a list in a list
        end += 1
    return "/".join(keys[: end + 1])


def pattern_of(groups: Collection[str]) -> str:
    """A regular expression for groups that differ in their indices alone."""
    blocks = {group: block_of(group) for group in groups}
    if not all(blocks.values()):
        return f"({'|'.join(map(re.escape, sorted(groups)))})"
    (rest,) = {group.removeprefix(block) for group, block in blocks.items()}
    indices: dict[str, list[str]] = {}
    for block in blocks.values():
        keys = block.split("/")
        first = next(i for i, key in enumerate(keys) if _is_index(key))
        start, number = "/".join(keys[:first]), "/".join(keys[first:])
        indices.setdefault(start, []).append(number)
    found = [
        (f"{re.escape(start)}/" if start else "") + f"({'|'.join(sorted(numbers, key=_natural))})"
        for start, numbers in sorted(indices.items())
    ]
    return f"({'|'.join(found)}){re.escape(rest)}"


def _is_index(key: str) -> bool:
    return key.isascii() and key.isdecimal()


def _natural(text: str) -> list[int]:
    return [int(key) for key in text.split("/")]


def policy_of(assignment: Mapping[str, str], biased: bool) -> Policy:
    """The policy of a choice for each group.

    Args:
        assignment: "keep", "recompute", "quantize:bits=N", or what is moved to the host, "offload"
            or "offload:quantize:bits=N", by group.
        biased: Whether batch norms may have codes that clip.
    """
    alike: dict[tuple[int, str, str], list[str]] = {}
    for group, choice in assignment.items():
        block = block_of(group)
        rest = group.removeprefix(block)
        depth = 0 if rest and block else 1 if block else 2 if group else 3
        alike.setdefault((depth, rest, choice), []).append(group)
    policy = Policy(())
    for (_, rest, choice), groups in sorted(alike.items(), key=lambda item: item[0][0]):
        if groups == [""]:
            policy += Policy(rules_of(choice, biased))
            continue
        pattern = pattern_of(groups)
        if choice == "recompute" and not rest:  # what a block's own call makes is where it starts
            policy += Policy(rules_of("keep", biased)).at(pattern)
        policy += Policy(rules_of(choice, biased)).at(f"{pattern}(/.*)?")
    return policy


def rules_of(choice: str, biased: bool) -> tuple[Rule, ...]:
    """The rules of one choice."""
    unrecognized = Rule("keep", op=f"{_ATTENTION}|{_UNIT}", required=False)
    if choice == "offload":
        return (unrecognized, Rule("offload", min_size=_MIN_SIZE, required=False))
    if choice in ("keep", "recompute"):
        return (unrecognized, Rule("keep" if choice == "keep" else "recompute", required=False))
    if choice.startswith("offload:"):
        return _on_host(rules_of(choice.removeprefix("offload:"), biased))
    bits = int(choice.removeprefix("quantize:bits="))
    if biased and bits < 8:
        unit: tuple[Rule, ...] = (Rule(SignAware(bits), op=_UNIT, required=False),)
    elif bits == 2:
        unit = (Rule(SignAware(3, scale_source="range"), op=_UNIT, required=False),)
    else:
        return _optional(recipes.automatic(bits))
    return (*unit, *_optional(recipes.transformer(bits)))


def _optional(policy: Policy) -> tuple[Rule, ...]:
    return tuple(dataclasses.replace(rule, required=False) for rule in policy.rules)


def _on_host(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The same with codes in the host's memory, and no product exactly in the device's."""
    moved = Policy(rules).offloaded().rules
    return tuple(
        dataclasses.replace(rule, action="recompute") if rule.action == "cheapest" else rule
        for rule in moved
    )
