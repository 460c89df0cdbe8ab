"""`Row`: one strategy in a comparison of training runs."""

import statistics
from dataclasses import dataclass

from experiments.comparison.measure import Measurement


@dataclass(frozen=True)
class Row:
    """One strategy in the comparison.

    Attributes:
        strategy: Spec of the strategy.
        test_accuracy: Final accuracy on the test split, for each seed.
        loss: Training loss of each step, for the first seed.
        measurement: Memory and time of a step.
    """

    strategy: str
    test_accuracy: list[float]
    loss: list[float]
    measurement: Measurement

    def accuracy(self) -> str | None:
        """Returns mean ± standard deviation; None for one seed, which bears no comparison."""
        if len(self.test_accuracy) == 1:
            return None
        mean, deviation = statistics.mean(self.test_accuracy), statistics.stdev(self.test_accuracy)
        return f"{mean:.2%} ± {deviation:.2%}"

    def cells(self) -> tuple[str, ...]:
        """Returns the cells of a table; the accuracy only if there are several seeds."""
        cost = self.measurement
        accuracy = self.accuracy()
        return (
            self.strategy,
            *([] if accuracy is None else [accuracy]),
            mebibytes(cost.declared_residual_bytes),
            f"{cost.bits_per_element:.2f}",
            mebibytes(cost.temp_bytes),
            f"{cost.step_time_ratio:.2f}",
        )


def mebibytes(count: int | None) -> str:
    """Formats a number of bytes in MiB."""
    return "not given by this backend" if count is None else f"{count / 2**20:.1f} MiB"
