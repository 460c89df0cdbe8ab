"""Rules from a module's path and kind of operation to the codec of what it stores."""

import dataclasses
import re

from jaxcomp.codecs import Codec
from jaxcomp.policies._patterns import check_pattern


@dataclasses.dataclass(frozen=True)
class Rule:
    """Gives a codec to the modules of `jaxcomp.nn` whose path and kind match.

    Attributes:
        codec: How they store what waits for the backward pass; `Exact()` makes them as in Flax.
        op: Regular expression for the whole kind, as `nn.Coded` lists them.
        path: Regular expression for the whole path, attributes and indices joined by "/".
        required: Whether it is an error if no module matches.

    Raises:
        TypeError: If `codec` is not a codec.
        ValueError: If `op` or `path` is not a regular expression.

    Example:
        >>> from jaxcomp import Quantize
        >>> Rule(Quantize(bits=2), op="conv|batch_norm", path="blocks/.*").codec.bits
        2
    """

    codec: Codec
    op: str = ".*"
    path: str = ".*"
    required: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise TypeError(f"codec={self.codec!r}: expected a codec such as Quantize(bits=4)")
        for field in ("op", "path"):
            check_pattern(field, getattr(self, field))

    def matches(self, path: str, kind: str) -> bool:
        """Whether the rule is for a module of this path and kind."""
        return bool(re.fullmatch(self.op, kind) and re.fullmatch(self.path, path))


Rules = tuple[Rule, ...]
