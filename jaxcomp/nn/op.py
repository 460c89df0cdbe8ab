"""How a module holds an operation with its codec."""

import dataclasses
import typing
from collections.abc import Callable

from jaxcomp.codecs import Codec


@dataclasses.dataclass(frozen=True)
class CodedOp:
    """An operation of `jaxcomp.ops` with its codec, comparable and hashable as Flax's static data.

    Attributes:
        op: The operation, which takes `codec=`.
        codec: Its codec, or None for the stock operation.
    """

    op: Callable[..., typing.Any]
    codec: Codec | None

    def __call__(self, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        """Calls the operation with the codec."""
        return self.op(*args, codec=self.codec, **kwargs)
