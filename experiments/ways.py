"""The ways of making a training step that the tables compare: JAX's own, and jaxcomp's recipes."""

from dataclasses import dataclass
from typing import Self

from jaxcomp import recipes
from jaxcomp.rules import Rules


@dataclass(frozen=True)
class Way:
    """How a training step deals with its activations.

    Attributes:
        spec: what it was parsed from; names the row of a table.
        rules: the model's rules from path and op kind to codec; () stores everything exactly.
        remat: whether each block of the model is recomputed in the backward pass.
        micro_batches: how many parts the batch is split into; their gradients are averaged. A
            BatchNorm then normalises by the statistics of its micro-batch, so that the step is
            another function than with 1.

    Example:
        >>> Way.parse("accumulate:4")
        Way(spec='accumulate:4', rules=(), remat=False, micro_batches=4)
    """

    spec: str
    rules: Rules = ()
    remat: bool = False
    micro_batches: int = 1

    @classmethod
    def parse(cls, spec: str) -> Self:
        """The way that ``spec`` names.

        Args:
            spec: ``plain``, ``remat``, ``accumulate:N`` (N micro-batches, 2 or more), or the spec
                of a codec or recipe, such as ``quantize:bits=2``.

        Raises:
            ValueError: ``spec`` is none of these.
        """
        name, _, argument = spec.partition(":")
        if spec == "plain":
            return cls(spec)
        if spec == "remat":
            return cls(spec, remat=True)
        if name == "accumulate":
            if not (argument.isdecimal() and int(argument) >= 2):
                raise ValueError(
                    f"way={spec!r}: expected accumulate:N with N=2 or more micro-batches"
                )
            return cls(spec, micro_batches=int(argument))
        try:
            return cls(spec, rules=recipes.from_spec(spec))
        except ValueError as error:
            raise ValueError(
                f"way={spec!r}: expected plain, remat, accumulate:N, or the spec of a codec or "
                f"recipe: {error}"
            ) from error

    def check_batch(self, batch: int, devices: int) -> None:
        """Checks that a batch divides over the micro-batches and the devices.

        Raises:
            ValueError: it does not.
        """
        if batch % (self.micro_batches * devices):
            raise ValueError(
                f"batch={batch}: expected a multiple of {self.micro_batches * devices} "
                f"({self.micro_batches} micro-batches of way={self.spec!r} x {devices} devices)"
            )
