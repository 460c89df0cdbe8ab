"""Integers of NumPy and of Python."""

import zlib
from typing import Any

import numpy as np


def as_integer(value: Any) -> Any:
    """Returns a NumPy integer as one of Python; any other value is returned unchanged.

    Example:
        >>> as_integer(np.int64(4)), as_integer("4")
        (4, '4')
    """
    return int(value) if isinstance(value, np.integer) else value


def as_seed(seed: Any) -> Any:
    """Returns an integer beyond 32 bits hashed to 32 bits; any other seed is returned unchanged.

    Example:
        >>> as_seed(7), bool(as_seed(2**31) == as_seed(2**64))
        (7, False)
    """
    if isinstance(seed, int | np.integer) and not -(2**31) <= seed < 2**31:
        return np.uint32(zlib.crc32(str(int(seed)).encode()))
    return seed
