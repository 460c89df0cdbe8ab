"""The parts of a model that a plan decides about, and the policy that a decision makes."""

import dataclasses
import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from flax import nnx

from jaxcomp._core.module_scopes import scope_path
from jaxcomp.codecs import Codec, SignAware
from jaxcomp.memory import declared_residuals
from jaxcomp.memory._tracing import TracedStep
from jaxcomp.nn._coded import coded_modules
from jaxcomp.planning._remat import blocks_of
from jaxcomp.policies import recipes
from jaxcomp.policies._policy import Policy
from jaxcomp.policies._rule import Action, Rule

_ATTENTION = "attention"
_UNIT = "norm_act"
_NUMBERED = re.compile(r"\w*_\d+", re.ASCII)
_MIN_SIZE = 2**14  # elements of what is worth a copy to the host
_CODE = "bits="
_KEPT_PRODUCTS = ":products=keep"


@dataclasses.dataclass(frozen=True)
class Groups:
    """The modules of a model, and the group of each.

    A block is a module in a list, such as `blocks/3`, or a numbered one, such as `Net/layers_3`. A
    child of a block that has children of its own, such as `blocks/3/attn`, is a group. All else of
    a block is one group. A block with a batch norm is one group as a whole, since its convolutions
    read the codes of its norms. Outside of blocks each module of the model's own attributes is a
    group. What no module computes is the group "". The modules of a function are its named scopes.

    Attributes:
        paths: The paths of all modules.
        whole: The blocks with a batch norm.
        has_layers: Whether the model has layers of `jaxcomp.nn`.
        of_scopes: Whether the paths are those of a function's named scopes.
        blocks: The blocks that `remat` recomputes, in its order; empty for several models.
    """

    paths: frozenset[str]
    whole: frozenset[str] = frozenset()
    has_layers: bool = False
    of_scopes: bool = False
    blocks: tuple[str, ...] = ()

    @classmethod
    def of(cls, models: Sequence[object], traced: TracedStep) -> "Groups":
        """Returns the groups of what a step factory applied a strategy to.

        Args:
            models: The models.
            traced: The plain step, of which functions have their scopes.
        """
        if not any(isinstance(model, nnx.Module) for model in models):
            residuals = declared_residuals(traced.traced.jaxpr)
            return cls(_with_parents(scope_path(r.scopes) for r in residuals), of_scopes=True)
        paths: set[str] = set()
        whole: set[str] = set()
        has_layers = False
        for model in models:
            if isinstance(model, nnx.Module):
                paths |= {"/".join(map(str, path)) for path, _ in nnx.iter_modules(model)}
                for path, _ in nnx.to_flat_state(nnx.state(model, nnx.BatchStat)):
                    whole.add(block_of("/".join(map(str, path))))
                has_layers = has_layers or bool(coded_modules(model))
        (model, *others) = models
        blocks = blocks_of(model) if isinstance(model, nnx.Module) and not others else ()
        return cls(
            frozenset(paths - {""}), frozenset(whole - {""}), has_layers, blocks=tuple(blocks)
        )

    @property
    def recomputes(self) -> bool:
        """Whether a policy may have blocks computed again."""
        return not (self.has_layers or self.of_scopes)

    @functools.cached_property
    def _parents(self) -> set[str]:
        return {path.rpartition("/")[0] for path in self.paths}

    def group_of(self, path: str) -> str:
        """Returns the group of a module."""
        block = block_of(path)
        if not block:
            outer, _, rest = path.partition("/")
            inner = f"{outer}/{rest.partition('/')[0]}"
            return inner if self.of_scopes and inner in self.paths else outer
        if block in self.whole:
            return block
        child = path.removeprefix(block).removeprefix("/").partition("/")[0]
        inner = f"{block}/{child}"
        return inner if child and inner in self._parents else block

    @functools.cached_property
    def _starts(self) -> set[str]:
        return {path.partition("/")[0] for path in self.paths}

    def group_in(self, scope: str) -> str:
        """Returns the group of the module that a scope of the compiled program names.

        It is "" for none.
        """
        parts = scope.split("/")
        found = ""
        for first, part in enumerate(parts):
            if part in self._starts:
                for end in range(len(parts), first, -1):
                    path = "/".join(parts[first:end])
                    if path in self.paths and len(path) > len(found):
                        found = path
        return self.group_of(found) if found else ""


