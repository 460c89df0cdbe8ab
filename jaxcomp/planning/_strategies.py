"""Strategies for the activations of a training step, which tables compare."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from flax import linen, nnx

from jaxcomp.codecs import Codec
from jaxcomp.memory._words import did_you_mean
from jaxcomp.planning._remat import encode_boundaries, remat_blocks
from jaxcomp.policies._policy import JaxPolicy, Policy, has_codecs
from jaxcomp.policies._rule import REGION, Rule
from jaxcomp.policies._specs import PolicyLike, from_spec, names, policy_for_model, read
from jaxcomp.transform._checkpoint import checkpoint
from jaxcomp.transform._compress import compress

M = TypeVar("M", bound=nnx.Module | Callable[..., Any])


def _offload(primitive: Any, *avals: Any, **params: Any) -> Any:
    """Returns a `jax.checkpoint` policy: offloads the results of products and convolutions."""
    dots = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    if primitive.name in ("dot_general", "conv_general_dilated"):
        return dots(jax.lax.dot_general_p, dimension_numbers=(((), ()), ((), ())))
    return dots(primitive, *avals, **params)


def _products_with_weights(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Returns a `jax.checkpoint` policy.

    Keeps the results of convolutions and unbatched products.
    """
    unbatched = jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims
    is_convolution = primitive.name == "conv_general_dilated"
    return is_convolution or bool(unbatched(primitive, *avals, **params))


_REMAT: dict[str, Callable[..., Any] | None] = {
    "remat": None,
    "remat:dots": jax.checkpoint_policies.checkpoint_dots,
    "remat:weights": _products_with_weights,
    "offload": _offload,
}
OPEN = Policy((Rule("open", op=REGION), Rule("keep", required=False)))
_NUMBER = r"([1-9]\d*)"
_FIRST_BLOCKS = re.compile(
    rf"remat:(?:{_NUMBER}|(?:{_NUMBER}\+)?(dots|weights):{_NUMBER})", re.ASCII
)


