"""A training step of a network that knows nothing of jaxcomp, in Flax NNX or Linen."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from flax.nnx import filterlib
from jax.typing import DTypeLike

from jaxcomp._core.modules import split_model
from jaxcomp.models import training
from jaxcomp.planning import Strategy
from jaxcomp.transform._checkpoint import checkpoint

ADAMW = training.adamw(lambda count: 1e-3, weight_decay=0.05)

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
        """Returns the jitted step and the shapes of its arguments: state, inputs, labels."""
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
    """Returns the mean cross-entropy, and the metrics."""
    logits = logits.astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    accuracy = (logits.argmax(-1) == labels).mean()
    return loss, training.Metrics(loss, accuracy)


def classification(model: Any, inputs: jax.Array, labels: jax.Array) -> Any:
    """Returns the loss and the metrics of a model that classifies."""
    return cross_entropy(model(inputs), labels)


def of_nnx(
    make: Callable[..., nnx.Module],
    strategy: Strategy,
    inputs: Any,
    loss_of: Callable[..., tuple[jax.Array, training.Metrics]] = classification,
) -> Built:
    """Returns the loss of an NNX model, to which the strategy is applied."""
    return of_parts(strategy(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))), loss_of)


def of_parts(
    model: nnx.Module,
    loss_of: Callable[..., tuple[jax.Array, training.Metrics]],
    trained: filterlib.Filter = nnx.Param,
) -> Built:
    """Returns the loss of a model, which is put into training mode, by what is trained of it."""
    model.train()
    graphdef, params, model_state = split_model(model, trained)

    def loss_fn(params: Any, model_state: Any, inputs: Any, labels: Any) -> Any:
        model = nnx.merge(graphdef, params, model_state, copy=True)
        loss, metrics = loss_of(model, inputs, labels)
        return loss, (split_model(model, trained)[2], metrics)

    return loss_fn, params, model_state


def of_linen(make: Callable[..., linen.Module], strategy: Strategy, inputs: Any) -> Built:
    """Returns the loss of a Linen model, to whose forward pass the strategy is applied."""
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

    apply = forward if strategy.policy is None else checkpoint(forward, strategy.policy)

    def loss_fn(params: Any, model_state: Any, inputs: Any, labels: Any) -> Any:
        next_key, key = jax.random.split(model_state["key"])
        logits, variables = apply(params, model_state["variables"], key, inputs)
        loss, metrics = cross_entropy(logits, labels)
        return loss, ({"variables": variables, "key": next_key}, metrics)

    params, model_state = jax.eval_shape(init, inputs)
    return loss_fn, params, model_state


def images(
    build: Callable[..., Built],
    make: Any,
    *,
    batch: int = 128,
    shape: tuple[int, ...] = (224, 224, 3),
    labels: tuple[int, ...] = (),
    dtype: DTypeLike = jnp.bfloat16,
    optimizer: optax.GradientTransformation | None = None,
) -> Network:
    """Returns a network on images; by default it is trained by SGD with momentum."""
    sgd = training.sgd(lambda count: 0.1, momentum=0.9, nesterov=False, weight_decay=1e-4)
    return Network(
        functools.partial(build, make),
        jax.ShapeDtypeStruct(shape, dtype),
        jax.ShapeDtypeStruct(labels, jnp.int32),
        batch,
        optimizer or sgd,
    )
