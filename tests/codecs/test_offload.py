import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxcomp import (
    Exact,
    Offload,
    Packed,
    PerSample,
    Quantize,
    SignAware,
    compress,
    nn,
    ops,
    recipes,
)
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.diagnostics import BitPlanner
from jaxcomp.memory import analyze
from jaxcomp.nn._coded import coded_modules
from tests.helpers import assert_close, assert_same_bits, kept, normal, slow, without_type_checks

W = normal((3, 3, 4, 4), seed=1)
C = normal((4,), seed=2)
CONV = functools.partial(
    ops.conv_general_dilated,
    window_strides=(1, 1),
    padding="SAME",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
)
LAYERS = {
    "conv": (lambda x, w, c: CONV(x, w, codec=c), Quantize(2)),
    "conv by rank": (lambda x, w, c: CONV(x, w, codec=c), PerSample((4, 2))),
    "dot": (
        lambda x, w, c: ops.dot_general(x, w[0, 0], (((3,), (0,)), ((), ())), codec=c),
        Quantize(4),
    ),
    "batch norm": (lambda x, w, c: ops.batch_norm(x, C, C, codec=c)[0], Quantize(2)),
    "layer norm": (lambda x, w, c: ops.layer_norm(x, C, C, codec=c), Quantize(2)),
    "norm act": (lambda x, w, c: CONV(ops.norm_act(x, C, C, codec=c)[0], w, codec=c), SignAware(2)),
    "gelu": (lambda x, w, c: ops.gelu(x, codec=c), Quantize(2)),
    "relu": (lambda x, w, c: ops.relu(x, codec=c), Packed(1)),
    "max pool": (lambda x, w, c: ops.max_pool(x, (2, 2), codec=c), Packed(2)),
    "dropout": (lambda x, w, c: ops.dropout(x, jax.random.key(0), 0.5, codec=c), Packed(1)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients_are_those_of_its_codec(name):
    layer, codec = LAYERS[name]
    x = normal((8, 6, 6, 4))

    def run(codec):
        return jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(layer(x, w, codec) ** 2), (0, 1)))(
            x, W
        )

    assert_same_bits(run(Offload(codec)), run(codec))


@pytest.mark.parametrize("name", kept(LAYERS, [n for n in LAYERS if n not in ("conv", "gelu")]))
def test_codes_lie_on_the_host(name):
    layer, codec = LAYERS[name]
    x = normal((16, 6, 6, 4))
    _, pull = jax.vjp(lambda x, w: layer(x, w, Offload(codec)), x, W)
    large = [leaf for leaf in jax.tree.leaves(pull) if leaf.size > W.size]
    on_host = [leaf for leaf in large if leaf.sharding.memory_kind == "pinned_host"]
    on_device = [leaf for leaf in large if leaf.sharding.memory_kind == "device"]
    assert on_host and len(on_host) + len(on_device) == len(large)
    assert all(leaf.shape == x.shape[:-1] for leaf in on_device)  # a layer norm's statistics


class Net(nnx.Module):
    def __init__(self, rngs):
        self.unit = nn.ConvNormAct(nn.Conv(3, 4, (3, 3), rngs=rngs), nn.BatchNorm(4, rngs=rngs))
        self.pool = nn.MaxPool((2, 2), (2, 2))
        self.conv = nn.Conv(4, 2, (3, 3), rngs=rngs)

    def __call__(self, x):
        return self.conv(self.pool(self.unit(x)))


def loss(model, x):
    return jnp.sum(model(x) ** 2)


@pytest.mark.parametrize("policy", [recipes.fused(bits=4), slow(recipes.actnn("L3"))])
def test_a_network_has_the_gradients_of_its_codecs(policy):
    def gradient(policy):
        model = compress(Net(nnx.Rngs(0)), policy)
        return nnx.jit(nnx.grad(loss))(model, normal((4, 8, 8, 3)))

    assert_same_bits(gradient(policy.offloaded()), gradient(policy))


def test_planned_bits_stay_on_the_host():
    model = compress(Net(nnx.Rngs(0)), recipes.actnn("L4"))
    planner = BitPlanner(loss, run=4)
    sizes = 4.0 ** jnp.arange(8).reshape(8, 1, 1, 1)
    assert planner.update(model, sizes * normal((8, 8, 8, 3)), 0)
    codecs = [module.codec for module in coded_modules(model).values() if module.codec]
    assert all(isinstance(codec, Offload) for codec in codecs)
    assert any(isinstance(inner_codec(codec), PerSample) for codec in codecs)


@pytest.mark.aot
def test_h100_frees_the_device(capsys):
    pytest.importorskip("jax_cuda13_plugin")
    layers, shape = 6, (4096, 1024)

    def step(weights, x, codec):
        def loss(weights, x):
            for w in weights:
                x = jax.nn.standardize(ops.dot_general(x, w, (((1,), (0,)), ((), ())), codec=codec))
            return jnp.sum(x.astype(jnp.float32))

        return jax.grad(loss)(weights, x)

    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    weights = [jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)] * layers
    codec = Quantize(8)
    here, away = (
        analyze(functools.partial(step, codec=c), weights, x, target="h100", xla_remat=False)
        for c in (codec, Offload(codec))
    )
    assert (here.host_temp_bytes, away.host_temp_bytes) == (
        0,
        layers * codec.nbytes(shape, x.dtype),
    )
    freed = (here.temp_bytes - away.temp_bytes) / away.host_temp_bytes
    with capsys.disabled():
        print(f"\nh100, offload: {freed:.2f} of the codes' bytes leave the device")
    assert freed > 0.6  # the last layers' wait for nobody


def test_bytes_are_those_of_its_codec():
    codec = Quantize(3)
    assert Offload(codec).nbytes((4, 5, 6), jnp.bfloat16) == codec.nbytes((4, 5, 6), jnp.bfloat16)


def test_exact_rules_stay_on_the_device():
    assert recipes.everywhere(Exact()).offloaded() == recipes.everywhere(Exact())


@pytest.mark.parametrize("codec", [None, Offload(Quantize(2))])
def test_what_is_no_codec_is_an_error(codec):
    with without_type_checks(), pytest.raises(TypeError, match="codec="):
        Offload(codec)


def test_a_kernel_that_all_examples_share_stays_one():
    """In a loop, results of a kernel of each example had their axes in another order."""
    x = normal((4, 6, 6, 4))

    def loss(codec, w):
        def step(x, _):
            examples = jax.vmap(lambda x: CONV(x, w, codec=codec))(jnp.stack([x, 2 * x]))
            return examples.sum(0), None

        return jnp.square(jax.lax.scan(step, x, None, length=2)[0]).sum()

    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, codec)))(W) for codec in (Offload(Exact()), None)
    )
    assert_close(found, expected)
