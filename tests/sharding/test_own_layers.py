"""Codecs and layers of `jaxcomp.nn` over explicit axes, the batch over the devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomp as jc
from jaxcomp.models import catalog, training
from jaxcomp.models.sharding import state_shardings
from tests.helpers import assert_close, assert_same_bits, kept, normal, slow

CODECS = [
    jc.Quantize(3),
    jc.Float8(axis=-2),
    jc.AvgPool(2),
    jc.DualPrecision(2),
    jc.BlockSparse((4, 1), 0.5),
    jc.PerSample((4, 1)),
]


def _placed(x, kind):
    mesh = jax.make_mesh((8,), ("batch",), (kind,))
    return mesh, jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch")))


@pytest.mark.parametrize("codec", kept(CODECS, CODECS[::2]), ids=str)
def test_codes_are_those_of_one_device(codec):
    x = normal((16, 8, 8, 32))
    alone = jax.jit(lambda x: codec.encode(x, 3))(x)
    mesh, placed = _placed(x, AxisType.Explicit)
    with jax.set_mesh(mesh):
        encoded = jax.jit(lambda x: codec.encode(x, 3))(placed)
        decoded = jax.jit(codec.decode)(encoded)
    assert_same_bits(encoded, alone)
    assert decoded.sharding.is_equivalent_to(placed.sharding, x.ndim)
    assert_close(decoded, jax.jit(codec.decode)(alone), 1e-6)


@pytest.mark.slow
def test_a_residual_network_has_the_gradients_of_automatic_axes():
    images = normal((16, 8, 8, 3))
    found = []
    for kind in (AxisType.Explicit, AxisType.Auto):
        mesh, placed = _placed(images, kind)
        with jax.set_mesh(mesh):
            model = catalog.create("resnet20", num_classes=10, image_size=8, rngs=nnx.Rngs(0))
            graphdef, params, rest = nnx.split(jc.compress(model, "fused:bits=4"), nnx.Param, ...)

            def loss(params, x, graphdef=graphdef, rest=rest):
                return jnp.square(nnx.merge(graphdef, params, rest, copy=True)(x)).mean()

            found.append(jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(params, placed)))
    assert_close(*found, 1e-4)


def _first_step(fsdp):
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    model = catalog.create("resnet20", num_classes=10, image_size=8, rngs=nnx.Rngs(0))
    jc.compress(model, "quantize:bits=8")
    optimizer = training.sgd(lambda count: 0.1, momentum=0.9, nesterov=False, weight_decay=1e-4)
    step = training.make_train_step(training.make_loss(model, label_smoothing=0.0), optimizer, 1)
    state = training.init_state(model, optimizer)
    state = jax.device_put(state, state_shardings(state, mesh, fsdp=fsdp))
    batch = jax.device_put(
        (normal((16, 8, 8, 3)), jnp.arange(16) % 10), NamedSharding(mesh, PartitionSpec("data"))
    )
    return step(state, *batch)[0]


@pytest.mark.slow
def test_a_residual_network_with_sharded_parameters():
    sharded = _first_step(True)
    copied = _first_step(False)
    kernels = [p for p in jax.tree.leaves(sharded.params) if p.size >= 2**14]
    assert kernels and all(len(p.sharding.device_set) == 8 for p in kernels)
    assert all(p.addressable_shards[0].data.size == p.size // 8 for p in kernels)
    assert_close(sharded.params, copied.params, 0.02)  # sums round; noise is a hash of bits


@pytest.mark.parametrize("policy", [slow("quantize:bits=8"), "pruning:density=0.5"])
def test_products_of_codes_and_dropout_over_explicit_axes(policy):
    x = normal((16, 64, 128))
    network = catalog.create("resmlp_tiny", num_classes=10, image_size=32, rngs=nnx.Rngs(0))
    model = nnx.Sequential(network.blocks[0], jc.nn.Dropout(0.3, rngs=nnx.Rngs(1)))
    graphdef, params, rest = nnx.split(jc.compress(model, policy), nnx.Param, ...)

    @jax.jit
    def gradient(params, x):
        return jax.grad(
            lambda params: jnp.square(nnx.merge(graphdef, params, rest, copy=True)(x)).mean()
        )(params)

    alone = gradient(params, x)
    mesh, placed = _placed(x, AxisType.Explicit)
    with jax.set_mesh(mesh):
        assert_close(gradient(params, placed), alone, 1e-3)
