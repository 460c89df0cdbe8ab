"""MobileNetV3-Large in Flax NNX. Source: arXiv:1905.02244."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

# kernel, expanded features, features, squeeze and excite, activation, stride
Rows = tuple[tuple[int, int, int, bool, str, int], ...]
LARGE: Rows = (
    (3, 16, 16, False, "relu", 1),
    (3, 64, 24, False, "relu", 2),
    (3, 72, 24, False, "relu", 1),
    (5, 72, 40, True, "relu", 2),
    (5, 120, 40, True, "relu", 1),
    (5, 120, 40, True, "relu", 1),
    (3, 240, 80, False, "hard_swish", 2),
    (3, 200, 80, False, "hard_swish", 1),
    (3, 184, 80, False, "hard_swish", 1),
    (3, 184, 80, False, "hard_swish", 1),
    (3, 480, 112, True, "hard_swish", 1),
    (3, 672, 112, True, "hard_swish", 1),
    (5, 672, 160, True, "hard_swish", 2),
    (5, 960, 160, True, "hard_swish", 1),
    (5, 960, 160, True, "hard_swish", 1),
)


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    return nnx.relu if name == "relu" else nnx.hard_swish


def make_divisible(features: int, divisor: int = 8) -> int:
    rounded = max(divisor, (features + divisor // 2) // divisor * divisor)
    return rounded if rounded >= 0.9 * features else rounded + divisor


class ConvNorm(nnx.Module):
    def __init__(
        self,
        cin: int,
        cout: int,
        kernel: int,
        stride: int = 1,
        groups: int = 1,
        *,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        pad = kernel // 2
        self.conv = nnx.Conv(
            cin,
            cout,
            (kernel, kernel),
            stride,
            padding=[(pad, pad), (pad, pad)],
            feature_group_count=groups,
            use_bias=False,
            dtype=dtype,
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(cout, momentum=0.99, epsilon=1e-3, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))


class SqueezeExcite(nnx.Module):
    def __init__(self, features: int, *, dtype: DTypeLike | None = None, rngs: nnx.Rngs) -> None:
        squeezed = make_divisible(features // 4)
        self.fc1 = nnx.Conv(features, squeezed, (1, 1), dtype=dtype, rngs=rngs)
        self.fc2 = nnx.Conv(squeezed, features, (1, 1), dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = x.mean(axis=(1, 2), keepdims=True)
        scale = nnx.hard_sigmoid(self.fc2(nnx.relu(self.fc1(scale))))
        return x * scale


class InvertedResidual(nnx.Module):
    def __init__(
        self,
        kernel: int,
        cin: int,
        expanded: int,
        cout: int,
        se: bool,
        act: str,
        stride: int,
        *,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.act = activation(act)
        self.expand = ConvNorm(cin, expanded, 1, **options) if expanded != cin else None
        self.depthwise = ConvNorm(expanded, expanded, kernel, stride, expanded, **options)
        self.se = SqueezeExcite(expanded, **options) if se else None
        self.project = ConvNorm(expanded, cout, 1, **options)
        self.skip = stride == 1 and cin == cout

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        if self.expand is not None:
            y = self.act(self.expand(y))
        y = self.act(self.depthwise(y))
        if self.se is not None:
            y = self.se(y)
        y = self.project(y)
        return x + y if self.skip else y


class MobileNetV3(nnx.Module):
    def __init__(
        self,
        rows: Rows,
        last: int,
        num_classes: int = 1000,
        *,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.stem = ConvNorm(3, 16, 3, 2, **options)
        blocks, cin = [], 16
        for kernel, expanded, cout, se, act, stride in rows:
            blocks.append(InvertedResidual(kernel, cin, expanded, cout, se, act, stride, **options))
            cin = cout
        self.blocks = nnx.List(blocks)
        self.top = ConvNorm(cin, 6 * cin, 1, **options)
        self.fc1 = nnx.Linear(6 * cin, last, **options)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.fc2 = nnx.Linear(last, num_classes, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.hard_swish(self.stem(x))
        for block in self.blocks:
            x = block(x)
        x = nnx.hard_swish(self.top(x))
        x = nnx.hard_swish(self.fc1(x.mean(axis=(1, 2))))
        return self.fc2(self.dropout(x))


def mobilenet_v3_large(num_classes: int = 1000, **options: Any) -> MobileNetV3:
    return MobileNetV3(LARGE, 1280, num_classes, **options)
