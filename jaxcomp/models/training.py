"""One training step as one compiled function of a state and a batch, whatever the strategy."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from jaxcomp._core.modules import State, split_model
from jaxcomp.memory import compiler_options


class TrainState(NamedTuple):
    """All that changes from step to step; a pytree of arrays.

    Attributes:
        step: number of steps taken.
        params: what the optimiser trains.
        model_state: the model's other variables (batch statistics).
        opt_state: the optimiser's state.
    """

    step: Int[Array, ""]
    params: State
    model_state: State
    opt_state: optax.OptState


class Metrics(NamedTuple):
    """Means over one training batch."""

    loss: Float[Array, ""]
    accuracy: Float[Array, ""]


Inputs = Shaped[Array | np.ndarray, "batch ..."]
Labels = Int[Array | np.ndarray, "batch ..."]
TrainStep = jax.stages.Wrapped  # of (TrainState, Inputs, Labels) to (TrainState, Metrics)
EvalStep = Callable[[TrainState, Inputs, Labels], Int[Array, ""]]
LossFunction = Callable[
    [State, State, Inputs, Labels], tuple[Float[Array, ""], tuple[State, Metrics]]
]


Accumulated = tuple[tuple[State, Metrics], State]


def sgd(
    schedule: optax.Schedule, *, momentum: float, nesterov: bool, weight_decay: float
) -> optax.GradientTransformation:
    """SGD with momentum, and coupled weight decay of parameters of two or more axes.

    Biases and norms' scales have no decay, then, where their layers are not stacked.
    """
    return optax.chain(
        optax.add_decayed_weights(weight_decay, mask=_has_axes),
        optax.sgd(schedule, momentum=momentum, nesterov=nesterov),
    )


def adamw(schedule: optax.Schedule, *, weight_decay: float) -> optax.GradientTransformation:
    """AdamW (arXiv:1711.05101), with decoupled weight decay of the same parameters as `sgd`."""
    return optax.adamw(schedule, weight_decay=weight_decay, mask=_has_axes)


def _has_axes(params: optax.Params) -> optax.Params:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def init_state(model: nnx.Module, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    _, params, model_state = split_model(model)
    return TrainState(jnp.zeros((), jnp.int32), params, model_state, optimizer.init(params))


def make_loss(model: nnx.Module, label_smoothing: float) -> LossFunction:
    """The mean cross-entropy as a function of (params, model_state, inputs, labels).

    It also returns the new ``model_state`` and the :class:`Metrics`.
    """
    model.train()
    graphdef, _, _ = split_model(model)

    def loss_fn(
        params: State, model_state: State, inputs: Inputs, labels: Labels
    ) -> tuple[Float[Array, ""], tuple[State, Metrics]]:
        network = nnx.merge(graphdef, params, model_state, copy=True)
        logits = network(inputs).astype(jnp.float32)
        targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), label_smoothing)
        loss = optax.softmax_cross_entropy(logits, targets).mean()
        accuracy = (logits.argmax(-1) == labels).mean()
        return loss, (split_model(network)[2], Metrics(loss, accuracy))

    return loss_fn


def make_train_step(
    loss_fn: LossFunction,
    optimizer: optax.GradientTransformation,
    micro_batches: int,
    *,
    unroll: bool = True,
) -> TrainStep:
    """Forward, backward, optimiser and batch statistics as one jitted function.

    The state that is passed in is donated: its buffers are used for the new one.

    Args:
        loss_fn: from :func:`make_loss`.
        optimizer: updates the parameters.
        micro_batches: the batch is split into that many parts, which run one after another; their
            gradients and metrics are averaged. Batch statistics are then those of a micro-batch and
            are updated once for each.
        unroll: whether the micro-batches are written out one after another, not in a loop. On CPUs
            XLA's convolutions are ten times slower in a loop; of a model that has loops itself,
            XLA gives those of all micro-batches memory at once if they are written out.
    """
    gradient = jax.grad(loss_fn, has_aux=True)

    def accumulate(
        params: State, model_state: State, inputs: Inputs, labels: Labels
    ) -> tuple[State, tuple[State, Metrics]]:
        # Every micro_batches-th example, so that a batch split over devices is not moved.
        batches = jax.tree.map(
            lambda x: x.reshape(-1, micro_batches, *x.shape[1:]).swapaxes(0, 1), (inputs, labels)
        )

        def body(carry: Accumulated, batch: tuple[Inputs, Labels]) -> tuple[Accumulated, None]:
            (total, model_state), batch = jax.lax.optimization_barrier((carry, batch))
            grads, (model_state, metrics) = gradient(params, model_state, *batch)
            total = jax.tree.map(lambda t, x: t + x / micro_batches, total, (grads, metrics))
            return (total, model_state), None

        # The barrier makes a micro-batch wait for the gradients before it; else all activations
        # coexist where they are unrolled.
        zeros = jax.tree.map(jnp.zeros_like, (params, Metrics(jnp.zeros(()), jnp.zeros(()))))
        carry, _ = jax.lax.scan(body, (zeros, model_state), batches, unroll=unroll)
        (grads, metrics), model_state = carry
        return grads, (model_state, metrics)

    def step(state: TrainState, inputs: Inputs, labels: Labels) -> tuple[TrainState, Metrics]:
        compute = gradient if micro_batches == 1 else accumulate
        grads, (model_state, metrics) = compute(state.params, state.model_state, inputs, labels)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, model_state, opt_state), metrics

    return jax.jit(step, donate_argnums=0, compiler_options=compiler_options())


def make_eval_step(model: nnx.Module) -> EvalStep:
    """The number of images of a batch that the model, in inference mode, classifies as labelled."""
    model.eval()
    graphdef, _, _ = split_model(model)

    def step(state: TrainState, inputs: Inputs, labels: Labels) -> Int[Array, ""]:
        network = nnx.merge(graphdef, state.params, state.model_state)
        return (network(inputs).argmax(-1) == labels).sum()

    return jax.jit(step)
