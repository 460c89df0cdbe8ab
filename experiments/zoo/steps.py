r"""Training steps of the zoo's networks. One argument, a strategy, compresses them.

    make_step = steps.NETWORKS["resnet50_linen"].make_step
    step, arguments = make_step(Strategy.of("quantize:bits=4"), 128)
    report = jc.memory.analyze(step, *arguments, target="h100")

The networks know nothing of jaxcomp. An NNX model goes through `jaxcomp.compress`. The forward pass
of a Linen or Equinox model and a loss function of parameters go through `jaxcomp.checkpoint`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

import jaxcomp as jc
from experiments.zoo import (
    convnext,
    densenet,
    diffusion,
    efficientnet,
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
    vit,
)
from jaxcomp._core.modules import split_model
from jaxcomp.models import training
from jaxcomp.planning import Strategy

Built = tuple[training.LossFunction, Any, Any]
"""A loss function, and the shapes of its parameters and of its state."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A network, its data and its optimizer.

    Attributes:
        build: Makes the loss, of a strategy and the shape of a batch.
        inputs: Shape and dtype of one example.
        labels: Shape and dtype of its labels.
        batch: Examples in a batch. The plain step fits on a GPU of 80 GB.
        optimizer: Updates the parameters.
    """

    build: Callable[[Strategy, Any], Built]
    inputs: jax.ShapeDtypeStruct
    labels: jax.ShapeDtypeStruct
    batch: int
    optimizer: optax.GradientTransformation

    def make_step(
        self, strategy: Strategy, batch: int
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Makes the jitted step and the shapes of its arguments: state, inputs, labels."""
        inputs, labels = (
            jax.ShapeDtypeStruct((batch, *one.shape), one.dtype)
            for one in (self.inputs, self.labels)
        )
        loss_fn, params, model_state = self.build(strategy, inputs)
        step = training.make_train_step(loss_fn, self.optimizer, strategy.micro_batches)

        def init(params: Any, model_state: Any) -> training.TrainState:
            count = jnp.zeros((), jnp.int32)
            return training.TrainState(count, params, model_state, self.optimizer.init(params))

        return step, (jax.eval_shape(init, params, model_state), inputs, labels)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, training.Metrics]:
    """The mean cross-entropy, and the metrics."""
    logits = logits.astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    accuracy = (logits.argmax(-1) == labels).mean()
    return loss, training.Metrics(loss, accuracy)


def classification(model: Any, inputs: jax.Array, labels: jax.Array) -> Any:
    """The loss and the metrics of a model that classifies."""
    return cross_entropy(model(inputs), labels)


def denoising(model: Any, images: jax.Array, noise: jax.Array) -> Any:
    """The mean squared error of a model that predicts noise; there is no accuracy."""
    found = model(*diffusion.noised(images, noise))
    loss = jnp.square(found.astype(jnp.float32) - noise).mean()
    return loss, training.Metrics(loss, jnp.zeros(()))


