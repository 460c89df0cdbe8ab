"""The codecs that a policy gives to a model's layers of `jaxcomp.nn`."""

import dataclasses
from collections.abc import Collection

from flax import nnx

from jaxcomp.codecs import Codec, Exact
from jaxcomp.nn._coded import Coded, coded_modules, covered_paths
from jaxcomp.nn._linear import Stem
from jaxcomp.policies._policy import Policy
from jaxcomp.policies._rule import Rule
from jaxcomp.transform._recognition.products import CONV, DOT
from jaxcomp.transform._recognition.recognize import KINDS, is_for_units


@dataclasses.dataclass(frozen=True)
class LayerCodecs:
    """What a policy decides about the layers of `jaxcomp.nn` of a model.

    Attributes:
        codecs: The codec of each layer that a rule matches, by path.
        unmatched: The rules that match no layer.
        rules: All rules.
        is_mixed: Whether the model can be called, and has convolutions or linear layers of Flax
            beside layers of `jaxcomp.nn`.
        has_layers: Whether the model has layers of `jaxcomp.nn`.
    """

    codecs: dict[str, Codec]
    unmatched: tuple[Rule, ...]
    rules: tuple[Rule, ...] = ()
    is_mixed: bool = False
    has_layers: bool = False

    @classmethod
    def of(cls, model: nnx.Module, policy: Policy) -> "LayerCodecs":
        """Applies the rules of a policy to each layer; of several that match the first decides.

        A layer that another one covers, such as the norm of a `NormAct` with a codec, saves nothing
        and is left out.

        Args:
            model: Any Flax NNX model. A module that is shared has the first of its paths.
            policy: The policy.

        Raises:
            ValueError: If a rule gives a layer a codec that the layer cannot save by.
        """
        modules = coded_modules(model)
        matched: set[int] = set()
        codecs: dict[str, Codec] = {}
        covered: set[str] = set()
        for path in sorted(modules, key=lambda path: path.count("/")):  # from outside in
            if path in covered:
                continue
            module = modules[path]
            codec = module.codec
            for number, rule in enumerate(policy.rules):
                if rule.matches_layer(path, module.kind):
                    matched.add(number)
                    codec = rule.action if isinstance(rule.action, Codec) else Exact()
                    try:
                        module.check_codec(codec)
                    except ValueError as error:
                        raise ValueError(f"{rule} matches {path}: {error}") from error
                    codecs[path] = codec
                    break
            if not isinstance(codec, Exact | None):
                covered |= covered_paths(path, module)
        unmatched = (rule for i, rule in enumerate(policy.rules) if i not in matched)
        stock = [module for _, module in nnx.iter_modules(model) if _is_stock(module)]
        is_mixed = callable(model) and bool(modules) and bool(stock)
        return cls(codecs, tuple(unmatched), tuple(policy.rules), is_mixed, bool(modules))

    def rules_for_call(self) -> tuple[Rule, ...] | None:
        """Returns the rules for a model's call as a whole; None if there is no need to trace it.

        There is one if no layer matches a rule, if a required rule matches no layer, or if the
        model has layers of Flax, too. What a layer of `jaxcomp.nn` saves stays as it is.
        """
        kinds = set(KINDS)
        if self.has_layers and not self.is_mixed:
            kinds -= {CONV, DOT}
        rules = tuple(
            rule if rule in self.unmatched else dataclasses.replace(rule, required=False)
            for rule in (self.rules if self.is_mixed else self.unmatched)
            if rule.is_for_values or rule.is_for_regions or is_for_units(rule, kinds)
        )
        is_required = any(rule.required for rule in rules)
        return rules if is_required or self.is_mixed or not self.codecs else None

    def set(self, model: nnx.Module) -> None:
        """Gives the layers their codecs; `Exact()` becomes None, the stock behaviour."""
        modules = coded_modules(model)
        for path, codec in self.codecs.items():
            modules[path].codec = None if isinstance(codec, Exact) else codec


def _is_stock(module: nnx.Module) -> bool:
    """Returns whether it is a convolution or linear layer of Flax that saves its input."""
    layers = nnx.Conv, nnx.ConvTranspose, nnx.Linear, nnx.LinearGeneral, nnx.Einsum
    return isinstance(module, layers) and not isinstance(module, Coded | Stem)


def check_required(model: nnx.Module, rules: Collection[Rule]) -> None:
    """Raises a ValueError for a required rule that is for layers of `jaxcomp.nn` and matched none.

    Args:
        model: The model.
        rules: The rules that matched nothing.
    """
    for rule in rules:
        if rule.required:
            kinds = ", ".join(sorted({module.kind for module in coded_modules(model).values()}))
            if not kinds:
                raise ValueError(
                    f"{rule} matches nothing: op is for layers of jaxcomp.nn, and the model has no "
                    "such layers"
                )
            raise ValueError(
                f"{rule} matches nothing, or only what an earlier rule took or a norm_act with a "
                f"codec covers; the model's layers of jaxcomp.nn have the kinds: {kinds}"
            )
