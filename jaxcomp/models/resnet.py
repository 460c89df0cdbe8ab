"""Residual networks for ImageNet and CIFAR, built of `jaxcomp.nn`."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxcomp import nn
from jaxcomp.nn._linear import Stem
from jaxcomp.ops import CodedArray, value
from jaxcomp.policies import PolicyLike
from jaxcomp.transform import compress

# (batch, height, width, channels); the last three may differ between a layer's input and output.
Features = Float[Array, "batch _ _ _"] | CodedArray
_INIT = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")


class Layers:
    """Creates the layers of one network, with a shared dtype and shared random keys."""

    def __init__(self, dtype: DTypeLike | None, rngs: nnx.Rngs) -> None:
        self.dtype, self.rngs = dtype, rngs

    def conv(self, cin: int, cout: int, size: int, stride: int = 1) -> nn.Conv:
        """Returns a convolution without bias, padded to keep the size at stride 1."""
        return nn.Conv(cin, cout, **self._options(size, stride))

    def stem(self, cin: int, cout: int, size: int, stride: int) -> Stem:
        """Returns a convolution of the batch."""
        return Stem(cin, cout, **self._options(size, stride))

    def _options(self, size: int, stride: int) -> dict[str, Any]:
        pad = size // 2
        return dict(
            kernel_size=(size, size),
            strides=stride,
            padding=[(pad, pad), (pad, pad)],
            use_bias=False,
            kernel_init=_INIT,
            dtype=self.dtype,
            rngs=self.rngs,
        )

    def norm(self, features: int) -> nn.BatchNorm:
        """Returns a batch norm."""
        return nn.BatchNorm(features, momentum=0.9, dtype=self.dtype, rngs=self.rngs)

    def unit(self, cin: int, cout: int, size: int, stride: int = 1) -> nn.ConvNormAct:
        """Returns a convolution followed by its norm and a ReLU."""
        return nn.ConvNormAct(self.conv(cin, cout, size, stride), self.norm(cout))

    def shortcut(
        self, kind: "Shortcut", cin: int, cout: int, stride: int
    ) -> tuple["PadShortcut | nn.Conv | None", nn.BatchNorm | None]:
        """Returns the skip connection of a block and the norm after it.

        The skip connection is None if the shape does not change. The norm is None if there is none.
        """
        if stride == 1 and cin == cout:
            return None, None
        if kind == "pad":
            return PadShortcut(stride, cout - cin), None
        return self.conv(cin, cout, 1, stride), self.norm(cout)


# "projection" is a 1x1 convolution and a norm, as in networks for ImageNet.
Shortcut = Literal["projection", "pad"]


class PadShortcut(nnx.Module):
    """The skip connection without parameters of a CIFAR network.

    It takes every other pixel and pads new channels with zeros.

    Source: He et al., "Deep residual learning for image recognition" (arXiv:1512.03385), section
    4.2, option A.
    """

    def __init__(self, stride: int, new: int) -> None:
        self.stride, self.new = stride, new

    def __call__(self, x: Features) -> Features:
        """Returns the value of the skip connection."""
        strided = value(x)[:, :: self.stride, :: self.stride]
        widths = [(0, 0), (0, 0), (0, 0), (0, self.new)]
        padded = jnp.pad(strided, widths)
        if not isinstance(x, CodedArray):
            return padded
        return CodedArray(padded, jnp.pad(x.channel_scale, widths), None, x.codec)


class BasicBlock(nnx.Module):
    """Two 3x3 convolutions (He et al., arXiv:1512.03385, figure 5 left)."""

    expansion = 1

    def __init__(
        self, layers: Layers, cin: int, width: int, stride: int, shortcut: Shortcut
    ) -> None:
        self.unit1 = layers.unit(cin, width, 3, stride)
        conv, norm = layers.conv(width, width, 3), layers.norm(width)
        self.shortcut, residual_norm = layers.shortcut(shortcut, cin, width, stride)
        self.unit2 = nn.ConvNormAct(conv, norm, residual_norm=residual_norm)

    def __call__(self, x: Features) -> Features:
        """Returns the block's output."""
        # XLA assigns buffers by the order: after the branch, ResNet-50 needs up to 5% more memory.
        residual = x if self.shortcut is None else self.shortcut(x)
        return self.unit2(self.unit1(x), residual)


class Bottleneck(nnx.Module):
    """1x1, 3x3 and 1x1 convolutions; the 3x3 one has the stride (v1.5).

    Source: He et al., arXiv:1512.03385, figure 5 right.
    """

    expansion = 4

    def __init__(
        self, layers: Layers, cin: int, width: int, stride: int, shortcut: Shortcut
    ) -> None:
        cout = self.expansion * width
        self.unit1 = layers.unit(cin, width, 1)
        self.unit2 = layers.unit(width, width, 3, stride)
        conv, norm = layers.conv(width, cout, 1), layers.norm(cout)
        self.shortcut, residual_norm = layers.shortcut(shortcut, cin, cout, stride)
        self.unit3 = nn.ConvNormAct(conv, norm, residual_norm=residual_norm)

    def __call__(self, x: Features) -> Features:
        """Returns the block's output."""
        residual = x if self.shortcut is None else self.shortcut(x)  # first, as in BasicBlock
        return self.unit3(self.unit2(self.unit1(x)), residual)