def _with_parents(paths: Iterable[str]) -> frozenset[str]:
    """Returns paths, and those of the modules that contain them."""
    split = [path.split("/") for path in paths if path]
    return frozenset("/".join(keys[:end]) for keys in split for end in range(1, len(keys) + 1))


def block_of(path: str) -> str:
    """Returns the outermost module of a list, or numbered one, that a path lies in, or "".

    Example:
        >>> block_of("blocks/3/attn/query"), block_of("Net/layers_3/attn"), block_of("head")
        ('blocks/3', 'Net/layers_3', '')
    """
    keys = path.split("/")
    end = next((i for i, key in enumerate(keys) if _is_index(key)), None)
    if end is None:
        end = next((i for i, key in enumerate(keys) if _NUMBERED.fullmatch(key)), None)
    if end is None:
        return ""
    while end + 1 < len(keys) and _is_index(keys[end + 1]):  # a list in a list
        end += 1
    return "/".join(keys[: end + 1])


def is_in(group: str, block: str) -> bool:
    """Returns whether a group is a block or a part of it.

    Example:
        >>> is_in("blocks/1/mlp", "blocks/1"), is_in("blocks/10", "blocks/1")
        (True, False)
    """
    return group == block or group.startswith(f"{block}/")


def pattern_of(groups: Collection[str]) -> str:
    """Returns a regular expression for groups that differ in their indices alone."""
    blocks = {group: block_of(group) for group in groups}
    if not all(blocks.values()):
        return f"({'|'.join(map(re.escape, sorted(groups)))})"
    (rest,) = {group.removeprefix(block) for group, block in blocks.items()}
    indices: dict[str, list[str]] = {}
    for block in blocks.values():
        start, number = _split(block)
        indices.setdefault(start, []).append(number)
    found = [
        f"{re.escape(start)}({'|'.join(sorted(numbers, key=in_blocks))})"
        for start, numbers in sorted(indices.items())
    ]
    return f"({'|'.join(found)}){re.escape(rest)}"


def _split(block: str) -> tuple[str, str]:
    """Returns a block's path up to its index, and the index.

    Example:
        >>> _split("net/blocks/3"), _split("Net/layers_3"), _split("0/1")
        (('net/blocks/', '3'), ('Net/layers_', '3'), ('', '0/1'))
    """
    keys = block.split("/")
    first = next((i for i, key in enumerate(keys) if _is_index(key)), None)
    if first is None:
        name, _, number = block.rpartition("_")
        return f"{name}_", number
    return "".join(f"{key}/" for key in keys[:first]), "/".join(keys[first:])


def _is_index(key: str) -> bool:
    return key.isascii() and key.isdecimal()


def in_blocks(group: str) -> list[int | str]:
    """Returns a sort key: blocks by their numbers, and a block before the groups in it.

    Example:
        >>> sorted(["blocks/10", "blocks/9/mlp", "blocks/9"], key=in_blocks)
        ['blocks/9', 'blocks/9/mlp', 'blocks/10']
    """
    parts = re.split(r"(\d+)", group)  # text and numbers in turns
    return [int(part) if part.isdecimal() else part for part in parts]


def coded(bits: int, keeps_products: bool = False) -> str:
    """Returns the choice of codes of so many bits.

    Args:
        bits: Bits of an element.
        keeps_products: Whether products that have to be exact are kept, not computed again.

    Example:
        >>> coded(4, keeps_products=True)
        'bits=4:products=keep'
    """
    return f"{_CODE}{bits}{_KEPT_PRODUCTS if keeps_products else ''}"


