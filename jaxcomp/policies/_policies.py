"""Policies: what is kept for the backward pass, in what form, and what is computed again."""

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxcomp.codecs import Codec
from jaxcomp.codecs._codec import FLOATS
from jaxcomp.policies._patterns import check_pattern

Policy = Callable[..., bool]

RECOMPUTABLE = "recomputable"
"""The answer of `recomputable`."""

MIN_SIZE = 2**14
"""Elements from which on whole models store by a codec if nothing else is said."""

ROLES = ("operand", "derivative", "mask", "index", "statistic", "input", "other")


def save_compressed() -> Policy:
    """Keeps what codecs have stored and recomputes everything else.

    Without a policy `jax.checkpoint` recomputes codes too, so nothing is gained by making them.
    With this one only the input of the function and the codes wait for the backward pass, with
    what stored exactly beside them (masks, indices, statistics).

    Returns:
        A policy that saves the values named `jaxcomp/<codec>`, of the codecs defined by now.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxcomp as jc
        >>> def f(x):
        ...     return jnp.sin(jc.ops.relu(x)).sum()
        >>> def stored(policy):
        ...     _, backward = jax.vjp(jax.checkpoint(f, policy=policy), jnp.ones((16, 8)))
        ...     return sorted(a.shape for a in jax.tree.leaves(backward))
        >>> stored(None)
        [(16, 8)]
        >>> stored(save_compressed())
        [(16, 1), (16, 8)]
    """
    codecs = _subclasses(Codec)  # type: ignore[type-abstract]
    named = (codec for codec in codecs if hasattr(codec, "name"))
    names = {codec.stored_name() for codec in named}
    return jax.checkpoint_policies.save_only_these_names(*names)


def _subclasses(kind: type[Codec]) -> set[type[Codec]]:
    direct: set[type[Codec]] = set(kind.__subclasses__())
    return direct.union(*map(_subclasses, direct))


def dtype_name(dtype: typing.Any) -> str:
    """Name of a dtype, of those of JAX's keys too.

    Example:
        >>> dtype_name(jnp.float32), dtype_name(jax.random.key(0).dtype)
        ('float32', 'key<fry>')
    """
    extended = jnp.issubdtype(dtype, jax.dtypes.extended)
    return str(dtype) if extended else jnp.dtype(dtype).name


@dataclasses.dataclass(frozen=True)
class Value:
    """A value that may wait for the backward pass, as policies of `jaxcomp.checkpoint` see it.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        primitive: Name of the JAX primitive that made it; "" for an argument.
        names: What `jax.ad_checkpoint.checkpoint_name` calls it.
        role: What the backward pass does with it, or with what is rebuilt from it: "operand" of a
            product or convolution, "derivative" that multiplies element by element, "mask"
            (boolean), "index" (integer), "statistic" (of a reduction to an eighth or less),
            "input" (one of `coded_argnums`) or "other".
        source: `file:line` where it was made, or "".
        path: Path of the innermost module that made it, in a model of `jaxcomp.compress`, or "".
    """

    shape: tuple[int, ...]
    dtype: typing.Any
    primitive: str = ""
    names: tuple[str, ...] = ()
    role: str = "other"
    source: str = ""
    path: str = ""

    @property
    def is_float(self) -> bool:
        """Whether codecs for floating-point values can store its dtype."""
        return dtype_name(self.dtype) in FLOATS


ByValue = Callable[[Value], typing.Any]


@dataclasses.dataclass(frozen=True)
class CodecPolicy:
    """A policy for `jaxcomp.checkpoint` that answers for each value; see `by_value`.

    Attributes:
        rules: Functions from a `Value` to an answer, in order of precedence.
        lossy_recomputation: Whether non-linear steps may be computed again from coded values,
            which makes the gradient biased.
    """

    rules: tuple[ByValue, ...]
    lossy_recomputation: bool = False

    def __call__(self, value: Value) -> typing.Any:
        """The first answer that is not None."""
        return next((a for rule in self.rules if (a := rule(value)) is not None), None)


