"""ResNet-50 of Equinox's layers, channels first, as its users write it."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, Key

State = eqx.nn.State


class ConvNorm(eqx.Module):
    """A convolution and a batch norm over the mapped batch."""

    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm

    def __init__(
        self, inputs: int, outputs: int, size: int, stride: int = 1, *, key: Key[Array, ""]
    ) -> None:
        self.conv = eqx.nn.Conv2d(
            inputs, outputs, size, stride, padding=size // 2, use_bias=False, key=key
        )
        self.norm = eqx.nn.BatchNorm(outputs, "batch", mode="batch")

    def __call__(self, x: Array, state: State) -> tuple[Array, State]:
        """The normalised convolution of one image."""
        return self.norm(self.conv(x), state)


class Bottleneck(eqx.Module):
    """Three convolutions and a skip connection."""

    branch: list[ConvNorm]
    skip: ConvNorm | None

    def __init__(self, inputs: int, width: int, stride: int, *, key: Key[Array, ""]) -> None:
        keys = jax.random.split(key, 4)
        self.branch = [
            ConvNorm(inputs, width, 1, key=keys[0]),
            ConvNorm(width, width, 3, stride, key=keys[1]),
            ConvNorm(width, 4 * width, 1, key=keys[2]),
        ]
        projects = stride > 1 or inputs != 4 * width
        self.skip = ConvNorm(inputs, 4 * width, 1, stride, key=keys[3]) if projects else None

    def __call__(self, x: Array, state: State) -> tuple[Array, State]:
        """The block's result for one image."""
        first, second, third = self.branch
        y, state = first(x, state)
        y, state = second(jax.nn.relu(y), state)
        y, state = third(jax.nn.relu(y), state)
        if self.skip is not None:
            x, state = self.skip(x, state)
        return jax.nn.relu(y + x), state


class ResNet50(eqx.Module):
    """ResNet-50 with a stem for images of 224 px."""

    stem: ConvNorm
    pool: eqx.nn.MaxPool2d
    blocks: list[Bottleneck]
    head: eqx.nn.Linear
    remat: Callable[[Bottleneck], Callable[..., Any]] = eqx.field(static=True)

    def __init__(
        self,
        classes: int = 1000,
        *,
        remat: Callable[[Bottleneck], Callable[..., Any]] = lambda block: block,
        key: Key[Array, ""],
    ) -> None:
        keys = iter(jax.random.split(key, 18))
        self.stem = ConvNorm(3, 64, 7, 2, key=next(keys))
        self.pool = eqx.nn.MaxPool2d(3, 2, padding=1)
        self.blocks, inputs = [], 64
        for stage, depth in enumerate((3, 4, 6, 3)):
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                self.blocks.append(Bottleneck(inputs, 64 * 2**stage, stride, key=next(keys)))
                inputs = 4 * 64 * 2**stage
        self.head = eqx.nn.Linear(inputs, classes, key=next(keys))
        self.remat = remat

    def __call__(self, x: Float[Array, "3 height width"], state: State) -> tuple[Array, State]:
        """The logits of one image."""
        x, state = self.stem(x, state)
        x = self.pool(jax.nn.relu(x))
        for block in self.blocks:
            x, state = self.remat(block)(x, state)
        return self.head(x.mean((1, 2))), state
