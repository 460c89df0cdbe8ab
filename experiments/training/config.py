"""`TrainConfig`: the configuration of a training run."""

import dataclasses
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import jax.numpy as jnp

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True)
class TrainConfig:
    """Everything that the result of a run depends on, except for the machine.

    Attributes:
        model: Name of a model, as `jaxcomp.models.catalog.create` takes it.
        dataset: Name of a data set, as `experiments.data.datasets.load` takes it.
        data_dir: Folder of the full data sets; None is the default of TFDS.
        strategy: Spec of a strategy, as `jaxcomp.planning.Strategy.parse` takes it.
        epochs: Passes over the training split, which is reshuffled for each.
        epoch_steps: Steps of an epoch; None is the number of whole batches.
        batch: Images in a batch, over all devices.
        optimizer: `sgd` or `adamw`.
        lr: Peak learning rate, after a linear warm-up from 0; a cosine decay to 0 follows.
        warmup_epochs: Length of the warm-up.
        momentum: Momentum of SGD.
        nesterov: Whether SGD uses Nesterov momentum.
        weight_decay: Weight decay of parameters with two or more axes. It is coupled for SGD (added
            to the gradient) and decoupled for AdamW.
        label_smoothing: Weight of the uniform distribution in the targets.
        augment: Whether training images are augmented.
        dtype: Dtype of the computation. Parameters, optimizer and batch statistics are float32.
        plan_steps: Steps between two plans of the bits of a strategy that quantizes
            (`jaxcomp.diagnostics.BitPlanner`); None plans no bits.
        seed: Seed of the parameters, the order of the data and the augmentation, 0 or more.

    Raises:
        ValueError: If a value is outside its range.
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
            ("lr", 0 < self.lr < math.inf, "more than 0"),
            ("warmup_epochs", 0 <= self.warmup_epochs < self.epochs, "0 to less than epochs"),
            ("momentum", 0 <= self.momentum < 1, "0 to less than 1"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 or more"),
            ("label_smoothing", 0 <= self.label_smoothing < 1, "0 to less than 1"),
            ("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
            ("seed", self.seed >= 0, "0 or more"),
        ):
            if not valid:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected {expected}")

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as values that JSON can represent."""
        return asdict(self) | {"data_dir": self.data_dir and str(self.data_dir)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Returns the configuration that `to_json` wrote.

        Raises:
            ValueError: If it has other fields, as those of another version.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if different := sorted(known ^ fields.keys()):
            raise ValueError(f"config: fields that are unknown or missing: {', '.join(different)}")
        return cls(**fields | {"data_dir": fields["data_dir"] and Path(fields["data_dir"])})

    def check_same_run(self, other: Self, where: Path) -> None:
        """Checks that `other`, found in `where`, is the same run. `data_dir` may differ.

        Raises:
            ValueError: If it is another run. The message names the fields that differ.
        """
        mine, theirs = self.to_json(), other.to_json()
        different = [k for k in mine if k != "data_dir" and mine[k] != theirs[k]]
        if different:
            listing = ", ".join(f"{k}={mine[k]!r} (there: {theirs[k]!r})" for k in different)
            raise ValueError(f"the run in {where} is another one: expected the same {listing}")
