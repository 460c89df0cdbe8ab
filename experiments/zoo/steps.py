r"""Training steps of the zoo's networks. One argument, a strategy, compresses them.

    make_step = steps.NETWORKS["resnet50_linen"].make_step
    step, arguments = make_step(Strategy.of("quantize:bits=4"), 128)
    report = jc.memory.analyze(step, *arguments, target="h100")

The networks know nothing of jaxcomp. An NNX model goes through `jaxcomp.compress`. The forward pass
of a Linen or Equinox model and a loss function of parameters go through `jaxcomp.checkpoint`.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import jaxcomp as jc
from experiments.zoo import (
    convnext,
    densenet,
    diffusion,
    gpt2,
    llama,
    mobilenet,
    recurrent,
    resmlp,
    resnet_equinox,
    resnet_functions,
    resnet_linen,
    resnet_nnx,
    swin,
    unet,
    unet3d,
    vgg,
)
from jaxcomp.models import _efficientnet, _vit, training
from jaxcomp.models._network import ADAMW, Built, Network, cross_entropy, images, of_linen, of_nnx
from jaxcomp.planning import Strategy


def denoising(model: Any, images: jax.Array, noise: jax.Array) -> Any:
    """The mean squared error of a model that predicts noise; there is no accuracy."""
    found = model(*diffusion.noised(images, noise))
    loss = jnp.square(found.astype(jnp.float32) - noise).mean()
    return loss, training.Metrics(loss, jnp.zeros(()))


def of_functions(module: Any, strategy: Strategy, inputs: Any) -> Built:
    """Builds a module of functions; a policy is applied by `jaxcomp.checkpoint(loss, policy)`."""
    block = module.bottleneck
    if strategy.remat:
        block = jax.checkpoint(block, policy=strategy.remat_policy, static_argnums=3)

    def loss_fn(params: Any, model_state: Any, inputs: Any, labels: Any) -> Any:
        logits, model_state = module.apply(params, model_state, inputs, block=block)
        loss, metrics = cross_entropy(logits, labels)
        return loss, (model_state, metrics)

    compressed = loss_fn if strategy.policy is None else jc.checkpoint(loss_fn, strategy.policy)
    params, model_state = jax.eval_shape(module.init, jax.random.key(0))
    return compressed, params, model_state


def of_equinox(make: Callable[..., Any], strategy: Strategy, inputs: Any) -> Built:
    """Builds an Equinox model of one image; `jaxcomp.checkpoint(forward, policy)` applies a policy.

    Parameters are cast to the dtype of the inputs.
    """
    remat = functools.partial(eqx.filter_checkpoint, policy=strategy.remat_policy)
    stateful = eqx.nn.make_with_state(
        functools.partial(make, remat=remat) if strategy.remat else make
    )
    model, state = eqx.filter_eval_shape(stateful, key=jax.random.key(0))
    params, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def forward(params: Any, state: Any, inputs: jax.Array) -> Any:
        params = jax.tree.map(lambda leaf: leaf.astype(inputs.dtype), params)
        mapped = jax.vmap(eqx.combine(params, static), (0, None), (0, None), axis_name="batch")
        return mapped(inputs.transpose(0, 3, 1, 2), state)

    apply = forward if strategy.policy is None else jc.checkpoint(forward, strategy.policy)

    def loss_fn(params: Any, state: Any, inputs: Any, labels: Any) -> Any:
        logits, state = apply(params, state, inputs)
        loss, metrics = cross_entropy(logits, labels)
        return loss, (jax.lax.stop_gradient(state), metrics)

    return loss_fn, params, state


def tokens(
    build: Callable[..., Built], make: Any, *, batch: int = 8, length: int = 1024
) -> Network:
    """A language model, trained by AdamW."""
    example = jax.ShapeDtypeStruct((length,), jnp.int32)
    return Network(functools.partial(build, make), example, example, batch, ADAMW)


def bf16(make: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A constructor with the dtype of the computation; parameters are float32."""
    return functools.partial(make, dtype=jnp.bfloat16, **options)


NETWORKS: dict[str, Network] = {
    "resnet50_nnx": images(of_nnx, bf16(resnet_nnx.resnet50)),
    "resnet50_linen": images(of_linen, bf16(resnet_linen.ResNet50)),
    "resnet50_functions": images(of_functions, resnet_functions),
    "resnet50_equinox": images(of_equinox, resnet_equinox.ResNet50),
    "resnet18_nnx": images(of_nnx, bf16(resnet_nnx.resnet18)),
    "resnet18_float32": images(of_nnx, resnet_nnx.resnet18, batch=512),
    "resnet18_linen": images(of_linen, bf16(resnet_linen.ResNet18)),
    "convnext_t": images(of_nnx, bf16(convnext.convnext_tiny), optimizer=ADAMW),
    "efficientnet_b0": images(of_linen, bf16(_efficientnet.EfficientNet)),
    "mobilenet_v3_large": images(of_nnx, bf16(mobilenet.mobilenet_v3_large)),
    "densenet121": images(of_nnx, bf16(densenet.densenet121), batch=64),
    "resmlp_s24": images(of_nnx, bf16(resmlp.ResMLP)),
    "unet": images(of_linen, bf16(unet.UNet), batch=16, shape=(512, 512, 1), labels=(512, 512)),
    "unet3d": images(
        of_nnx,
        bf16(unet3d.UNet3D),
        batch=2,
        shape=(128, 128, 128, 1),
        labels=(128, 128, 128),
        optimizer=ADAMW,
    ),
    "diffusion": Network(
        functools.partial(of_nnx, bf16(diffusion.DiffusionUNet), loss_of=denoising),
        jax.ShapeDtypeStruct((64, 64, 4), jnp.bfloat16),
        jax.ShapeDtypeStruct((64, 64, 4), jnp.bfloat16),
        16,
        ADAMW,
    ),
    "vgg19": images(of_linen, bf16(vgg.VGG19)),
    "vgg19_bn": images(of_linen, bf16(vgg.VGG19, batch_norm=True)),
    "vit_s16": images(of_nnx, bf16(_vit.vit_s16), optimizer=ADAMW),
    "vit_b16": images(of_nnx, bf16(_vit.vit_b16), optimizer=ADAMW),
    "swin_t": images(of_nnx, bf16(swin.Swin), optimizer=ADAMW),
    "gpt2": tokens(of_nnx, bf16(gpt2.GPT2)),
    "llama": tokens(of_linen, bf16(llama.Llama)),
    "gru": tokens(of_nnx, bf16(recurrent.GRU), batch=32, length=4096),
    "mamba": tokens(of_nnx, bf16(recurrent.Mamba), batch=8, length=4096),
}
