import functools
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp.models import resnet
from jaxcomp.recipes import from_spec

SPECS = (
    "exact",
    "cast:dtype=bfloat16",
    "avg_pool:window=2",
    "quantize:bits=1",
    "quantize:bits=2",
    "quantize:bits=4",
    "quantize:bits=8",
)
KINDS: dict[str, typing.Any] = {
    "imagenet": (resnet.Bottleneck, (1, 1), 4, True),
    "imagenet, basic": (resnet.BasicBlock, (1, 1), 8, True),
    "cifar": (resnet.BasicBlock, (1, 1), 8, False),
    "cifar, pre-activation": (resnet.PreActBottleneck, (1, 1), 4, False),
}
CLASSES = 3

# From torchvision's documentation of its weights, 1000 classes.
IMAGENET = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}


def _preact164() -> int:
    """3n blocks of 1x1, 3x3, 1x1 at widths 16, 32, 64, in closed form (n = 18, 10 classes)."""
    n = (164 - 2) // 9
    total = 3 * 3 * 3 * 16
    cin = 16
    for width in (16, 32, 64):
        cout = 4 * width
        inner = 2 * width + 9 * width**2 + 2 * width + width * cout  # after the first convolution
        total += n * inner
        total += 2 * cin + cin * width + cin * cout  # first block: norm, convolution, shortcut
        total += (n - 1) * (2 * cout + cout * width)
        cin = cout
    return total + 2 * cin + cin * 10 + 10


def _cifar(n: int) -> int:
    """6n + 2 layers of 3x3 at widths 16, 32, 64 with shortcuts without parameters, 10 classes."""
    convs = 3 * 16 + 2 * n * (16**2 + 32**2 + 64**2) - 16**2 - 32**2 + 16**2
    convs += 16 * 32 + 32 * 64 - 32**2 - 64**2 + 32**2
    norms = 2 * (16 + 2 * n * (16 + 32 + 64))
    return 9 * convs + norms + 64 * 10 + 10


def _abstract(name: str, spec: str = "exact", num_classes: int = 10) -> resnet.ResNet:
    return nnx.eval_shape(
        lambda: resnet.create(
            name, num_classes=num_classes, rules=from_spec(spec), rngs=nnx.Rngs(0)
        )
    )


def _count(model: resnet.ResNet) -> int:
    return sum(math.prod(p.shape) for p in nnx.to_flat_state(nnx.state(model, nnx.Param)).leaves)


@pytest.mark.parametrize(("name", "count"), IMAGENET.items())
def test_imagenet_parameter_counts(name: str, count: int) -> None:
    assert _count(_abstract(name, num_classes=1000)) == count