def bits_of(choice: str) -> int | None:
    """Returns the bits of an element that a choice encodes to; None for an exact one.

    Example:
        >>> bits_of("offload:bits=4"), bits_of("bits=2:products=keep")
        (4, 2)
    """
    _, is_coded, rest = choice.partition(_CODE)
    return int(rest.removesuffix(_KEPT_PRODUCTS)) if is_coded else None


def policy_of(assignment: Mapping[str, str], biased: bool) -> Policy:
    """Returns the policy of a choice for each group.

    Args:
        assignment: "keep", "recompute", "bits=N", the same with ":products=keep", or what
            is moved to the host, "offload" or "offload:bits=N", by group.
        biased: Whether batch norms may have 2-bit codes, which are biased.
    """
    alike: dict[tuple[int, str, str], list[str]] = {}
    for group, choice in assignment.items():
        block = block_of(group)
        rest = group.removeprefix(block)
        depth = (2 if "/" in group else 3 if group else 4) if not block else 0 if rest else 1
        alike.setdefault((depth, rest, choice), []).append(group)
    policy = Policy(())
    for (_, rest, choice), groups in sorted(alike.items(), key=lambda item: item[0][0]):
        rules = rules_of(choice, biased)
        if groups == [""]:
            policy += Policy(tuple(map(_of_no_module, rules)))
            continue
        pattern = pattern_of(groups)
        if choice == "recompute" and not rest:  # what a block's own call makes is where it starts
            policy += Policy(rules_of("keep", biased)).at(pattern)
        policy += Policy(rules).at(f"{pattern}{_without_inner(groups, assignment)}(/.*)?")
    return policy


def _of_no_module(rule: Rule) -> Rule:
    """Returns the same; a rule that keeps an operation is for one that no module computes."""
    keeps = rule.op and not isinstance(rule.action, Codec)
    return dataclasses.replace(rule, path="()") if keeps else rule


def _without_inner(groups: Collection[str], others: Iterable[str]) -> str:
    """Returns a regular expression that ends a match where a group inside of these begins."""
    inner = {o.removeprefix(g) for g in groups for o in others if o.startswith(f"{g}/")}
    outermost = sorted(i for i in inner if not any(i.startswith(f"{o}/") for o in inner))
    return f"(?!({'|'.join(map(re.escape, outermost))})(/|$))" if outermost else ""


def rules_of(choice: str, biased: bool) -> tuple[Rule, ...]:
    """Returns the rules of one choice."""
    unrecognized = Rule("keep", op=f"{_ATTENTION}|{_UNIT}", required=False)
    if choice == "offload":
        return (unrecognized, Rule("offload", min_size=_MIN_SIZE, required=False))
    if choice in ("keep", "recompute"):
        return (unrecognized, Rule("keep" if choice == "keep" else "recompute", required=False))
    if choice.startswith("offload:"):
        return _on_host(rules_of(choice.removeprefix("offload:"), biased))
    bits = bits_of(choice)
    assert bits is not None
    if bits > 2:
        rules = _optional(recipes.automatic(bits))
    else:
        unit = Rule(SignAware(2 if biased else 3), op=_UNIT, required=False)
        rules = (unit, *_optional(recipes.transformer(bits)))
    return _exact_products(rules, "keep") if choice.endswith(_KEPT_PRODUCTS) else rules


def _optional(policy: Policy) -> tuple[Rule, ...]:
    return tuple(dataclasses.replace(rule, required=False) for rule in policy.rules)


def _on_host(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Returns the same with codes in the host's memory, and no product exactly in the device's."""
    return _exact_products(Policy(rules).offloaded().rules, "recompute")


def _exact_products(rules: Iterable[Rule], action: Action) -> tuple[Rule, ...]:
    """Returns the same, with another action for products that have to be exact."""
    return tuple(
        dataclasses.replace(rule, action=action) if rule.action == "cheapest" else rule
        for rule in rules
    )
