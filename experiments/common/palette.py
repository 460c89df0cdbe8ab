"""Colors and markers of figures, which color-blind readers can tell apart."""

# Of Okabe and Ito.
COLORS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7")
_MARKERS = "os^D"


def style(number: int) -> tuple[str, str]:
    """The color and the marker of a series; the first 28 differ.

    Example:
        >>> style(0), style(7)
        (('#000000', 'o'), ('#000000', 's'))
    """
    return COLORS[number % len(COLORS)], _MARKERS[number // len(COLORS) % len(_MARKERS)]
