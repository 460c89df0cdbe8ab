"""One training step as one compiled function of a state and a batch, whatever the way."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int


class TrainState(NamedTuple):
    """All that changes from step to step; a pytree of arrays.

    Attributes:
        step: number of steps taken.
        params: what the optimiser trains.
        model_state: the model's other variables (batch statistics).
        opt_state: the optimiser's state.
    """

    step: Int[Array, ""]
    params: nnx.State
    model_state: nnx.State
    opt_state: optax.OptState


class Metrics(NamedTuple):
    """Means over one training batch."""

    loss: Float[Array, ""]
    accuracy: Float[Array, ""]


Images = Float[Array | np.ndarray, "batch height width channels"]
Labels = Int[Array | np.ndarray, " batch"]
TrainStep = Callable[[TrainState, Images, Labels], tuple[TrainState, Metrics]]
EvalStep = Callable[[TrainState, Images, Labels], Int[Array, ""]]
LossFunction = Callable[
    [nnx.State, nnx.State, Images, Labels], tuple[Float[Array, ""], tuple[nnx.State, Metrics]]
]


def sgd(
    schedule: optax.Schedule, *, momentum: float, nesterov: bool, weight_decay: float
) -> optax.GradientTransformation:
    """SGD with momentum and coupled weight decay on kernels (not on biases, nor on norms' scales)."""

    def is_kernel(params: optax.Params) -> optax.Params:
        return jax.tree.map(lambda p: p.ndim > 1, params)

    return optax.chain(
        optax.add_decayed_weights(weight_decay, mask=is_kernel),
        optax.sgd(schedule, momentum=momentum, nesterov=nesterov),
    )


def init_state(model: nnx.Module, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    _, params, model_state = nnx.split(model, nnx.Param, ...)
    return TrainState(jnp.zeros((), jnp.int32), params, model_state, optimizer.init(params))


def make_loss(model: nnx.Module, label_smoothing: float) -> LossFunction:
    """The mean cross-entropy as a function of (params, model_state, images, labels).

    It also returns the new ``model_state`` and the :class:`Metrics`.
    """
    model.train()
    graphdef, _, _ = nnx.split(model, nnx.Param, ...)

    def loss_fn(
        params: nnx.State, model_state: nnx.State, images: Images, labels: Labels
    ) -> tuple[Float[Array, ""], tuple[nnx.State, Metrics]]:
        network = nnx.merge(graphdef, params, model_state, copy=True)
        logits = network(images).astype(jnp.float32)
        targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), label_smoothing)
        loss = optax.softmax_cross_entropy(logits, targets).mean()
        accuracy = (logits.argmax(-1) == labels).mean()
        return loss, (nnx.split(network, nnx.Param, ...)[2], Metrics(loss, accuracy))

    return loss_fn


def make_train_step(
    loss_fn: LossFunction, optimizer: optax.GradientTransformation, micro_batches: int
) -> TrainStep:
    """Forward, backward, optimiser and batch statistics as one jitted function.

    The state that is passed in is donated: its buffers are used for the new one.

    Args:
        loss_fn: from :func:`make_loss`.
        optimizer: updates the parameters.
        micro_batches: the batch is split into that many parts, which run one after another; their
            gradients and metrics are averaged. Batch statistics are then those of a micro-batch and
            are updated once for each.
    """
    gradient = jax.grad(loss_fn, has_aux=True)

    def accumulate(
        params: nnx.State, model_state: nnx.State, images: Images, labels: Labels
    ) -> tuple[nnx.State, tuple[nnx.State, Metrics]]:
        # Every micro_batches-th example, so that a batch split over devices is not moved.
        split = lambda x: jnp.moveaxis(x.reshape(-1, micro_batches, *x.shape[1:]), 1, 0)

        def body(
            carry: tuple[nnx.State, nnx.State, Metrics], batch: tuple[Images, Labels]
        ) -> tuple[tuple[nnx.State, nnx.State, Metrics], None]:
            total, model_state, metrics = carry
            grads, (model_state, new) = gradient(params, model_state, *batch)
            add = lambda total, x: total + x / micro_batches
            return (
                jax.tree.map(add, total, grads),
                model_state,
                jax.tree.map(add, metrics, new),
            ), None

        start = (
            jax.tree.map(jnp.zeros_like, params),
            model_state,
            Metrics(jnp.zeros(()), jnp.zeros(())),
        )
        (grads, model_state, metrics), _ = jax.lax.scan(body, start, (split(images), split(labels)))
        return grads, (model_state, metrics)

    def step(state: TrainState, images: Images, labels: Labels) -> tuple[TrainState, Metrics]:
        compute = gradient if micro_batches == 1 else accumulate
        grads, (model_state, metrics) = compute(state.params, state.model_state, images, labels)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, model_state, opt_state), metrics

    return jax.jit(step, donate_argnums=0)


def make_eval_step(model: nnx.Module) -> EvalStep:
    """The number of images of a batch that the model, in inference mode, classifies as labelled."""
    model.eval()
    graphdef, _, _ = nnx.split(model, nnx.Param, ...)

    def step(state: TrainState, images: Images, labels: Labels) -> Int[Array, ""]:
        network = nnx.merge(graphdef, state.params, state.model_state)
        return (network(images).argmax(-1) == labels).sum()

    return jax.jit(step)


def _sharding(*axes: str) -> NamedSharding:
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    return NamedSharding(mesh, PartitionSpec(*axes))


def replicate(state: TrainState) -> TrainState:
    """Puts a copy of the state on every device there is."""
    return jax.device_put(state, _sharding())


def shard(images: np.ndarray, labels: np.ndarray) -> tuple[Array, Array]:
    """Splits a batch over the devices there are."""
    return jax.device_put((images, labels), _sharding("data"))
