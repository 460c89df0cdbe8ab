"""What determines the outcome of a training run."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import jax.numpy as jnp

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True)
class TrainConfig:
    """All that a run's result depends on, besides the machine.

    Attributes:
        model: name of a model, as ``jaxcomp.models.catalog.create`` takes it.
        dataset: name of a data set, as ``experiments.data.load`` takes it.
        data_dir: where the full data sets are; None is TFDS's own default.
        strategy: what the step stores, as :meth:`experiments.strategies.Strategy.parse` takes it.
        epochs: passes over the training split, shuffled anew for each.
        epoch_steps: steps of an epoch; None is as many as there are whole batches.
        batch: images in a batch, over all devices.
        optimizer: ``sgd`` or ``adamw``.
        lr: peak of the learning rate: a linear warm-up from 0, then a cosine down to 0.
        warmup_epochs: length of the warm-up.
        momentum: of SGD.
        nesterov: whether SGD's momentum is Nesterov's.
        weight_decay: of parameters of two or more axes; SGD's is coupled (added to the gradient),
            AdamW's is not.
        label_smoothing: weight of the uniform distribution in the targets.
        augment: whether training images are augmented.
        dtype: of the computation; parameters, optimiser and batch statistics are float32.
        plan_steps: steps between two plans of the bits of a strategy that quantizes
            (`jaxcomp.diagnostics._bits.BitPlanner`); None is no plan.
        seed: of the parameters, the order of the data and the augmentation, 0 or more.

    Raises:
        ValueError: a value is outside its range.
    """

    model: str = "resnet20"
    dataset: str = "fashion_mnist_embedded"
    data_dir: Path | None = None
    strategy: str = "plain"
    epochs: int = 10
    epoch_steps: int | None = None
    batch: int = 128
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.1
    warmup_epochs: float = 0.5
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-4
    label_smoothing: float = 0.0
    augment: bool = True
    dtype: Literal["float32", "bfloat16"] = "float32"
    plan_steps: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, valid, expected in (
            ("epochs", self.epochs >= 1, "1 or more"),
            ("epoch_steps", self.epoch_steps is None or self.epoch_steps >= 1, "1 or more"),
            ("plan_steps", self.plan_steps is None or self.plan_steps >= 1, "1 or more"),
            ("batch", self.batch >= 1, "1 or more"),
            ("optimizer", self.optimizer in ("sgd", "adamw"), "sgd or adamw"),
            ("lr", self.lr > 0, "more than 0"),
            ("warmup_epochs", 0 <= self.warmup_epochs < self.epochs, "0 to less than epochs"),
            ("momentum", 0 <= self.momentum < 1, "0 to less than 1"),
            ("weight_decay", self.weight_decay >= 0, "0 or more"),
            ("label_smoothing", 0 <= self.label_smoothing < 1, "0 to less than 1"),
            ("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
            ("seed", self.seed >= 0, "0 or more"),
        ):
            if not valid:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected {expected}")

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        return asdict(self) | {"data_dir": self.data_dir and str(self.data_dir)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`."""
        return cls(**fields | {"data_dir": fields["data_dir"] and Path(fields["data_dir"])})

    def check_same_run(self, other: Self, where: Path) -> None:
        """Checks that ``other``, found at ``where``, is the same run; the data may have moved.

        Raises:
            ValueError: it is not; the text names the fields that differ.
        """
        mine, theirs = self.to_json(), other.to_json()
        different = [k for k in mine if k != "data_dir" and mine[k] != theirs[k]]
        if different:
            listing = ", ".join(f"{k}={mine[k]!r} (there: {theirs[k]!r})" for k in different)
            raise ValueError(f"the run in {where} is another one: expected the same {listing}")
