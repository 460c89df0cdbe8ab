"""Transformers and state space models of images."""

import jax
from flax import nnx

from tests.zoo.convolutional import equinox_network
from tests.zoo.losses import LABELS, cross_entropy, images
from tests.zoo.networks import of_nnx


def nnx_vit():
    from attnax import VisionTransformer, VisionTransformerConfig

    sizes = {"d_model": 32, "num_heads": 2, "num_layers": 2, "d_ff": 64, "num_classes": 5}
    config = VisionTransformerConfig(image_size=32, patch_size=8, dropout_rate=0.1, **sizes)
    model = VisionTransformer(nnx.Rngs(0), config)
    return of_nnx(model, lambda model, x: cross_entropy(model(x), LABELS), images())


def equinox_vit():
    from equimo.models.vit import VisionTransformer

    sizes = {"img_size": 32, "in_channels": 3, "dim": 32, "patch_size": 8, "num_heads": 2}
    return equinox_network(
        VisionTransformer(
            **sizes, depths=[2], num_classes=5, pos_drop_rate=0.1, key=jax.random.key(0)
        )
    )


def equinox_vision_mamba():
    from equimo.models.vssd import Vssd

    sizes = {"dim": 16, "d_state": 8, "depths": [1, 1], "num_heads": [2, 2]}
    layers = "mamba2mixer", "attention"
    model = Vssd(32, 3, **sizes, attentions_layers=layers, num_classes=5, key=jax.random.key(0))
    return equinox_network(model)
