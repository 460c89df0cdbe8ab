"""A rule of a policy: which values it is for, and what becomes of them."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

from jaxcomp._core.integers import as_integer
from jaxcomp.codecs import Codec
from jaxcomp.policies._patterns import check_pattern, fits
from jaxcomp.policies._value import ROLES, Value, dtype_name

Action = Literal["keep", "recompute", "cheapest", "offload", "open"]
REGION = "checkpoint"  # the operation of rules for regions under `jax.checkpoint`
RESIDUALS = "custom_vjp"  # and of those for residuals of `jax.custom_vjp` functions
ACTIONS: tuple[Action, ...] = get_args(Action)


@dataclasses.dataclass(frozen=True, repr=False)
class Rule:
    """One rule of a `Policy`: what becomes of the values that meet all of its conditions.

    A condition that is empty holds for every value. A rule is for layers of `jaxcomp.nn`, for other
    values, or for both:

    - With `op` it is for layers of `jaxcomp.nn`, which save what they need by the codec. The kinds
      "conv", "dot", "norm_act" and "max_pool" are also for stock operations: convolutions and
      products with a parameter, norms and max pools.
    - With `op="checkpoint"` it is for regions under `jax.checkpoint` in the function: "open"
      compresses the values in a region as those of plain code, "keep" leaves it as it is, and with
      a codec its inputs are encoded and the region is evaluated again from them, which is biased.
    - With `op="custom_vjp"` it is for residuals of `jax.custom_vjp` functions, such as the kernels
      of an attention. Other rules do not encode these. A codec is biased where the function's
      backward rule is not linear in the residual.
    - With `names`, `primitives`, `roles` or `dtypes` it is for values alone.
    - With neither it is for the layers of `jaxcomp.nn` that can save by the codec, whatever their
      size; where it matches none of a model's layers, it is for values.

    Attributes:
        action: A codec, which encodes the value for the backward pass (`Offload` of a codec puts
            the code into the host's memory); "keep", which saves it as it is (in a policy that
            has no other action, a rule without conditions on values also lets elementwise steps be
            computed again from what is saved, where that takes fewer bytes); "recompute", which
            computes it again in the backward pass; "offload", which saves it as it is in the host's
            memory; or "cheapest", which keeps or recomputes a product, whichever takes fewer bytes.
            Each product that is recomputed then counts for half of its own bytes. Or "open", with
            `op="checkpoint"`.
        path: Regular expression for the whole path of the module that computes the value,
            attributes and indices joined by "/"; in a function, for its named scopes, such as
            "Decoder/layers_3/norm" of a Linen model.
        op: Regular expression for the whole kind of operation of a layer of `jaxcomp.nn`, such as
            "conv|dot"; `jaxcomp.nn.Coded` lists the kinds. Or "checkpoint", or "custom_vjp".
        names: Names given by `jax.ad_checkpoint.checkpoint_name`.
        primitives: Names of the JAX primitives that compute the value.
        roles: Roles, as `jaxcomp.policies.Value` lists them. Without any, all but "statistic"; with
            `names` and without any, all.
        dtypes: Names of dtypes.
        min_size: Least number of elements of a value, over all iterations of a `scan`. That all
            values are too small, as in a short last batch, is no error; `jaxcomp.plan` notes it.
        required: Whether it is an error if the rule matches nothing.

    Raises:
        TypeError: If `action` is no codec and no string, or a condition has another type.
        ValueError: If `action`, a role or a combination of conditions is unknown, or a pattern is
            not a regular expression, or may take exponential time, as "([a-z]+)*" does.

    Example:
        >>> from jaxcomp import Quantize
        >>> Rule(Quantize(bits=2), op="conv|batch_norm", path="blocks/.*").action.bits
        2
    """

    action: Codec | Action
    path: str = ""
    op: str = ""
    names: Sequence[str] = ()
    primitives: Sequence[str] = ()
    roles: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    min_size: int = 0
    required: bool = True

    def __post_init__(self) -> None:
        _check_action(self.action)
        for field in ("path", "op"):
            check_pattern(field, getattr(self, field))
        for field in ("names", "primitives", "roles", "dtypes"):
            given = getattr(self, field)
            is_sequence = isinstance(given, Sequence) and not isinstance(given, str)
            if not is_sequence or not all(isinstance(text, str) for text in given):
                raise TypeError(f"{field}={given!r}: expected a tuple of strings")
            object.__setattr__(self, field, tuple(given))
        object.__setattr__(self, "min_size", as_integer(self.min_size))
        if isinstance(self.min_size, bool) or not isinstance(self.min_size, int):
            raise TypeError(f"min_size={self.min_size!r}: expected a number of elements")
        if self.min_size < 0:
            raise ValueError(f"min_size={self.min_size}: expected 0 or more elements")
        if not isinstance(self.required, bool):
            raise TypeError(f"required={self.required!r}: expected True or False")
        unknown = sorted(set(self.roles) - set(ROLES))
        if unknown:
            raise ValueError(f"roles={self.roles}: {unknown} not among {ROLES}")
        if self.is_for_residuals and self.roles:
            raise ValueError(f"roles={self.roles}: expected none with op={RESIDUALS!r}")
        if not self.is_for_values and (self.is_for_values_alone or self.min_size):
            raise ValueError(
                f"op={self.op!r}: expected no names, primitives, roles, dtypes or min_size beside "
                "it, since a layer of jaxcomp.nn is chosen by its path and its kind alone"
            )
        if self.action == "open" and not self.is_for_regions:
            raise ValueError(f"action='open': expected op={REGION!r} beside it, not op={self.op!r}")
        if self.is_for_regions and self.action in ("recompute", "cheapest", "offload"):
            raise ValueError(
                f"action={self.action!r}: expected 'open', 'keep' or a codec with op={REGION!r}"
            )
        if self.is_for_residuals and self.action in ("recompute", "cheapest"):
            raise ValueError(
                f"action={self.action!r}: expected 'keep', 'offload' or a codec with "
                f"op={RESIDUALS!r}"
            )
        if self.op not in ("", REGION, RESIDUALS) and not (
            isinstance(self.action, Codec) or self.action == "keep"
        ):
            raise ValueError(
                f"action={self.action!r}: expected a codec or 'keep' with op={self.op!r}, since a "
                "layer of jaxcomp.nn saves by its codec"
            )

    @property
    def is_for_values_alone(self) -> bool:
        """Whether a condition of the rule is one that layers of `jaxcomp.nn` do not have."""
        return bool(self.names or self.primitives or self.roles or self.dtypes)

    @property
    def is_for_values(self) -> bool:
        """Whether the rule can match a value outside of the layers of `jaxcomp.nn`."""
        return not self.op or self.is_for_residuals

    @property
    def is_for_residuals(self) -> bool:
        """Whether the rule is for residuals of `jax.custom_vjp` functions."""
        return self.op == RESIDUALS

    def matches_layer(self, path: str, kind: str) -> bool:
        """Returns whether the rule is for a layer of `jaxcomp.nn` of this path and kind."""
        if self.is_for_values_alone or not (
            isinstance(self.action, Codec) or self.action == "keep"
        ):
            return False
        if not self.op and isinstance(self.action, Codec) and kind not in self.action.kinds:
            return False
        return fits(self.op, kind) and fits(self.path, path)

    @property
    def is_for_regions(self) -> bool:
        """Whether the rule is for regions under `jax.checkpoint`."""
        return self.op == REGION

    def matches_region(self, path: str) -> bool:
        """Returns whether the rule is for a region of this path under `jax.checkpoint`."""
        return self.is_for_regions and fits(self.path, path)

    def matches_value(self, value: Value, size: bool = True) -> bool:
        """Returns whether the rule is for a value; without `size`, whatever the value's size."""
        any_role = bool(self.names) or value.role != "statistic"
        role = value.role in self.roles if self.roles else any_role
        if self.is_for_residuals:
            role = value.role == "residual"
        # Naming an integer for a codec is an error, which is told later.
        able = value.is_float or bool(self.names) or not isinstance(self.action, Codec)
        return (
            self.is_for_values
            and role
            and able
            and (not self.names or bool(set(self.names) & set(value.names)))
            and (not self.primitives or value.primitive in self.primitives)
            and (not self.dtypes or dtype_name(value.dtype) in self.dtypes)
            and (not size or value.elements >= self.min_size)
            and fits(self.path, value.path)
        )

    def __repr__(self) -> str:
        """Returns the constructor call, without defaults."""
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.name != "action" and getattr(self, field.name) != field.default
        ]
        return f"Rule({', '.join([repr(self.action), *shown])})"


def _check_action(action: object) -> None:
    if isinstance(action, Codec) or action in ACTIONS:
        return
    if isinstance(action, str):
        raise ValueError(f"action={action!r}: expected a codec or one of {ACTIONS}")
    raise TypeError(
        f"action={action!r}: expected a codec such as Quantize(bits=4), or one of {ACTIONS}"
    )
