"""Bias and noise of vectors that were drawn several times."""

import dataclasses

import numpy as np

Z = 1.96  # of a confidence interval of 95%
_ROUNDING = 10  # a mean error is of the codes if it is so much larger than without them
_MOST_SIGNS = 14  # of draws, as a power of two


@dataclasses.dataclass(frozen=True)
class Errors:
    """Of gradients that were drawn several times, against the exact one, as parts of its norm.

    Attributes:
        bias: Norm of the mean error that is no noise; an estimate without the floor, 0 if below it.
        bias_interval: Its 95% confidence interval, by the jackknife.
        floor: Norm of the mean error that the noise alone would leave after so many draws.
        noise: Standard deviation of one gradient.
        p_value: How often random signs of the drawn errors give a mean as large as theirs; 1 if
            their mean is less than ten times that of rounding alone.
    """

    bias: float
    bias_interval: tuple[float, float]
    floor: float
    noise: float
    p_value: float


def errors_of(errors: np.ndarray, control: np.ndarray, norm: float) -> Errors:
    """Returns the bias by the products of different draws, whose noise is zero on average."""
    draws = len(errors)
    products = errors @ errors.T
    own = np.diag(products)

    def squared_bias(total: float, own: float, draws: int) -> float:
        return (total - own) / (draws * (draws - 1))

    total = products.sum()
    square = squared_bias(total, own.sum(), draws)
    left_out = [
        squared_bias(total - 2 * products[i].sum() + own[i], own.sum() - own[i], draws - 1)
        for i in range(draws)
    ]
    deviation = np.sqrt((draws - 1) * np.var(left_out))
    variance = np.var(errors, axis=0, ddof=1).sum()

    mean, of_rounding = (np.linalg.norm(rows.mean(0)) for rows in (errors, control))
    more_than_rounding = mean > _ROUNDING * of_rounding

    def part(square: float) -> float:
        return float(np.sqrt(max(0.0, square)) / norm)

    return Errors(
        bias=part(square),
        bias_interval=(part(square - Z * deviation), part(square + Z * deviation)),
        floor=part(variance / draws),
        noise=part(variance),
        p_value=_p_value(products) if more_than_rounding else 1.0,
    )


def _p_value(products: np.ndarray) -> float:
    """Returns how often random signs of vectors give a sum as long as theirs.

    Args:
        products: The products of each vector with each.
    """
    draws = len(products)
    if draws - 1 <= _MOST_SIGNS:  # all combinations: the first sign does not matter
        numbers = np.arange(2 ** (draws - 1))
        signs = 1 - 2 * (numbers[:, None] >> np.arange(draws) & 1)
    else:
        signs = np.random.default_rng(0).choice([-1, 1], (2**_MOST_SIGNS, draws))
        signs[0] = 1
    squares = ((signs @ products) * signs).sum(1)
    return float(np.mean(squares >= squares[0] * (1 - 1e-9)))
