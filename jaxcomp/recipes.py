"""Recipes: functions that return rules for a whole model."""

import dataclasses
import typing

from jaxcomp.codecs import AvgPool, Cast, Codec, Exact, Packed, Quantize
from jaxcomp.rules import Rule, Rules

CODECS: dict[str, type[Codec]] = {c.name: c for c in (Exact, Cast, Quantize, AvgPool)}

PACKED: Rules = (
    Rule(Packed(bits=1), op="relu", required=False),
    Rule(Packed(bits=4), op="max_pool", required=False),
)
"""Masks and indices, exactly, in as few bits as they need."""


def everywhere(codec: Codec) -> Rules:
    """Uses a codec in every operation that can store by it; packs masks and indices.

    With `AvgPool` these operations are the convolutions, with `Cast` and `Quantize` the linear
    layers and batch norms too. `Exact()` makes the model as it is in Flax.

    Args:
        codec: The codec.

    Returns:
        The rules.

    Example:
        >>> everywhere(AvgPool(window=2))[0].op
        'conv'
    """
    if isinstance(codec, Exact):
        return (Rule(codec, required=False),)
    return Rule(codec, op="|".join(codec.kinds)), *PACKED


def from_spec(spec: str) -> Rules:
    """Reads a codec spec, a snake-case name with options, and uses it everywhere.

    Args:
        spec: For example "quantize:bits=4", "avg_pool:window=2", "cast:dtype=float16", "exact".

    Returns:
        The rules.

    Raises:
        ValueError: If the name or an option is unknown, or a value is not what it should be.

    Example:
        >>> from_spec("quantize:bits=4")[0].codec
        Quantize(bits=4, group='channel', rounding='stochastic')
    """
    name, _, options = spec.partition(":")
    if name not in CODECS:
        raise ValueError(f"spec={spec!r}: unknown codec {name!r}, expected one of {list(CODECS)}")
    fields = {f.name: f for f in dataclasses.fields(CODECS[name])}  # type: ignore[arg-type]
    kwargs: dict[str, typing.Any] = {}
    for option in options.split(",") if options else ():
        key, _, value = option.partition("=")
        if key not in fields:
            raise ValueError(f"spec={spec!r}: unknown option {key!r}, expected of {list(fields)}")
        if key in kwargs:
            raise ValueError(f"spec={spec!r}: option {key!r} is given twice")
        try:
            kwargs[key] = int(value) if fields[key].type is int else value
        except ValueError:
            raise ValueError(f"spec={spec!r}: {key}={value!r} is not an integer") from None
    try:
        return everywhere(CODECS[name](**kwargs))
    except (TypeError, ValueError) as error:
        raise ValueError(f"spec={spec!r}: {error}") from error
