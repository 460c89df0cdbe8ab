"""ResMLP: image classifiers of linear layers, built from `jaxcomp.nn`."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxcomp import nn
from jaxcomp.nn._linear import Stem
from jaxcomp.policies import PolicyLike
from jaxcomp.transform import compress

_INIT = nnx.initializers.truncated_normal(0.02)


class Branch(nnx.Module):
    """What the two sublayers of a block share: LayerScale and stochastic depth."""

    def __init__(self, dim: int, scale: float, drop: float, options: dict[str, Any]) -> None:
        self.scale = nn.Affine(dim, use_bias=False, scale_init=scale, **options)
        # One mask value for each sample.
        self.drop = nn.Dropout(drop, broadcast_dims=(1, 2), rngs=options["rngs"]) if drop else None

    def __call__(
        self, x: Float[Array, "batch tokens _"], linear: nn.Linear | None = None
    ) -> Float[Array, "batch tokens dim"]:
        """Returns the scaled `x` or `linear(x)`, which the skip connection is added to."""
        x = self.scale(x) if linear is None else linear(x, scale=self.scale)
        return x if self.drop is None else self.drop(x)


class Block(nnx.Module):
    """A linear layer over tokens and a two-layer perceptron over features, each with a skip.

    Touvron et al., arXiv:2105.03404, section 2, equations 2 and 3.
    """

    def __init__(
        self, tokens: int, dim: int, scale: float, drop: float, options: dict[str, Any]
    ) -> None:
        linear = functools.partial(nn.Linear, kernel_init=_INIT, **options)
        self.norm1, self.norm2 = (nn.Affine(dim, **options) for _ in range(2))
        self.mixing = linear(tokens, tokens)
        self.branch1, self.branch2 = (Branch(dim, scale, drop, options) for _ in range(2))
        self.fc1 = linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.fc2 = linear(4 * dim, dim)

    def __call__(self, x: Float[Array, "batch tokens dim"]) -> Float[Array, "batch tokens dim"]:
        """Returns the block's output."""
        mixed = self.mixing(self.norm1(x).swapaxes(1, 2)).swapaxes(1, 2)
        x = x + self.branch1(mixed)
        return x + self.branch2(self.act(self.fc1(self.norm2(x))), self.fc2)


class ResMLP(nnx.Module):
    """A perceptron over patches of an image, with skip connections."""

    def __init__(
        self,
        dim: int,
        depth: int,
        *,
        patch: int = 16,
        scale: float,
        image_size: int,
        num_classes: int,
        in_channels: int = 3,
        stochastic_depth: float = 0.0,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        if image_size < patch or image_size % patch:
            raise ValueError(f"image_size={image_size}: expected a multiple of {patch}")
        if not 0 <= stochastic_depth < 1:
            raise ValueError(f"stochastic_depth={stochastic_depth}: expected 0 to less than 1")
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        tokens = (image_size // patch) ** 2
        self.stem = Stem(in_channels, dim, (patch, patch), patch, padding="VALID", **options)
        self.blocks = nnx.List(
            Block(tokens, dim, scale, stochastic_depth, options) for _ in range(depth)
        )
        self.norm = nn.Affine(dim, **options)
        self.head = nn.Linear(dim, num_classes, kernel_init=_INIT, **options)

    def __call__(self, images: Float[Array, "batch _ _ _"]) -> Float[Array, "batch classes"]:
        """Returns the logits in float32."""
        x = self.stem(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1)).astype(jnp.float32)


MODELS: dict[str, Callable[..., ResMLP]] = {
    "resmlp_s12": functools.partial(ResMLP, 384, 12, scale=0.1),
    "resmlp_s24": functools.partial(ResMLP, 384, 24, scale=1e-5),
    "resmlp_s36": functools.partial(ResMLP, 384, 36, scale=1e-6),
    "resmlp_b24": functools.partial(ResMLP, 768, 24, scale=1e-6),
    "resmlp_tiny": functools.partial(ResMLP, 128, 6, patch=4, scale=0.1),
}


def create(
    name: str,
    *,
    num_classes: int,
    image_size: int = 224,
    in_channels: int = 3,
    stochastic_depth: float = 0.0,
    policy: PolicyLike | None = None,
    dtype: DTypeLike | None = None,
    rngs: nnx.Rngs,
) -> ResMLP:
    """Makes a ResMLP by name (Touvron et al., arXiv:2105.03404, table 1 and section 3.1).

    GELU has the tanh form, as in Flax. LayerScale starts at 0.1 with 12 blocks, at 1e-5 with 24,
    and at 1e-6 with 36 and in B24.

    Args:
        name: "resmlp_s12", "resmlp_s24", "resmlp_s36", "resmlp_b24" (patches of 16x16 pixels), or
            "resmlp_tiny" (6 blocks of 128 features, patches of 4x4 pixels, for images of 28x28 or
            32x32).
        num_classes: Number of logits.
        image_size: Height and width of the images.
        in_channels: Channels of the images.
        stochastic_depth: Probability that a sample skips a sublayer in training.
        policy: What `jaxcomp.compress` takes; None leaves the model uncompressed.
        dtype: Dtype of the computation; parameters are float32.
        rngs: Keys for the parameters and, with `stochastic_depth`, for dropping.

    Returns:
        The network, which takes images of shape (batch, image_size, image_size, channels).

    Raises:
        ValueError: If `name` is unknown, the policy does not fit the network, `image_size` is no
            multiple of the patch's or `stochastic_depth` is not in its range.

    Example:
        >>> model = nnx.eval_shape(lambda: create("resmlp_s12", num_classes=1000, rngs=nnx.Rngs(0)))
        >>> sum(p.size for p in nnx.to_flat_state(nnx.state(model, nnx.Param)).leaves)
        15350872
    """
    if name not in MODELS:
        raise ValueError(f"name={name!r}: expected one of {list(MODELS)}")
    model = MODELS[name](
        num_classes=num_classes,
        image_size=image_size,
        in_channels=in_channels,
        stochastic_depth=stochastic_depth,
        dtype=dtype,
        rngs=rngs,
    )
    return model if policy is None else compress(model, policy)