def of_nnx(
    make: Callable[..., nnx.Module],
    strategy: Strategy,
    inputs: Any,
    loss_of: Callable[..., tuple[jax.Array, training.Metrics]] = classification,
) -> Built:
    """Builds an NNX model; a policy is applied by `jaxcomp.compress(model, policy)`."""
    model = strategy(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
    model.train()
    graphdef, params, model_state = split_model(model)

    def loss_fn(params: Any, model_state: Any, inputs: Any, labels: Any) -> Any:
        model = nnx.merge(graphdef, params, model_state, copy=True)
        loss, metrics = loss_of(model, inputs, labels)
        return loss, (split_model(model)[2], metrics)

    return loss_fn, params, model_state


def of_linen(make: Callable[..., linen.Module], strategy: Strategy, inputs: Any) -> Built:
    """Builds a Linen model; a policy is applied by `jaxcomp.checkpoint(forward, policy)`."""
    remat = functools.partial(linen.remat, policy=strategy.remat_policy)
    model = make(remat=remat) if strategy.remat else make()

    def init(inputs: jax.Array) -> tuple[Any, Any]:
        params_key, key = jax.random.split(jax.random.key(0))
        variables = dict(model.init({"params": params_key, "dropout": key}, inputs))
        return variables.pop("params"), {"variables": variables, "key": key}

    def forward(params: Any, variables: Any, key: jax.Array, inputs: jax.Array) -> Any:
        logits, changed = model.apply(
            {"params": params} | variables, inputs, rngs={"dropout": key}, mutable=list(variables)
        )
        return logits, jax.lax.stop_gradient(changed)

    apply = forward if strategy.policy is None else jc.checkpoint(forward, strategy.policy)

    def loss_fn(params: Any, model_state: Any, inputs: Any, labels: Any) -> Any:
        next_key, key = jax.random.split(model_state["key"])
        logits, variables = apply(params, model_state["variables"], key, inputs)
        loss, metrics = cross_entropy(logits, labels)
        return loss, ({"variables": variables, "key": next_key}, metrics)

    params, model_state = jax.eval_shape(init, inputs)
    return loss_fn, params, model_state


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


def images(
    build: Callable[..., Built],
    make: Any,
    *,
    batch: int = 128,
    shape: tuple[int, ...] = (224, 224, 3),
    labels: tuple[int, ...] = (),
    optimizer: optax.GradientTransformation | None = None,
) -> Network:
    """A network on images, in bfloat16; by default it is trained by SGD with momentum."""
    sgd = training.sgd(lambda count: 0.1, momentum=0.9, nesterov=False, weight_decay=1e-4)
    return Network(
        functools.partial(build, make),
        jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        jax.ShapeDtypeStruct(labels, jnp.int32),
        batch,
        optimizer or sgd,
    )


def tokens(
    build: Callable[..., Built], make: Any, *, batch: int = 8, length: int = 1024
) -> Network:
    """A language model, trained by AdamW."""
    example = jax.ShapeDtypeStruct((length,), jnp.int32)
    return Network(functools.partial(build, make), example, example, batch, ADAMW)


def bf16(make: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A constructor with the dtype of the computation; parameters are float32."""
    return functools.partial(make, dtype=jnp.bfloat16, **options)


ADAMW = training.adamw(lambda count: 1e-3, weight_decay=0.05)

NETWORKS: dict[str, Network] = {
    "resnet50_nnx": images(of_nnx, bf16(resnet_nnx.resnet50)),
    "resnet50_linen": images(of_linen, bf16(resnet_linen.ResNet50)),
    "resnet50_functions": images(of_functions, resnet_functions),
    "resnet50_equinox": images(of_equinox, resnet_equinox.ResNet50),
    "resnet18_nnx": images(of_nnx, bf16(resnet_nnx.resnet18)),
    "resnet18_float32": images(of_nnx, resnet_nnx.resnet18, batch=512),
    "resnet18_linen": images(of_linen, bf16(resnet_linen.ResNet18)),
    "convnext_t": images(of_nnx, bf16(convnext.convnext_tiny), optimizer=ADAMW),
    "efficientnet_b0": images(of_linen, bf16(efficientnet.EfficientNet)),
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
    "vit_s16": images(of_nnx, bf16(vit.vit_s16), optimizer=ADAMW),
    "vit_b16": images(of_nnx, bf16(vit.vit_b16), optimizer=ADAMW),
    "swin_t": images(of_nnx, bf16(swin.Swin), optimizer=ADAMW),
    "gpt2": tokens(of_nnx, bf16(gpt2.GPT2)),
    "llama": tokens(of_linen, bf16(llama.Llama)),
    "gru": tokens(of_nnx, bf16(recurrent.GRU), batch=32, length=4096),
    "mamba": tokens(of_nnx, bf16(recurrent.Mamba), batch=8, length=4096),
}
