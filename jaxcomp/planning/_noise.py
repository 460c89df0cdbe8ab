"""How much noise the codes of each group bring into the gradient, measured on a user's data."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.nnx import filterlib

from jaxcomp.diagnostics._losses import (
    Loss,
    moved,
    of_parameters,
    parameters_of,
    sgd_variance,
    vector,
)
from jaxcomp.planning._groups import bits_of, coded, policy_of
from jaxcomp.policies._policy import Policy
from jaxcomp.transform._checkpoint import checkpoint
from jaxcomp.transform._compress import compress
from jaxcomp.transform._plan import without_indices

# A loss of a model and a batch, the model or the parameters of a function, and a batch.
Data = tuple[Loss, Any, Any]
Meter = Callable[[Mapping[str, str]], float]

_DRAWS = 3
PARTS = 4  # of the batch, for SGD's noise


@dataclasses.dataclass(frozen=True)
class Noise:
    """Variances of the gradient, in units of SGD's own.

    Attributes:
        measured: What the codes of each group add, by bits of an element.
    """

    measured: Mapping[int, Mapping[str, float]]

    def of(self, group: str, choice: str) -> float:
        """Returns what a choice adds.

        With bits that were not measured it is in proportion to the square of the step between two
        levels.
        """
        bits = bits_of(choice)
        if bits is None:
            return 0.0
        known = min(self.measured, key=lambda b: abs(b - bits))
        steps = (2**known - 1) / (2**bits - 1)
        return self.measured[known].get(group, 0.0) * steps**2

    def total(self, assignment: Mapping[str, str]) -> float:
        """Returns the sum over the groups, since the noise of each is independent."""
        return sum(self.of(group, choice) for group, choice in assignment.items())

    def everywhere(self, choice: str) -> float:
        """Returns the same where every group has this choice."""
        groups = {group for found in self.measured.values() for group in found}
        return self.total(dict.fromkeys(groups, choice))


def alike(groups: Iterable[str]) -> list[list[str]]:
    """Returns the groups that differ in their indices alone, such as those of repeated blocks.

    Example:
        >>> alike(["blocks/0", "blocks/1", "head"])
        [['blocks/0', 'blocks/1'], ['head']]
    """
    found: dict[str, list[str]] = collections.defaultdict(list)
    for group in groups:
        found[without_indices(group)].append(group)
    return list(found.values())


def meter(
    data: Data,
    biased: bool,
    part: float,
    progress: Callable[[str], AbstractContextManager[Any]],
    wrt: filterlib.Filter = nnx.Param,
) -> Meter:
    """Returns what measures the variance that choices for groups add, in units of SGD's own.

    Args:
        data: A loss of a model and a batch, the model or the parameters of a function, and a batch.
        biased: Whether batch norms may have 2-bit codes, which are biased.
        part: The size of the batch as a part of that of the plan. Values that are too small for a
            code are so by this part.
        progress: Is entered with what is measured.
        wrt: Selects the variables of a module that the gradient is taken by.

    Raises:
        ValueError: If the gradient of the batch has no variance.
    """
    loss, model, batch = data
    params = parameters_of(model, wrt)
    drawn = [moved(params, draw) for draw in range(_DRAWS)]
    exact = jax.jit(jax.grad(of_parameters(loss, model, wrt=wrt)))
    with progress("noise of SGD"):
        right = [vector(exact(p, batch)) for p in drawn]
        scale = sgd_variance(exact, params, batch, PARTS)
    if not 0 < scale < np.inf:
        raise ValueError(f"data: expected examples whose gradients vary; their variance is {scale}")

    def variance(assignment: Mapping[str, str]) -> float:
        policy = policy_of(assignment, biased)
        rules = (dataclasses.replace(r, min_size=int(part * r.min_size)) for r in policy.rules)
        coded = _coded_gradient(loss, model, Policy(tuple(rules)), wrt)
        pairs = zip(drawn, right, strict=True)
        errors = [np.square(vector(coded(p, batch)) - gradient).sum() for p, gradient in pairs]
        return float(np.mean(errors)) / scale

    return variance


def measure(
    variance: Meter,
    together: Sequence[Sequence[str]],
    bits: Iterable[int],
    progress: Callable[[str], AbstractContextManager[Any]],
) -> Noise:
    """Measures the noise of the groups.

    Args:
        variance: What measures it.
        together: Names of groups that are coded together. Each has an equal part of what they add.
        bits: Bits of an element that are measured.
        progress: Is entered with what is measured.
    """
    kept = {group: "keep" for members in together for group in members}
    measured: dict[int, dict[str, float]] = collections.defaultdict(dict)
    for number, members in itertools.product(bits, together):
        name = members[0] if len(members) == 1 else without_indices(members[0])
        with progress(f"noise of {number} bits in {name or 'no module'}"):
            found = variance(kept | dict.fromkeys(members, coded(number))) / len(members)
        measured[number] |= dict.fromkeys(members, found)
    return Noise(measured)


def _coded_gradient(
    loss: Loss, model: Any, policy: Policy, wrt: filterlib.Filter
) -> Callable[[Any, Any], Any]:
    """Returns a gradient that saves what a policy says, of the parameters and a batch."""
    if isinstance(model, nnx.Module):
        of = of_parameters(loss, compress(nnx.clone(model), policy), wrt=wrt)
    else:
        of = checkpoint(of_parameters(loss, model), policy)
    return jax.jit(jax.grad(of))