@dataclasses.dataclass(frozen=True)
class Match:
    """A rule: one answer for the values that it matches.

    Attributes:
        answer: The codec that stores them, or `RECOMPUTABLE`.
        names: Names given by `checkpoint_name`; empty matches all values.
        primitives: Names of the primitives that made the value; empty matches all.
        roles: Roles as `Value` has them; empty matches all but "statistic".
        dtypes: Names of dtypes; empty matches all.
        min_size: Least number of elements.
        path: Regular expression for the whole path of a module; "" matches all values.
        required: Whether it is an error if nothing matches.
    """

    answer: Codec | str
    names: Sequence[str] = ()
    primitives: Sequence[str] = ()
    roles: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    min_size: int = 0
    path: str = ""
    required: bool = True

    def __post_init__(self) -> None:
        if self.answer != RECOMPUTABLE and not isinstance(self.answer, Codec):
            raise TypeError(f"codec={self.answer!r}: expected a codec such as Quantize(bits=4)")
        for field in ("names", "primitives", "roles", "dtypes"):
            given = getattr(self, field)
            if isinstance(given, str) or not all(isinstance(text, str) for text in given):
                raise TypeError(f"{field}={given!r}: expected a tuple of strings")
            object.__setattr__(self, field, tuple(given))
        if isinstance(self.min_size, bool) or not isinstance(self.min_size, int):
            raise TypeError(f"min_size={self.min_size!r}: expected a number of elements")
        unknown = set(self.roles) - set(ROLES)
        if unknown:
            raise ValueError(f"roles={self.roles}: {sorted(unknown)} not among {ROLES}")
        check_pattern("path", self.path)

    def __call__(self, value: Value) -> Codec | str | None:
        """The answer if the value matches, else None."""
        named = not self.names or bool(set(self.names) & set(value.names))
        made = not self.primitives or value.primitive in self.primitives
        right_role = value.role in self.roles if self.roles else value.role != "statistic"
        right_dtype = not self.dtypes or dtype_name(value.dtype) in self.dtypes
        large = math.prod(value.shape) >= self.min_size
        # To name an integer for a codec is an error, told later.
        able = value.is_float or bool(self.names) or self.answer == RECOMPUTABLE
        inside = not self.path or bool(re.fullmatch(self.path, value.path))
        matches = named and made and right_role and right_dtype and large and able and inside
        return self.answer if matches else None


def compress(
    codec: Codec,
    *,
    names: Sequence[str] = (),
    primitives: Sequence[str] = (),
    roles: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    min_size: int = 0,
    path: str = "",
) -> CodecPolicy:
    """A policy for `jaxcomp.checkpoint`: values that match all conditions are stored by a codec.

    What does not match is stored exactly where it has to be stored. Nothing is stored that follows
    from what is: arguments, coefficients affine in a stored value, shared values.

    Args:
        codec: How they are stored.
        names: Names given by `checkpoint_name`.
        primitives: Names of the JAX primitives that made them.
        roles: Roles, as `Value` lists them; without any, all but statistics.
        dtypes: Names of dtypes.
        min_size: Least number of elements.
        path: Regular expression for the whole path of the module that made them, attributes and
            indices joined by "/", in a model of `jaxcomp.compress`; "" matches all values.

    Raises:
        TypeError: If `codec` is not a codec, or a condition is not a sequence of strings.
        ValueError: If a role is unknown, or `path` is not a regular expression; on tracing, if
            nothing matches.

    Example:
        >>> from jaxcomp import Quantize
        >>> policy = compress(Quantize(bits=4), roles=("operand",), min_size=1024)
        >>> policy(Value((32, 64), jnp.float32, role="operand")).bits
        4
    """
    return CodecPolicy((Match(codec, names, primitives, roles, dtypes, min_size, path),))


