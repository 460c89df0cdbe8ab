"""Networks that make images or fields: diffusion, VQ-VAE, neural operator."""

import jax
import jax.numpy as jnp

from tests.helpers import normal
from tests.zoo.losses import images
from tests.zoo.networks import of_function


def of_denoiser(model):
    """A Linen model of a noisy image, a time and a text."""
    inputs = images(16, 2), jnp.array([0.3, 0.7]), normal((2, 4, 16))
    params = jax.jit(model.init)(jax.random.key(0), *inputs)

    def loss(params, noise, *inputs):
        return jnp.mean((model.apply(params, *inputs) - noise) ** 2), ()

    return of_function(loss, params, images(16, 2), *inputs)


def diffusion_unet():
    from flaxdiff.models.simple_unet import Unet

    return of_denoiser(
        Unet(
            emb_features=32,
            feature_depths=(16, 32),
            attention_configs=({"heads": 2}, {"heads": 2}),
            num_res_blocks=1,
        )
    )


def diffusion_state_space():
    from flaxdiff.models.ssm_dit import HybridSSMAttentionDiT

    return of_denoiser(
        HybridSSMAttentionDiT(
            patch_size=4, emb_features=32, num_layers=2, num_heads=2, block_pattern=["ssm", "attn"]
        )
    )


def vq_vae():
    import haiku

    def forward(x):
        y = jax.nn.relu(haiku.Conv2D(16, 4, 2)(x))
        y = haiku.Conv2D(16, 3)(y)
        found = haiku.nets.VectorQuantizerEMA(16, 32, 0.25, 0.99)(y, True)
        y = haiku.Conv2DTranspose(3, 4, 2)(jax.nn.relu(found["quantize"]))
        return jnp.mean((y - x) ** 2) + found["loss"]

    model = haiku.transform_with_state(forward)
    x = images(16)
    params, state = jax.jit(model.init)(jax.random.key(0), x)
    return of_function(
        lambda params, state, x: model.apply(params, state, None, x), params, state, x
    )


def fourier_operator():
    import equinox
    from neojax.models.fno import FNO

    model = FNO(
        jax.random.key(0),
        in_channels=3,
        out_channels=1,
        hidden_channels=16,
        n_layers=2,
        modes=(4, 4),
    )
    params, static = equinox.partition(model, equinox.is_inexact_array)

    def loss(params, x, y):
        return jnp.mean((jax.vmap(equinox.combine(params, static))(x) - y) ** 2), ()

    return of_function(loss, params, normal((4, 3, 16, 16)), normal((4, 1, 16, 16), seed=1))
