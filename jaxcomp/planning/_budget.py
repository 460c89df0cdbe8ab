"""Numbers of bytes from text."""

import re

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def bytes_of(budget: int | str) -> int:
    """Returns the bytes of a budget.

    Args:
        budget: A number of bytes, or text with a unit, such as "11GiB", "900 MiB" or "12GB".

    Raises:
        TypeError: If it is neither.
        ValueError: If the number is not positive, or has no known unit.

    Example:
        >>> bytes_of("1.5GiB"), bytes_of("2 MB")
        (1610612736, 2000000)
    """
    if isinstance(budget, bool) or not isinstance(budget, int | str):
        raise TypeError(f"budget={budget!r}: expected bytes, or text such as '11GiB'")
    if isinstance(budget, int):
        if budget <= 0:
            raise ValueError(f"budget={budget}: expected a positive number of bytes")
        return budget
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", budget, re.ASCII)
    if found is None or found[2].upper() not in _UNITS:
        raise ValueError(
            f"budget={budget!r}: expected a number with a unit (B, KB, MB, GB, TB, KiB, MiB, GiB, "
            "TiB), such as '11GiB'"
        )
    number = round(float(found[1]) * _UNITS[found[2].upper()])
    if number < 1:
        raise ValueError(f"budget={budget!r}: expected a positive number of bytes")
    return number