def recomputable(
    *,
    names: Sequence[str] = (),
    primitives: Sequence[str] = (),
    roles: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    min_size: int = 0,
    path: str = "",
    required: bool = True,
) -> CodecPolicy:
    """A policy for `jaxcomp.checkpoint`: products that match may be computed again, too.

    Without it a product that has to be exact is stored. With it, it is made again where that
    follows from exact values and takes fewer bytes, of which each product made again counts for
    half of its own: of a chain of products, whose last result alone is needed, that is stored.

    Args:
        names: As `compress` takes it, and so are the arguments that follow.
        primitives: See there.
        roles: See there.
        dtypes: See there.
        min_size: See there.
        path: See there.
        required: Whether it is an error if nothing matches.

    Raises:
        TypeError: If a condition is not a sequence of strings.
        ValueError: As `compress`.

    Example:
        >>> policy = recomputable(primitives=("dot_general",))
        >>> policy(Value((8, 8), jnp.float32, "dot_general")), policy(Value((8, 8), jnp.float32))
        ('recomputable', None)
    """
    conditions = names, primitives, roles, dtypes, min_size, path, required
    return CodecPolicy((Match(RECOMPUTABLE, *conditions),))


def compress_dots(codec: Codec) -> CodecPolicy:
    """A policy for `jaxcomp.checkpoint`: results of products and convolutions have a codec.

    Like `jax.checkpoint_policies.dots_saveable` in what it names; what does not follow from these
    results by affine steps is stored exactly.

    Args:
        codec: How they are stored.

    Example:
        >>> from jaxcomp import Quantize
        >>> compress_dots(Quantize(bits=4))(Value((8, 8), jnp.float32, "dot_general")).bits
        4
    """
    return compress(codec, primitives=("dot_general", "conv_general_dilated"))


def by_value(answer: ByValue) -> CodecPolicy:
    """A policy for `jaxcomp.checkpoint` from a function of each value.

    Args:
        answer: From a `Value` to a codec, True (stored exactly), False (computed again), what
            JAX's own policies return, or None (stored exactly where it has to be stored).

    Example:
        >>> policy = by_value(lambda value: value.role == "statistic" or None)
        >>> policy(Value((8, 1), jnp.float32, role="statistic"))
        True
    """
    return CodecPolicy((answer,))


def first(*policies: CodecPolicy) -> CodecPolicy:
    """A policy for `jaxcomp.checkpoint`: of several, the first that has an answer for a value.

    Raises:
        TypeError: If one is not a policy of this module made for `jaxcomp.checkpoint`.

    Example:
        >>> from jaxcomp import Quantize
        >>> policy = first(compress(Quantize(8), names=("logits",)), compress(Quantize(4)))
        >>> policy(Value((8, 8), jnp.float32, names=("logits",))).bits
        8
    """
    for policy in policies:
        if not isinstance(policy, CodecPolicy):
            raise TypeError(f"policies={policy!r}: expected policies such as compress(...)")
    lossy = any(policy.lossy_recomputation for policy in policies)
    return CodecPolicy(tuple(rule for policy in policies for rule in policy.rules), lossy)


def boundary(codec: Codec) -> CodecPolicy:
    """A policy for `jaxcomp.checkpoint`: inputs have a codec, all else is computed again from them.

    Biased: non-linear steps and their derivatives are evaluated at the decoded inputs. The bytes
    are those of the codes of `coded_argnums` alone, `jax.checkpoint`'s divided by the codec's rate.

    Args:
        codec: How the inputs are stored; 8 bits keep the bias small.

    Example:
        >>> from jaxcomp import Quantize
        >>> boundary(Quantize(bits=8)).lossy_recomputation
        True
    """
    return CodecPolicy((Match(codec, roles=("input",)), _recompute), lossy_recomputation=True)


def _recompute(value: Value) -> bool:
    return False
