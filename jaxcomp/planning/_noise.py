"""How much noise the codes of each group bring into the gradient, measured on a user's data."""

import collections
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from jaxcomp.diagnostics._gradients import Loss, gradient_of, moved, sgd_variance, vector
from jaxcomp.planning._groups import policy_of
from jaxcomp.transform._compress import compress
from jaxcomp.transform._plan import without_indices

Data = tuple[Loss, nnx.Module, Any]  # a loss of a model and a batch, the model, and a batch

_DRAWS = 3
PARTS = 4  # of the batch, for SGD's noise
_CODE = "quantize:bits="


@dataclass(frozen=True)
class Noise:
    """Variances of the gradient, in units of SGD's own.

    Attributes:
        by_group: What the codes of a group add, with `bits` for each element.
        bits: These bits.
    """

    by_group: Mapping[str, float]
    bits: int

    def of(self, group: str, choice: str) -> float:
        """What a choice adds: the step between levels, squared, times what was measured."""
        if _CODE not in choice:
            return 0.0
        bits = int(choice.rpartition("=")[2])
        steps = (2**self.bits - 1) / (2**bits - 1)
        return self.by_group.get(group, 0.0) * steps**2

    def total(self, assignment: Mapping[str, str]) -> float:
        """The sum over the groups, since the noise of each is independent."""
        return sum(self.of(group, choice) for group, choice in assignment.items())

    def everywhere(self, choice: str) -> float:
        """The same where every group has this choice."""
        return self.total(dict.fromkeys(self.by_group, choice))


def measure(
    data: Data,
    groups: Iterable[str],
    bits: int,
    biased: bool,
    progress: Callable[[str], Any],
) -> Noise:
    """Measures the noise of the groups.

    Groups that differ in their indices alone, such as those of repeated blocks, are coded together,
    and have equal parts of what that adds.

    Args:
        data: A loss of a model and a batch, the model, and a batch.
        groups: Their names.
        bits: Bits of an element.
        biased: Whether batch norms may have codes that clip.
        progress: Is entered with what is measured.

    Raises:
        ValueError: If the gradient of the batch has no variance.
    """
    loss, model, batch = data
    alike: dict[str, list[str]] = collections.defaultdict(list)
    for group in groups:
        alike[without_indices(group)].append(group)
    everything = [group for members in alike.values() for group in members]
    params = nnx.state(model, nnx.Param)
    drawn = [moved(params, draw) for draw in range(_DRAWS)]
    exact = gradient_of(loss, model)
    with progress("noise of SGD"):
        right = [vector(exact(p, batch)) for p in drawn]
        scale = sgd_variance(exact, params, batch, PARTS)
    if not 0 < scale < np.inf:
        raise ValueError(
            f"data: the variance of SGD's gradient is {scale}; expected other examples"
        )
    found: dict[str, float] = {}
    for name, members in alike.items():
        assignment = dict.fromkeys(everything, "keep") | dict.fromkeys(members, f"{_CODE}{bits}")
        coded = gradient_of(loss, compress(nnx.clone(model), policy_of(assignment, biased)))
        with progress(f"noise of {name or 'no module'}"):
            errors = [
                np.square(vector(coded(p, batch)) - g).sum()
                for p, g in zip(drawn, right, strict=True)
            ]
        for group in members:
            found[group] = float(np.mean(errors)) / scale / len(members)
    return Noise(found, bits)
