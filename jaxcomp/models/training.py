"""Training and evaluation steps of image classifiers and language models, as jitted functions."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree, Shaped

from jaxcomp._core.modules import State, split_model
from jaxcomp.memory import compiler_options


class TrainState(NamedTuple):
    """What changes from step to step; a pytree of arrays.

    Attributes:
        step: Number of steps taken.
        params: What the optimizer trains.
        model_state: The other variables of the model, such as batch statistics.
        opt_state: State of the optimizer.
    """

    step: Int[Array, ""]
    params: State
    model_state: State
    opt_state: optax.OptState


class Metrics(NamedTuple):
    """Means over one batch.

    Attributes:
        loss: The cross-entropy.
        accuracy: The fraction of labels that are predicted.
    """

    loss: Float[Array, ""]
    accuracy: Float[Array, ""]


Inputs = Shaped[Array | np.ndarray, "batch ..."]
Labels = Int[Array | np.ndarray, "batch ..."]
TrainStep = jax.stages.Wrapped  # from (TrainState, Inputs, Labels) to (TrainState, Metrics)
EvalStep = Callable[[TrainState, Inputs, Labels], Int[Array, ""]]
LossFunction = Callable[
    [State, State, Inputs, Labels], tuple[Float[Array, ""], tuple[State, Metrics]]
]
Accumulated = tuple[tuple[State, Metrics], State]


def sgd(
    schedule: optax.Schedule, *, momentum: float, nesterov: bool, weight_decay: float
) -> optax.GradientTransformation:
    """Returns SGD with momentum and coupled weight decay.

    Only parameters with two or more axes decay. Biases and scales have one axis, unless their
    layers are stacked.
    """
    return optax.chain(
        optax.add_decayed_weights(weight_decay, mask=_has_axes),
        optax.sgd(schedule, momentum=momentum, nesterov=nesterov),
    )


def adamw(schedule: optax.Schedule, *, weight_decay: float) -> optax.GradientTransformation:
    """Returns adamW (arXiv:1711.05101). The same parameters decay as with `sgd`, decoupled."""
    return optax.adamw(schedule, weight_decay=weight_decay, mask=_has_axes)


def _has_axes(params: PyTree) -> PyTree:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def init_state(model: nnx.Module, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first step."""
    _, params, model_state = split_model(model)
    return TrainState(jnp.zeros((), jnp.int32), params, model_state, optimizer.init(params))


def make_loss(model: nnx.Module, label_smoothing: float) -> LossFunction:
    """Makes the loss function: the mean cross-entropy.

    Args:
        model: The model, which is put into training mode.
        label_smoothing: Weight of the uniform distribution in the targets.

    Returns:
        A function of (params, model_state, inputs, labels). It returns the loss, and the new
        `model_state` with the `Metrics`.
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
    """Makes the training step: forward and backward pass, optimizer and batch statistics.

    The step donates its state, so that XLA uses the same buffers for the new state.

    Args:
        loss_fn: The loss, from `make_loss`.
        optimizer: Updates the parameters.
        micro_batches: Number of parts that the batch is split into. They run one after another, and
            their gradients and metrics are averaged. Batch norms use the statistics of a
            micro-batch and update their running statistics once for each.
        unroll: Whether the micro-batches are unrolled instead of run in a loop. On a CPU, XLA's
            convolutions are ten times slower in a loop. If the model has loops itself, unrolling
            raises the peak: XLA allocates the loops of all micro-batches at once.
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

        # With the barrier a micro-batch starts after the gradients of the one before it. Without
        # it the saved activations of all unrolled micro-batches are alive at once.
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
    """Makes the evaluation step: the number of examples whose label is predicted.

    Args:
        model: The model, which is put into inference mode.
    """
    model.eval()
    graphdef, _, _ = split_model(model)

    def step(state: TrainState, inputs: Inputs, labels: Labels) -> Int[Array, ""]:
        network = nnx.merge(graphdef, state.params, state.model_state)
        return (network(inputs).argmax(-1) == labels).sum()

    return jax.jit(step)
