"""Codecs as dictionaries that JSON can hold."""

import dataclasses
from typing import Any

from jaxcomp.codecs import Codec
from jaxcomp.policies._save_compressed import codec_types

_PLAIN = (bool, int, float, str, type(None))


def codec_to_dict(codec: Codec) -> dict[str, Any]:
    """Returns the codec's name under "name", and its fields.

    Raises:
        TypeError: If it is no dataclass of numbers, strings, tuples and codecs.

    Example:
        >>> from jaxcomp import Cast
        >>> codec_to_dict(Cast("float16"))
        {'name': 'cast', 'dtype': 'float16'}
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Codec):
            return codec_to_dict(value)
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        if not isinstance(value, _PLAIN):
            raise TypeError(f"codec={codec!r}: {value!r} cannot be written as JSON")
        return value

    known: Any = codec
    if not dataclasses.is_dataclass(known):
        raise TypeError(f"codec={codec!r}: expected a dataclass")
    fields = {f.name: plain(getattr(codec, f.name)) for f in dataclasses.fields(known)}
    return {"name": codec.name} | fields


def codec_from_dict(fields: dict[str, Any]) -> Codec:
    """Reads what `codec_to_dict` returned.

    Raises:
        ValueError: If no codec of this name is defined.
        TypeError: If a field is unknown.

    Example:
        >>> codec_from_dict({"name": "cast", "dtype": "float16"})
        Cast(dtype='float16')
    """

    def value(item: Any) -> Any:
        if isinstance(item, dict):
            return codec_from_dict(item)
        return tuple(map(value, item)) if isinstance(item, list) else item

    kinds = {kind.name: kind for kind in codec_types() if hasattr(kind, "name")}
    name = fields.get("name")
    if name not in kinds:
        raise ValueError(f"codec={name!r}: expected one of {sorted(kinds)}")
    return kinds[name](**{key: value(item) for key, item in fields.items() if key != "name"})
