"""`apply`: sets the codecs of a model's `jaxcomp.nn` layers."""

import dataclasses
import itertools
from collections.abc import Sequence

from flax import nnx

from jaxcomp._core import table
from jaxcomp.codecs import Codec, Exact
from jaxcomp.nn._coded import coded_modules, covered_paths
from jaxcomp.policies._rules import Rule, Rules


@dataclasses.dataclass(frozen=True)
class Decision:
    """What was decided for one module.

    Attributes:
        path: Its path.
        kind: Its kind of operation.
        codec: How it stores what waits for its backward pass.
    """

    path: str
    kind: str
    codec: Codec


@dataclasses.dataclass(frozen=True)
class Plan:
    """The decisions for all modules of a model that have a coded form; prints as a table.

    Not listed is what a module covers that has a codec: norms, ReLU and pool of a `NormAct`. A
    convolution whose input brings its code keeps that, whatever is decided for it here.
    """

    decisions: tuple[Decision, ...]

    def __str__(self) -> str:
        """One line for each module."""
        rows = [("path", "op", "codec")]
        rows += [(d.path, d.kind, str(d.codec)) for d in self.decisions]
        return "\n".join(table.lines(rows))


def apply(model: nnx.Module, rules: Rules) -> Plan:
    """Sets the codecs of a model's `jaxcomp.nn` modules; of several matching rules the first wins.

    Args:
        model: Any Flax NNX model; modules of Flax's own stay as they are.
        rules: The rules, in order of precedence; what none matches keeps the codec that it has.

    Returns:
        What every module now stores by.

    Raises:
        TypeError: If `rules` is not a sequence of rules.
        ValueError: If a rule matches nothing, or gives a codec to a module that cannot store by it.
            The model is then unchanged. A module that is shared has the first of its paths.

    Example:
        >>> from jaxcomp import Quantize
        >>> from jaxcomp.nn import Linear
        >>> model = nnx.Sequential(Linear(4, 4, rngs=nnx.Rngs(0)))
        >>> print(apply(model, (Rule(Quantize(bits=4), op="dot"),)).decisions[0].path)
        layers/0
    """
    if not isinstance(rules, Sequence) or not all(isinstance(rule, Rule) for rule in rules):
        raise TypeError(f"rules={rules!r}: expected a tuple of Rule, as a recipe returns")
    modules = coded_modules(model)
    used = set()
    decisions = {}
    covered: set[str] = set()
    for path in sorted(modules, key=lambda path: path.count("/")):  # from outside in
        if path in covered:
            continue
        module = modules[path]
        codec = module.codec or Exact()
        matching = (i for i, rule in enumerate(rules) if rule.matches(path, module.kind))
        for i in itertools.islice(matching, 1):
            codec = rules[i].codec
            used.add(i)
            try:
                module.check_codec(codec)
            except ValueError as error:
                raise ValueError(f"{rules[i]} matches {path}: {error}") from error
        if not isinstance(codec, Exact):
            covered |= covered_paths(path, module)
        decisions[path] = Decision(path, module.kind, codec)
    for i, rule in enumerate(rules):
        if rule.required and i not in used:
            kinds = (
                ", ".join(sorted({module.kind for module in modules.values()}))
                or "no coded modules"
            )
            raise ValueError(
                f"{rule} matches nothing, or only what an earlier rule took or a norm_act with a "
                f"codec covers; the model has: {kinds}"
            )
    decided = [decisions[path] for path in modules if path in decisions]
    for decision in decided:
        exact = isinstance(decision.codec, Exact)
        modules[decision.path].codec = None if exact else decision.codec
    return Plan(tuple(decided))
