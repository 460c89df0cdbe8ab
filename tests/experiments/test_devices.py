import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from experiments.training import devices
from jaxcomp.models import resnet, training
from tests.helpers import slow


@pytest.fixture
def model(tiny):
    return resnet.create("tiny", num_classes=4, in_channels=1, rngs=nnx.Rngs(0))


@pytest.fixture
def batch(tiny):
    numpy_batch = next(
        tiny.batches("train", 16, seed=0, epoch=0, augment=False, drop_remainder=True)
    )
    return jax.tree.map(jnp.asarray, numpy_batch)


def optimizer():
    return training.sgd(lambda count: 0.1, momentum=0.9, nesterov=False, weight_decay=1e-2)


def assert_close(trees, expected, **tolerance):
    for value, other in zip(*map(jax.tree.leaves, (trees, expected)), strict=True):
        np.testing.assert_allclose(value, other, **tolerance)


def test_loss_smooths_labels(model, batch):
    state = training.init_state(model, optimizer())
    loss_fn = jax.jit(training.make_loss(model, label_smoothing=0.2))
    loss, (_, metrics) = loss_fn(state.params, state.model_state, *batch)
    model.train()
    logits = np.asarray(model(batch.images), np.float64)
    log_softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    targets = 0.8 * np.eye(4)[batch.labels] + 0.2 / 4
    np.testing.assert_allclose(loss, -(targets * log_softmax).sum(-1).mean(), rtol=1e-5)
    assert metrics.accuracy == (logits.argmax(-1) == batch.labels).mean()


@pytest.mark.parametrize(
    "optimizer", [optimizer(), training.adamw(lambda count: 0.1, weight_decay=1e-2)]
)
def test_weight_decay_is_for_kernels_only(model, optimizer):
    state = training.init_state(model, optimizer)
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    updates, _ = optimizer.update(zeros, state.opt_state, state.params)
    pairs = list(zip(*map(jax.tree.leaves, (updates, state.params)), strict=True))
    assert {param.ndim for _, param in pairs} == {1, 2, 4}
    for update, param in pairs:
        decayed = -0.1 * 1e-2 * param if param.ndim > 1 else jnp.zeros_like(param)
        np.testing.assert_allclose(update, decayed, rtol=1e-6)


def test_step_donates_its_state_and_counts(model, batch):
    state = training.init_state(model, optimizer())
    train_step = training.make_train_step(training.make_loss(model, 0.0), optimizer(), 1)
    new, _ = train_step(state, *batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert new.step == 1


@pytest.mark.parametrize("unroll", [slow(True), False])
def test_accumulation_averages_gradients_and_updates_statistics_in_turn(model, batch, unroll):
    loss_fn = training.make_loss(model, 0.0)
    state = training.init_state(model, optimizer())
    gradient = jax.jit(jax.grad(loss_fn, has_aux=True))
    total, losses, model_state = None, [], state.model_state
    for i in range(2):
        part = batch.images[i::2], batch.labels[i::2]
        grads, (model_state, metrics) = gradient(state.params, model_state, *part)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        losses.append(metrics.loss)
    mean = jax.tree.map(lambda g: g / 2, total)
    updates, _ = optimizer().update(mean, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)

    train_step = training.make_train_step(loss_fn, optimizer(), 2, unroll=unroll)
    new, metrics = train_step(state, *batch)
    assert_close(new.params, params, rtol=1e-4, atol=1e-5)
    assert_close(new.model_state, model_state, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics.loss, np.mean(losses), rtol=1e-5)


@pytest.mark.parametrize("micro_batches", [slow(1), 2])
def test_eight_devices_equal_one(model, batch, micro_batches):
    assert jax.device_count() == 8
    train_step = training.make_train_step(
        training.make_loss(model, 0.0), optimizer(), micro_batches
    )
    state = training.init_state(model, optimizer())
    replicated = devices.place(jax.tree.map(jnp.copy, state))
    one, metrics_one = train_step(state, *batch)
    sharded = devices.shard(*batch)
    assert len(sharded[0].sharding.device_set) == 8
    eight, metrics_eight = train_step(replicated, *sharded)
    assert_close(eight, one, rtol=1e-4, atol=1e-5)
    assert_close(metrics_eight, metrics_one, rtol=1e-5)
