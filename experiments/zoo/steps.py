r"""Training steps of the zoo's networks. One argument, a strategy, compresses them.

    make_step = steps.NETWORKS["resnet50_linen"].make_step()
    step, arguments = make_step(Strategy.of(jc.Quantize(bits=4)), 128)
    report = jc.memory.analyze(step, *arguments, target="h100")

The networks know nothing of jaxcomp. An NNX model goes through `jaxcomp.compress`, a Linen model's
`apply` and a loss function of parameters go through `jaxcomp.checkpoint`. All arrays are shapes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

import jaxcomp as jc
from experiments.zoo import resnet_functions, resnet_linen, resnet_nnx
from jaxcomp.models import training
from jaxcomp.planning import MakeStep, Strategy

Step = tuple[Callable[..., Any], tuple[Any, ...]]
"""A jitted training step and the shapes of its arguments: state, inputs, labels."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A network, its data and its optimizer.

    Attributes:
        build: Makes the step's loss and its initial parameters and state, of a strategy.
        inputs: Shape and dtype of one example.
        labels: Shape and dtype of its labels.
        batch: Examples in a batch, such that the plain step fits on a GPU of 80 GB.
        optimizer: Updates the parameters.
    """

    build: Callable[[Strategy, jax.ShapeDtypeStruct], tuple[training.LossFunction, Any, Any]]
    inputs: jax.ShapeDtypeStruct
    labels: jax.ShapeDtypeStruct
    batch: int
    optimizer: optax.GradientTransformation

    def make_step(self) -> MakeStep:
        """The step factory, as `jaxcomp.compare` takes it."""

        def make_step(strategy: Strategy, batch: int) -> Step:
            inputs, labels = (
                jax.ShapeDtypeStruct((batch, *one.shape), one.dtype)
                for one in (self.inputs, self.labels)
            )
            loss_fn, params, model_state = self.build(strategy, inputs)
            step = training.make_train_step(loss_fn, self.optimizer, strategy.micro_batches)
            count = jax.ShapeDtypeStruct((), jnp.int32)
            opt_state = jax.eval_shape(self.optimizer.init, params)
            state = training.TrainState(count, params, model_state, opt_state)
            return step, (state, inputs, labels)

        return make_step


def of_nnx(make: Callable[..., nnx.Module], strategy: Strategy, inputs: Any) -> Any:
    """Builds a Flax NNX model: `jaxcomp.compress(model, policy)`."""
    model = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    strategy(model)
    _, params, model_state = nnx.split(model, nnx.Param, ...)
    return training.make_loss(model, label_smoothing=0.1), params, model_state


def of_linen(make: Callable[..., linen.Module], strategy: Strategy, inputs: Any) -> Any:
    """Builds a Linen model: `jaxcomp.checkpoint(forward, policy)`."""
    model = (
        make(remat=functools.partial(linen.remat, policy=strategy.remat_policy))
        if (strategy.remat)
        else make()
    )
    variables = dict(jax.eval_shape(model.init, jax.random.key(0), inputs))
    params = variables.pop("params")

    def forward(params: Any, state: Any, inputs: jax.Array) -> tuple[jax.Array, Any]:
        logits, state = model.apply({"params": params, **state}, inputs, mutable=list(state))
        return logits, jax.lax.stop_gradient(state)

    apply = forward if strategy.policy is None else jc.checkpoint(forward, strategy.policy)

    def loss_fn(params: Any, state: Any, inputs: Any, labels: Any) -> Any:
        logits, state = apply(params, state, inputs)
        loss, metrics = cross_entropy(logits, labels)
        return loss, (state, metrics)

    return loss_fn, params, variables


def of_functions(module: Any, strategy: Strategy, inputs: Any) -> Any:
    """Builds a module with `init` and `apply`: `jaxcomp.checkpoint(loss, policy)`."""
    params, model_state = jax.eval_shape(module.init, jax.random.key(0))
    block = module.bottleneck
    if strategy.remat:
        block = jax.checkpoint(block, policy=strategy.remat_policy, static_argnums=3)

    def loss_fn(params: Any, state: Any, inputs: Any, labels: Any) -> Any:
        logits, state = module.apply(params, state, inputs, block=block)
        loss, metrics = cross_entropy(logits, labels)
        return loss, (state, metrics)

    if strategy.policy is not None:
        loss_fn = jc.checkpoint(loss_fn, strategy.policy)
    return loss_fn, params, model_state


def cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, training.Metrics]:
    """The mean cross-entropy with label smoothing, and the metrics."""
    logits = logits.astype(jnp.float32)
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), 0.1)
    loss = optax.softmax_cross_entropy(logits, targets).mean()
    accuracy = (logits.argmax(-1) == labels).mean()
    return loss, training.Metrics(loss, accuracy)


def _sgd() -> optax.GradientTransformation:
    return training.sgd(lambda count: 0.1, momentum=0.9, nesterov=False, weight_decay=1e-4)


def _classifier(build: Any, make: Any, batch: int = 128, image: int = 224) -> Network:
    return Network(
        functools.partial(build, make),
        jax.ShapeDtypeStruct((image, image, 3), jnp.bfloat16),
        jax.ShapeDtypeStruct((), jnp.int32),
        batch,
        _sgd(),
    )


def _bf16(make: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(make, dtype=jnp.bfloat16)


NETWORKS: dict[str, Network] = {
    "resnet50_nnx": _classifier(of_nnx, _bf16(resnet_nnx.resnet50)),
    "resnet18_nnx": _classifier(of_nnx, _bf16(resnet_nnx.resnet18)),
    "resnet50_linen": _classifier(of_linen, _bf16(resnet_linen.ResNet50)),
    "resnet50_functions": _classifier(of_functions, resnet_functions),
}