@dataclasses.dataclass(frozen=True)
class Strategy:
    """What a training step does about its activations. Calling it on a model applies it.

    Attributes:
        spec: Its text, which names the row of a table.
        policy: What `jaxcomp.compress` takes; None leaves the model as it is.
        remat: Whether blocks of the model are recomputed in the backward pass.
        remat_policy: What of a block is kept or offloaded, as `jax.checkpoint` takes it.
        block_codec: Encodes the inputs of recomputed blocks; None saves them as they are.
        first_blocks: (N, M): the first N blocks are recomputed as a whole, and the next M ones by
            `remat_policy`. The other blocks are unchanged. None treats all blocks alike.
        micro_batches: Number of parts that the batch is split into; their gradients are averaged.
            A batch norm then normalises by the statistics of its part.

    Example:
        >>> Strategy.parse("accumulate:4").micro_batches
        4
    """

    spec: str
    policy: Policy | JaxPolicy | None = None
    remat: bool = False
    remat_policy: Callable[..., Any] | None = None
    block_codec: Codec | None = None
    first_blocks: tuple[int, int] | None = None
    micro_batches: int = 1

    @classmethod
    def of(cls, given: "Strategy | PolicyLike") -> "Strategy":
        """Returns the strategy that `given` stands for.

        Args:
            given: A strategy, its spec, a policy or a codec.

        Raises:
            TypeError: If `given` is none of these.
            ValueError: As `parse`.
        """
        if isinstance(given, Strategy):
            return given
        if isinstance(given, str):
            return cls.parse(given)
        return cls(repr(given), policy=policy_for_model(given))

    @classmethod
    def parse(cls, spec: str) -> "Strategy":
        """Returns the strategy that `spec` names.

        Args:
            spec: One of

                - `plain`: the model as it is;
                - `remat`: each block is recomputed;
                - `remat:dots`: the same, but results of matrix products and convolutions are kept
                  (`jax.checkpoint_policies.dots_saveable`);
                - `remat:weights`: the same, but results of matrix products without batch
                  dimensions, such as those with weights, and of convolutions are kept
                  (`jax.checkpoint_policies.dots_with_no_batch_dims_saveable`);
                - `remat:N`, `remat:dots:N`, `remat:weights:N`: the same for the first N blocks
                  alone. Their order is that of `nnx.iter_modules`: attributes by their names, items
                  of a list by their indices;
                - `remat:N+dots:M`, `remat:N+weights:M`: `remat` for the first N blocks, and
                  `remat:dots` or `remat:weights` for the next M ones;
                - `open`: regions that the author put under `jax.checkpoint` are not computed again;
                - `boundary:CODEC`: the input of each block is saved by a codec, such as
                  `boundary:quantize:bits=8`, and the block is recomputed from it (biased);
                - `offload`: results of products and convolutions are kept in the host's memory;
                - `accumulate:N`: gradients of N micro-batches are averaged, N=2 or more;
                - `accumulate:N:SPEC`: each micro-batch by another strategy;
                - the spec of a policy, such as `fused:bits=4`, `transformer:bits=4`,
                  `quantize:bits=2` or `offload:quantize:bits=2` (`policies.from_spec`).

        Raises:
            TypeError: If `spec` is no string.
            ValueError: If `spec` is none of these.
        """
        if not isinstance(spec, str):
            raise TypeError(f"strategy={spec!r}: expected text such as 'remat'")
        name, _, argument = spec.partition(":")
        if spec == "plain":
            return cls(spec)
        if spec == "open":
            return cls(spec, policy=OPEN)
        if spec in _REMAT:
            return cls(spec, remat=True, remat_policy=_REMAT[spec])
        if match := _FIRST_BLOCKS.fullmatch(spec):
            alone, first, kept, count = match.groups()
            blocks = int(alone or first or 0), int(count or 0)
            return cls(
                spec, remat=True, remat_policy=_REMAT.get(f"remat:{kept}"), first_blocks=blocks
            )
        if name == "accumulate":
            count, _, inner = argument.partition(":")
            is_number = count.isascii() and count.isdecimal() and len(count) <= 9
            if not is_number or int(count) < 2 or inner.startswith(name):
                raise ValueError(
                    f"strategy={spec!r}: expected accumulate:N with N=2 or more micro-batches"
                )
            return dataclasses.replace(
                cls.parse(inner or "plain"), spec=spec, micro_batches=int(count)
            )
        try:
            if name == "remat":
                raise ValueError("a codec for the inputs of recomputed blocks is boundary:CODEC")
            if name == "boundary":
                codec = read(argument)
                if not isinstance(codec, Codec):
                    raise ValueError(f"{argument!r} is a recipe, expected a codec")
                return cls(spec, remat=True, block_codec=codec)
            return cls(spec, policy=from_spec(spec))
        except ValueError as error:
            if name in (*names(), "offload", "boundary"):
                raise ValueError(f"strategy={spec!r}: {error}") from error
            known = ["plain", "open", "accumulate", "boundary", *_REMAT, *names()]
            meant = did_you_mean(spec, known) or did_you_mean(name, known)
            if name == "remat" and argument:
                meant = f": {error}" if argument.partition(":")[0] in names() else meant
            raise ValueError(
                f"strategy={spec!r} is unknown{meant}; expected plain, open, {', '.join(_REMAT)}, "
                "remat:N (N=1 or more blocks), remat:N+weights:M, boundary:CODEC, accumulate:N, or "
                f"a policy ({', '.join(names())})"
            ) from error

    @property
    def is_plain(self) -> bool:
        """Whether the step is the plain one: nothing encoded or recomputed, the batch whole."""
        keeps = isinstance(self.policy, Policy) and all(
            rule.action == "keep" for rule in self.policy.rules
        )
        return (self.policy is None or keeps) and self.micro_batches == 1 and not self.remat

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing is encoded, recomputed or split: the plain step, its regions open or not.

        Regions are what the author put under `jax.checkpoint`.
        """
        if self.micro_batches > 1 or self.remat:
            return False
        if not isinstance(self.policy, Policy):
            return self.policy is None
        actions = {rule.action for rule in self.policy.rules}
        return "open" in actions and actions <= {"keep", "open"}

    @property
    def is_exact(self) -> bool:
        """Whether nothing is encoded, so that the gradient is that of the model as it is."""
        encodes = self.policy is not None and has_codecs(self.policy)
        return not encodes and self.block_codec is None

    def __call__(self, model: M) -> M:
        """Applies the strategy to a model.

        Args:
            model: A Flax NNX model, which is changed. `remat` and `offload` expect its blocks in a
                list. Or a function, such as `model.apply` of a Linen model: a policy is for
                `jaxcomp.checkpoint`, and what calls this applies `jax.checkpoint` to its blocks if
                `remat` is true. Micro-batches are the step's business and leave either as it is.

        Returns:
            The same model, or the transformed function.

        Raises:
            TypeError: If it is a Linen module.
            ValueError: If the model has no blocks to recompute, or fewer than are named, or the
                policy does not fit it; if inputs of a function's blocks are to be encoded, or some
                of its blocks are to be recomputed.
        """
        if not isinstance(model, nnx.Module):
            return self._of_function(model)
        if self.policy is not None:
            compress(model, self.policy)
        if self.first_blocks is not None:
            first, others = self.first_blocks
            remat_blocks(model, part=slice(first))
            remat_blocks(model, self.remat_policy, part=slice(first, first + others))
        elif self.block_codec is not None:
            encode_boundaries(model, self.block_codec)
        elif self.remat:
            remat_blocks(model, self.remat_policy)
        return model

    def _of_function(self, fn: Any) -> Any:
        if isinstance(fn, linen.Module):
            raise TypeError(
                f"model of type {type(fn).__name__}: expected a function of its variables, such as "
                "model.apply"
            )
        if self.block_codec is not None or self.first_blocks is not None:
            raise ValueError(f"strategy={self.spec!r}: expected a Flax NNX model, not a function")
        return fn if self.policy is None else checkpoint(fn, self.policy)

    def check_batch(self, batch: int, devices: int = 1) -> None:
        """Checks that a batch divides over the micro-batches and the devices.

        Raises:
            ValueError: If it does not.
        """
        if not isinstance(batch, int | np.integer) or batch < 1:
            raise ValueError(f"batch={batch!r}: expected a positive integer")
        if batch % (self.micro_batches * devices):
            raise ValueError(
                f"batch={batch!r}: expected a multiple of {self.micro_batches * devices} "
                f"({self.micro_batches} micro-batches of strategy={self.spec!r} x {devices} "
                "devices)"
            )
