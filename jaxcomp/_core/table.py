"""Text tables with aligned columns."""

from collections.abc import Collection, Sequence


def lines(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Pads the cells of each column to one width.

    Args:
        rows: Rows with equal numbers of cells; at least one row.
        right: Indices of the columns that are aligned to the right.

    Returns:
        One line for each row, without trailing spaces.

    Example:
        >>> lines([("name", "bytes"), ("x", "8")], right=(1,))
        ['name  bytes', 'x         8']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
