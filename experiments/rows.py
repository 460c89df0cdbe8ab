"""A row of a comparison of training runs."""

import statistics
from dataclasses import dataclass

from experiments.measure import Measurement


@dataclass(frozen=True)
class Row:
    """One strategy in the comparison.

    Attributes:
        strategy: its spec.
        test_accuracy: at the end, one for each seed.
        loss: of each training step, of the first seed's run.
        measurement: what a step costs.
    """

    strategy: str
    test_accuracy: list[float]
    loss: list[float]
    measurement: Measurement

    def cells(self) -> tuple[str, ...]:
        """The row as text, under :data:`HEADER`; several seeds as mean ± standard deviation."""
        accuracy = f"{statistics.mean(self.test_accuracy):.2%}"
        if len(self.test_accuracy) > 1:
            accuracy += f" ± {statistics.stdev(self.test_accuracy):.2%}"
        cost = self.measurement
        return (
            self.strategy,
            accuracy,
            mebibytes(cost.declared_residual_bytes),
            f"{cost.bits_per_element:.2f}",
            mebibytes(cost.temp_bytes),
            f"{cost.step_time_ratio:.2f}",
        )


def mebibytes(count: int | None) -> str:
    """Bytes as text in MiB."""
    return "not given by this backend" if count is None else f"{count / 2**20:.1f} MiB"
