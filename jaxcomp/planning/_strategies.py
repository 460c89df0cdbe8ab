"""The ways of making a training step that tables compare: JAX's own, and jaxcomp's recipes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
from flax import nnx

from jaxcomp.codecs import Codec, Exact
from jaxcomp.policies import recipes
from jaxcomp.policies._policies import CodecPolicy
from jaxcomp.policies._rules import Rules
from jaxcomp.transform._compress import compress
from jaxcomp.transform._layers import apply
from jaxcomp.transform._remat import remat_blocks

M = TypeVar("M", bound=nnx.Module)


def _offload(primitive: Any, *avals: Any, **params: Any) -> Any:
    """Moves the results of products and convolutions to the host's memory."""
    dots = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    if primitive.name in ("dot_general", "conv_general_dilated"):
        return dots(jax.lax.dot_general_p, dimension_numbers=(((), ()), ((), ())))
    return dots(primitive, *avals, **params)


_REMAT = {
    "remat": None,
    "remat:dots": jax.checkpoint_policies.checkpoint_dots,
    "offload": _offload,
}


@dataclass(frozen=True)
class Way:
    """How a training step deals with its activations; called on a model, it applies itself.

    Attributes:
        spec: What it was parsed from; names the row of a table.
        rules: The model's rules from path and op kind to codec; () stores everything exactly.
        remat: Whether each block of the model is recomputed in the backward pass.
        policy: What of a block is then kept or moved, as `jax.checkpoint` takes it.
        boundary: How the input of a block then waits; None is exactly.
        compressed: What `jaxcomp.compress` makes the whole model store by; None is nothing.
        micro_batches: How many parts the batch is split into; their gradients are averaged. A
            BatchNorm then normalises by the statistics of its micro-batch, so that the step is
            another function than with 1.

    Example:
        >>> Way.parse("accumulate:4").micro_batches
        4
    """

    spec: str
    rules: Rules = ()
    remat: bool = False
    policy: Callable[..., Any] | None = None
    micro_batches: int = 1
    boundary: Codec | None = None
    compressed: CodecPolicy | None = None

    @classmethod
    def parse(cls, spec: str) -> "Way":
        """The way that `spec` names.

        Args:
            spec: `plain`, `remat` (each block), `remat:dots` (results of products and
                convolutions are kept), `remat:CODEC` (a block's input waits as the codec of this
                spec stores it, such as `remat:quantize:bits=8`; biased), `offload` (results of
                products and convolutions are kept in the host's memory), `accumulate:N` (N
                micro-batches, 2 or more) or `accumulate:N:WAY` (each made by another way),
                `compress:POLICY` (`jaxcomp.compress` of any model, by a policy as
                `recipes.policy_from_spec` reads it), or the spec of a codec or recipe, such as
                `quantize:bits=2` (or `offload:quantize:bits=2`, in the host's memory), or several,
                each for a part of the model, as `recipes.from_spec` reads them.

        Raises:
            ValueError: If `spec` is none of these.
        """
        name, _, argument = spec.partition(":")
        if spec == "plain":
            return cls(spec)
        if spec in _REMAT:
            return cls(spec, remat=True, policy=_REMAT[spec])
        if name == "accumulate":
            count, _, inner = argument.partition(":")
            if not (count.isdecimal() and int(count) >= 2) or inner.startswith(name):
                raise ValueError(
                    f"way={spec!r}: expected accumulate:N with N=2 or more micro-batches"
                )
            return replace(cls.parse(inner or "plain"), spec=spec, micro_batches=int(count))
        try:
            if name == "compress":
                return cls(spec, compressed=recipes.policy_from_spec(argument))
            if name == "remat":
                codec = recipes.read(argument)
                if not isinstance(codec, Codec):
                    raise ValueError(f"{argument!r} is a recipe, expected a codec")
                return cls(spec, remat=True, boundary=codec)
            return cls(spec, rules=recipes.from_spec(spec))
        except ValueError as error:
            raise ValueError(
                f"way={spec!r}: expected plain, {', '.join(_REMAT)}, accumulate:N, "
                f"compress:POLICY, or the spec of a codec or recipe: {error}"
            ) from error

    @property
    def is_plain(self) -> bool:
        """Whether the step is the plain one: no rules, nothing recomputed, the batch whole."""
        exact = all(isinstance(rule.codec, Exact) for rule in self.rules)
        whole = self.micro_batches == 1 and self.compressed is None
        return exact and whole and not self.remat

    def __call__(self, model: M) -> M:
        """Changes a model so that it stores its activations in this way.

        Args:
            model: Its layers are of `jaxcomp.nn` for a codec, its blocks in a list for `remat`.
                Micro-batches are the step's business: the model stays as it is.

        Returns:
            The same model.

        Raises:
            ValueError: If the model has no blocks to recompute, or no layer that a rule matches.
        """
        if self.rules:
            apply(model, self.rules)
        if self.remat:
            remat_blocks(model, self.policy, self.boundary)
        if self.compressed is not None:
            compress(model, self.compressed)
        return model

    def check_batch(self, batch: int, devices: int = 1) -> None:
        """Checks that a batch divides over the micro-batches and the devices.

        Raises:
            ValueError: If it does not.
        """
        if not isinstance(batch, int) or batch < 1 or batch % (self.micro_batches * devices):
            raise ValueError(
                f"batch={batch!r}: expected a multiple of {self.micro_batches * devices} "
                f"({self.micro_batches} micro-batches of way={self.spec!r} x {devices} devices)"
            )
