"""Numbers of bytes from text."""

import re

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def bytes_of(name: str, size: int | str, *, least: int = 1) -> int:
    """Returns the bytes of a size.

    Args:
        name: The argument's name, for messages.
        size: A number of bytes, or text with a unit, such as "11GiB", "900 MiB" or "12GB".
        least: The smallest size that is allowed.

    Raises:
        TypeError: If it is neither.
        ValueError: If it is less than `least`, or has no known unit.

    Example:
        >>> bytes_of("budget", "1.5GiB"), bytes_of("budget", "2 MB")
        (1610612736, 2000000)
    """
    if isinstance(size, bool) or not (isinstance(size, str) or hasattr(size, "__index__")):
        raise TypeError(f"{name}={size!r}: expected bytes, or text such as '11GiB'")
    number = _read(name, size) if isinstance(size, str) else int(size)
    if number < least:
        expected = "a positive number" if least == 1 else f"{least} or more"
        raise ValueError(f"{name}={size!r}: expected {expected} of bytes")
    return number


def _read(name: str, size: str) -> int:
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", size, re.ASCII)
    if found and found[2].upper() in _UNITS:
        return round(float(found[1]) * _UNITS[found[2].upper()])
    meant = f"; did you mean '{found[1]}GiB'?" if found and not found[2] else ""
    raise ValueError(
        f"{name}={size!r}: expected a number with a unit (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB), "
        f"such as '11GiB'{meant}"
    )
