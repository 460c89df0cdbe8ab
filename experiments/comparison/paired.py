"""Compares runs of the same seeds."""

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats


def paired_difference(runs: ArrayLike, others: ArrayLike) -> tuple[float, float]:
    """Returns the mean difference of two sets of runs, seed by seed, and its uncertainty.

    Args:
        runs: A figure of each run, 2 or more.
        others: The same figure of other runs, with the same seeds in the same order.

    Returns:
        The mean of `runs - others` and half the width of its 95% confidence interval
        (Student's t).

    Raises:
        ValueError: If there are fewer than 2 runs, or another number of others.

    Example:
        >>> mean, half_width = paired_difference([0.72, 0.74, 0.73], [0.70, 0.73, 0.73])
        >>> round(mean, 3), round(half_width, 3)
        (0.01, 0.025)
    """
    if np.ndim(runs) != 1 or np.shape(runs) != np.shape(others) or len(np.asarray(runs)) < 2:
        raise ValueError(f"runs={runs!r}, others={others!r}: expected as many figures, 2 or more")
    differences = np.subtract(runs, others)
    count = len(differences)
    spread = differences.std(ddof=1) / np.sqrt(count)
    return float(differences.mean()), float(stats.t.ppf(0.975, count - 1) * spread)


def difference(runs: ArrayLike, others: ArrayLike, digits: int = 2) -> str:
    """Returns the mean difference and half the width of its interval as text.

    Example:
        >>> difference([72, 74, 73], [70, 73, 73])
        '+1.00 ± 2.48'
    """
    mean, half_width = paired_difference(runs, others)
    return f"{mean:+.{digits}f} ± {half_width:.{digits}f}"
