"""Policies and codecs from text."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from jaxcomp.codecs import BlockSparse, Cast, Codec, DualPrecision, Exact, Float8, Offload, Quantize
from jaxcomp.codecs._block_sparse import Block
from jaxcomp.memory._words import did_you_mean
from jaxcomp.policies import recipes
from jaxcomp.policies._policy import JaxPolicy, Policy
from jaxcomp.policies._rule import Rule

PolicyLike = Policy | Codec | str | JaxPolicy
"""What stands for a policy: one, a codec, the spec of either, or a policy of `jax.checkpoint`."""

_CODECS: dict[str, type[Codec]] = {
    c.name: c for c in (Exact, Cast, Float8, Quantize, DualPrecision, BlockSparse)
}
_APPLIED = (
    "it is a strategy, no policy: jaxcomp.planning.Strategy.parse({spec!r})(model) applies it"
)
_STRATEGIES = {
    "plain": "it leaves a model as it is",
    "remat": _APPLIED,
    "open": _APPLIED,
    "accumulate": "split the batch in the training step, which a policy cannot",
}
_RECIPES: dict[str, Callable[..., Policy]] = {
    recipe.__name__: recipe
    for recipe in (
        recipes.automatic,
        recipes.fused,
        recipes.transformer,
        recipes.division,
        recipes.pooling,
        recipes.pruning,
        recipes.actnn,
    )
}


def names() -> list[str]:
    """Returns the names of codecs and recipes in specs.

    Example:
        >>> "quantize" in names(), "automatic" in names()
        (True, True)
    """
    return [*_CODECS, *_RECIPES]


@functools.cache
def _specs() -> dict[Policy, str]:
    """Returns specs by the policy that they stand for."""
    bits = {
        "automatic": (4, 3, 8, 6, 5),
        "fused": (4, 3, 2),
        "transformer": (4, 8, 6, 5, 3, 2, 1),
    }
    known = [f"{name}:bits={b}" for name, all_bits in bits.items() for b in all_bits]
    known += [f"quantize:bits={b}" for b in (8, 6, 5, 4, 3, 2, 1)]
    known += [f"{name}:bits=4,kernels=true" for name in ("automatic", "fused")]
    found: dict[Policy, str] = {}
    for spec in (*known, "exact", "division", "pooling", "pruning"):
        found.setdefault(from_spec(spec), spec)
    return found


def describe(policy: Policy | JaxPolicy) -> str:
    """Returns the spec of a policy, or the name of one of JAX's, or its number of rules.

    Example:
        >>> describe(recipes.automatic()), describe(Policy(()))
        ('automatic:bits=4', 'a policy of 0 rules')
    """
    if not isinstance(policy, Policy):
        return getattr(policy, "__name__", type(policy).__name__)
    count = len(policy.rules)
    return _specs().get(policy, f"a policy of {count} rule{'s' * (count != 1)}")


def from_spec(spec: str) -> Policy:
    """Reads a policy from text.

    Args:
        spec: The name of a recipe or codec with options, such as "fused:bits=2",
            "transformer:bits=4", "quantize:bits=4", "cast:dtype=float16",
            "block_sparse:block=8x16,density=0.25" or "exact". A codec is used everywhere
            (`recipes.everywhere`). "offload:" in front puts the codes into the host's memory,
            "boundary:" in front of a codec is `recipes.boundary`.
            " @ " behind gives a regular expression for the paths of the modules that it is for.
            Several, in order of precedence, are joined by " + ".

    Returns:
        The policy.

    Raises:
        TypeError: If `spec` is no string.
        ValueError: If a name or an option is unknown, a value is not what it should be, or a path
            is not a regular expression.

    Example:
        >>> from_spec("quantize:bits=4").rules[0].action
        Quantize(bits=4, group='channel', rounding='stochastic')
        >>> [rule.path for rule in from_spec("pooling:window=4 @ blocks/0/.* + pooling").rules]
        ['blocks/0/.*', 'blocks/0/.*', 'blocks/0/.*', '', '', '']
    """
    if not isinstance(spec, str):
        raise TypeError(f"spec={spec!r}: expected text such as 'quantize:bits=4'")
    policy = Policy(())
    for part in spec.split(" + "):
        text, _, path = part.partition(" @ ")
        made = read(text)
        own = recipes.everywhere(made) if isinstance(made, Codec) else made
        try:
            policy += own.at(path) if path else own
        except ValueError as error:
            raise ValueError(f"spec={part!r}: {error}") from error
    return policy


def read(spec: str) -> Codec | Policy:
    """Reads a single codec or recipe, as `from_spec` has it.

    Raises:
        ValueError: As `from_spec`.

    Example:
        >>> read("cast:dtype=float16")
        Cast(dtype='float16')
    """
    name, _, options = spec.partition(":")
    if name in ("boundary", "offload") and not options:
        raise ValueError(f"spec={spec!r}: expected a codec after '{name}:'")
    if name == "boundary":
        codec = read(options)
        if not isinstance(codec, Codec):
            raise ValueError(f"spec={spec!r}: expected a codec after 'boundary:'")
        return recipes.boundary(codec)
    if name == "offload":
        if options.partition(":")[0] == "offload":
            raise ValueError(f"spec={spec!r}: expected 'offload:' once")
        made = read(options)
        return Offload(made) if isinstance(made, Codec) else made.offloaded()
    return _make(spec)


def policy_for_model(given: PolicyLike) -> Policy | JaxPolicy:
    """Returns what `given` stands for in `jaxcomp.compress`: a codec is used everywhere.

    Raises:
        TypeError: If it is no policy, codec, spec or function.
        ValueError: As `from_spec`.
    """
    return recipes.everywhere(given) if isinstance(given, Codec) else _policy(given)


def policy_for_function(given: PolicyLike) -> Policy | JaxPolicy:
    """Returns what `given` stands for in `jaxcomp.checkpoint`.

    A `Codec` is for all that it can encode.

    Raises:
        TypeError: If it is no policy, codec, spec or function.
        ValueError: As `from_spec`.
    """
    if isinstance(given, Exact):
        return Policy(())
    return Policy((Rule(given, required=False),)) if isinstance(given, Codec) else _policy(given)


def _policy(given: Policy | str | JaxPolicy) -> Policy | JaxPolicy:
    if isinstance(given, str):
        return from_spec(given)
    if isinstance(given, Policy) or (callable(given) and not isinstance(given, type)):
        return given
    raise TypeError(
        f"policy={given!r}: expected a jaxcomp.Policy, a codec such as Quantize(bits=4), a spec "
        "such as 'quantize:bits=4', or one of jax.checkpoint_policies"
    )


def _read_integer(value: str) -> int:
    if not re.fullmatch("-?[0-9]{1,9}", value):
        raise ValueError
    return int(value)


def _read_number(value: str) -> float:
    if not re.fullmatch(r"-?[0-9]*\.?[0-9]+(e-?[0-9]{1,3})?", value):
        raise ValueError
    return float(value)


def _read_block(value: str) -> Block:
    side, by, other = value.partition("x")
    return (_read_integer(side), _read_integer(other)) if by else _read_integer(side)


_READ: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (_read_integer, "an integer"),
    int | None: (_read_integer, "an integer"),
    float: (_read_number, "a number"),
    bool: ({"true": True, "false": False}.__getitem__, "true or false"),
    Block: (_read_block, "an integer or two, such as 8x16"),
}


def _make(spec: str) -> Codec | Policy:
    """Calls the codec or recipe that a spec names, with its options."""
    name, _, options = spec.partition(":")
    makers: dict[str, Callable[..., Codec | Policy]] = {**_CODECS, **_RECIPES}
    make = makers.get(name)
    if not spec:
        raise ValueError("spec='': expected text such as 'quantize:bits=4'")
    if name in _STRATEGIES:
        raise ValueError(f"spec={spec!r}: {_STRATEGIES[name].format(spec=spec)}")
    if make is None:
        raise ValueError(
            f"spec={spec!r}: unknown codec or recipe {name!r}{did_you_mean(name, makers)}; "
            f"expected one of {names()}"
        )
    if spec.endswith(":"):
        raise ValueError(f"spec={spec!r}: expected options after ':'")
    parameters = inspect.signature(make).parameters
    kwargs: dict[str, Any] = {}
    for option in options.split(",") if options else ():
        key, _, value = option.partition("=")
        if key not in parameters:
            meant = did_you_mean(key, parameters)
            if "=" not in option and parameters and option[:1].isdigit():
                meant = f"; did you mean '{name}:{next(iter(parameters))}={option}'?"
            raise ValueError(
                f"spec={spec!r}: unknown option {key!r}{meant}; expected one of {list(parameters)}"
            )
        if key in kwargs:
            raise ValueError(f"spec={spec!r}: option {key!r} is given twice")
        parse, kind = _READ.get(parameters[key].annotation, (str, "text"))
        try:
            kwargs[key] = parse(value)
        except (ValueError, KeyError):
            raise ValueError(f"spec={spec!r}: {key}={value!r} is not {kind}") from None
    try:
        return make(**kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"spec={spec!r}: {error}") from error
