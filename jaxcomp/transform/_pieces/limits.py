"""`Limits`: from which sizes on a program is evaluated piece by piece."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes of pieces.

    Attributes:
        slice_nbytes: Bytes of the largest array of a slice, if of float32.
        tpu_slice_nbytes: The same on a TPU. XLA keeps more of a small slice in its fast memory.
        forward_nbytes: Bytes of an attention's scores, if of float32, from which on the forward
            pass of a region under `jax.checkpoint` evaluates it in slices, too.
        excess: Times as many slices as asked for, at most: an axis may have few divisors.
        ratio: Of elements of operands and results of products to those of sliced arguments, at
            least.
        work: Of the FLOPs of all slices to those of the whole, at most.
        sums: All results that are sums have at most this part of the largest array's elements.
        outside: Elements of the largest array outside of the program.
        loop_length: Iterations of a loop that encodes what a chunk of them stored at once, at
            least.
        iteration_nbytes: Bytes, without codes, that an iteration of such a loop encodes, at most.
    """

    slice_nbytes: int = 3 * 2**25
    tpu_slice_nbytes: int = 2**25
    forward_nbytes: int = 2**30
    excess: int = 4
    ratio: float = 8
    work: float = 1.1
    sums: float = 1 / 16
    outside: int = 0
    loop_length: int = 64
    iteration_nbytes: int = 2**22

    def slices(self, size: int) -> bool:
        """Returns whether a program whose largest array has so many elements is sliced."""
        return 4 * size > self.slice_nbytes and size > self.outside


_DEFAULT = Limits()
_limits = contextvars.ContextVar("limits", default=_DEFAULT)


def current_limits() -> Limits:
    """Returns the limits for programs whose gradient is taken now."""
    return _limits.get()


@contextlib.contextmanager
def limits_of(**sizes: Any) -> Iterator[None]:
    """Changes limits in its context, such as those of a test with small arrays."""
    token = _limits.set(dataclasses.replace(_limits.get(), **sizes))
    try:
        yield
    finally:
        _limits.reset(token)