class PreActBottleneck(nnx.Module):
    """Bottleneck with norm and ReLU before each convolution (He et al., arXiv:1603.05027)."""

    expansion = 4

    def __init__(
        self, layers: Layers, cin: int, width: int, stride: int, shortcut: Shortcut
    ) -> None:
        cout = self.expansion * width
        self.act1, self.conv1 = nn.NormAct(layers.norm(cin)), layers.conv(cin, width, 1)
        self.act2, self.conv2 = nn.NormAct(layers.norm(width)), layers.conv(width, width, 3, stride)
        self.act3, self.conv3 = nn.NormAct(layers.norm(width)), layers.conv(width, cout, 1)
        changes = stride != 1 or cin != cout
        self.shortcut = layers.conv(cin, cout, 1, stride) if changes else None

    def __call__(self, x: Array) -> Array:
        """Returns the block's output."""
        activated = self.act1(x)
        residual = x if self.shortcut is None else self.shortcut(activated)
        x = self.conv2(self.act2(self.conv1(activated)))
        return self.conv3(self.act3(x)) + residual


class ResNet(nnx.Module):
    """A residual network."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck] | type[PreActBottleneck],
        depths: tuple[int, ...],
        width: int,
        *,
        imagenet: bool,
        num_classes: int,
        in_channels: int = 3,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        layers = Layers(dtype, rngs)
        self.preact = block is PreActBottleneck
        size, stride = (7, 2) if imagenet else (3, 1)
        self.conv = layers.stem(in_channels, width, size, stride)
        pool = nn.MaxPool((3, 3), (2, 2), [(1, 1), (1, 1)]) if imagenet else None
        shortcut: Shortcut = "projection" if imagenet else "pad"
        self.blocks: nnx.List[nnx.Module] = nnx.List([])
        cin = width
        for stage, depth in enumerate(depths):
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                self.blocks.append(block(layers, cin, width * 2**stage, stride, shortcut))
                cin = width * 2**stage * block.expansion
        self.pool = pool if self.preact else None
        in_stem = None if self.preact else pool
        self.act = nn.NormAct(layers.norm(cin if self.preact else width), pool=in_stem)
        self.head = nn.Linear(cin, num_classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: Float[Array, "batch _ _ _"]) -> Float[Array, "batch classes"]:
        """Returns the logits in float32."""
        x: Features = self.conv(images)
        if not self.preact:
            x = self.act(value(x))
        elif self.pool is not None:
            x = self.pool(x)
        for block in self.blocks:
            x = block(x)
        if self.preact:
            x = self.act(value(x))
        return self.head(value(x).mean((1, 2))).astype(jnp.float32)


MODELS: dict[str, Callable[..., ResNet]] = {
    **{
        f"resnet{depth}": functools.partial(ResNet, block, depths, 64, imagenet=True)
        for depth, block, depths in (
            (18, BasicBlock, (2, 2, 2, 2)),
            (34, BasicBlock, (3, 4, 6, 3)),
            (50, Bottleneck, (3, 4, 6, 3)),
            (101, Bottleneck, (3, 4, 23, 3)),
            (152, Bottleneck, (3, 8, 36, 3)),
        )
    },
    **{
        f"resnet{6 * n + 2}": functools.partial(ResNet, BasicBlock, (n, n, n), 16, imagenet=False)
        for n in (1, 2, 3, 5, 7, 9, 18)
    },
    "preact164": functools.partial(ResNet, PreActBottleneck, (18, 18, 18), 16, imagenet=False),
}


def create(
    name: str,
    *,
    num_classes: int,
    in_channels: int = 3,
    policy: PolicyLike | None = None,
    dtype: DTypeLike | None = None,
    rngs: nnx.Rngs,
) -> ResNet:
    """Makes a residual network by name.

    Args:
        name: "resnet18", "34", "50", "101", "152" (ImageNet, v1.5: the 3x3 convolution strides),
            "resnet8", "14", "20", "32", "44", "56", "110" (CIFAR, shortcuts without parameters) or
            "preact164" (CIFAR).
        num_classes: Number of logits.
        in_channels: Channels of the images.
        policy: What `jaxcomp.compress` takes; None leaves the model uncompressed.
        dtype: Dtype of the computation; parameters and statistics are float32.
        rngs: Keys for the parameters.

    Returns:
        The network, which takes images of shape (batch, height, width, channels).

    Raises:
        ValueError: If `name` is unknown or the policy does not fit the network.

    Example:
        >>> model = nnx.eval_shape(lambda: create("resnet20", num_classes=10, rngs=nnx.Rngs(0)))
        >>> sum(p.size for p in nnx.to_flat_state(nnx.state(model, nnx.Param)).leaves)
        269722
    """
    if name not in MODELS:
        raise ValueError(f"name={name!r}: expected one of {list(MODELS)}")
    model = MODELS[name](
        num_classes=num_classes,
        in_channels=in_channels,
        dtype=dtype,
        rngs=rngs,
    )
    return model if policy is None else compress(model, policy)
