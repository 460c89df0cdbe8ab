"""Meshes with explicit axes: gradients of one device, and no more collectives than plain has."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomp as jc
from jaxcomp.memory._collectives import collective_traffic
from tests.helpers import OPTIMIZED, assert_close, kept, slow

P = PartitionSpec
WIDTH, HIDDEN = 64, 512
SAMPLES = 2**15  # bytes of arguments that are read to seed the noise


def _multiples(*shape, seed=0):
    """Multiples of a quarter, of which sums are exact in any order."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape) / 4, jnp.float32)


X = _multiples(16, 32, WIDTH)
WEIGHTS = {
    "up": _multiples(WIDTH, HIDDEN, seed=1) / 8,
    "down": _multiples(HIDDEN, WIDTH, seed=2) / 8,
    "scale": jnp.ones(WIDTH),
}


def _is_explicit():
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def _norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale[None, None]


def tensor_parallel(weights, x):
    hidden = jax.nn.gelu(jnp.einsum("bsd,df->bsf", _norm(x, weights["scale"]), weights["up"]))
    out = P("data", None, None) if _is_explicit() else None
    return x + jnp.einsum("bsf,fd->bsd", hidden, weights["down"], out_sharding=out)


def gathered(weights, x):
    """FSDP: parameters are sharded over the devices of the batch, and gathered where used."""
    if _is_explicit():
        weights = {k: jax.sharding.reshard(w, P(*[None] * w.ndim)) for k, w in weights.items()}
    return x + jax.nn.silu(_norm(x, weights["scale"]) @ weights["up"]) @ weights["down"]


def gathered_and_parallel(weights, x):
    """FSDP over one axis and tensor parallel over the other."""
    if _is_explicit():
        weights = {k: jax.sharding.reshard(w, SPLIT[k]) for k, w in weights.items()}
    return tensor_parallel(weights, x)


def in_sequence(weights, x):
    return jnp.tanh(_norm(x, weights["scale"]) @ weights["up"]) @ weights["down"]


def looped(weights, x):
    layer = jax.checkpoint(functools.partial(tensor_parallel, weights))
    return jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=2)[0]


@jax.custom_vjp
def _square(x):
    return x * x


_square.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))


def with_rules(weights, x):
    """A `jax.custom_vjp`, a `jax.custom_jvp` and a `jax.shard_map` of one axis."""
    y = jax.nn.relu(_square(tensor_parallel(weights, x)) - 1)
    if not _is_explicit():
        return y - y.max(-1, keepdims=True)
    specs = {"in_specs": P("data"), "out_specs": P("data"), "axis_names": {"data"}}
    return jax.shard_map(lambda y: y - y.max(-1, keepdims=True), **specs)(y)


def nested(weights, x):
    """A function of `jc.checkpoint` in a layer of `jax.checkpoint` in a loop."""
    layer = jax.checkpoint(jc.checkpoint(tensor_parallel, jc.Exact()))
    return jax.lax.scan(lambda x, _: (layer(weights, x), None), x, None, length=2)[0]


SPLIT = {"up": P(None, "model"), "down": P("model", None), "scale": P()}
CASES = {
    tensor_parallel: (SPLIT, P("data")),
    looped: (SPLIT, P("data")),
    with_rules: (SPLIT, P("data")),
    nested: (SPLIT, P("data")),
    gathered: ({"up": P("data"), "down": P(None, "data"), "scale": P("data")}, P("data")),
    gathered_and_parallel: (
        {"up": P("data", "model"), "down": P("model", "data"), "scale": P("data")},
        P("data"),
    ),
    in_sequence: (dict.fromkeys(SPLIT, P()), P(None, "data")),
}


def _loss(fn, weights, x):
    return jnp.square(fn(weights, x)).mean()


def _placed(fn, mesh):
    specs, spec = CASES[fn]
    placed = {k: jax.device_put(w, NamedSharding(mesh, specs[k])) for k, w in WEIGHTS.items()}
    return placed, jax.device_put(X, NamedSharding(mesh, spec))


# Noise hides rounding, so that limits are closer with exact values.
BY_DEFAULT = [(fn, jc.Exact()) for fn in (with_rules, in_sequence)]
BY_DEFAULT += [(fn, jc.Quantize(4)) for fn in (tensor_parallel, gathered_and_parallel, nested)]


@pytest.mark.parametrize(
    ("fn", "policy"), kept(itertools.product(CASES, (jc.Exact(), jc.Quantize(4))), BY_DEFAULT)
)
def test_gradients_are_those_of_one_device(fn, policy):
    coded = jc.checkpoint(fn, policy)
    jit = functools.partial(jax.jit, compiler_options=OPTIMIZED)
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    with jax.set_mesh(mesh):
        placed = _placed(fn, mesh)
        steps = [
            jit(jax.grad(functools.partial(_loss, f))).lower(*placed).compile() for f in (coded, fn)
        ]
        found, of_plain = (step(*placed) for step in steps)
        saved = jc.plan(coded, *placed).saved_bytes
    for name, gradient in found.items():
        assert gradient.sharding.is_equivalent_to(of_plain[name].sharding, gradient.ndim)
    exact, gathers = isinstance(policy, jc.Exact), fn in (gathered, gathered_and_parallel)
    if exact or gathers or fn is tensor_parallel:  # elsewhere sums round; noise is a hash of bits
        alone = jit(jax.grad(functools.partial(_loss, coded)))(WEIGHTS, X)
        assert_close(found, alone, 1e-5 if exact else 1e-4)
    if fn is not with_rules:  # which is another function there
        assert saved == jc.plan(coded, WEIGHTS, X).saved_bytes
    more, base = (collective_traffic(step.as_text()) for step in steps)
    if fn is not in_sequence or exact:  # whose ranges are over the sequence
        again = sum(w.nbytes for w in WEIGHTS.values()) if gathers else 0
        assert more <= base + again + SAMPLES  # gathered weights are not saved


@pytest.mark.parametrize("sizes", [slow((1, 1)), slow((2, 1)), slow((1, 2)), (2, 2)])
def test_any_number_of_devices(sizes):
    coded = jc.checkpoint(gathered_and_parallel, jc.Quantize(4))
    gradient = jax.jit(jax.grad(functools.partial(_loss, coded)))
    alone = gradient(WEIGHTS, X)
    devices = jax.devices()[: sizes[0] * sizes[1]]
    mesh = jax.make_mesh(sizes, ("data", "model"), devices=devices)
    with jax.set_mesh(mesh):
        assert_close(gradient(*_placed(gathered_and_parallel, mesh)), alone, 1e-4)


def test_rows_of_a_sharded_sequence_need_no_communication():
    functions = jc.checkpoint(in_sequence, jc.Quantize(4, group="row")), in_sequence
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    with jax.set_mesh(mesh):
        placed = _placed(in_sequence, mesh)
        steps = [jax.jit(jax.grad(functools.partial(_loss, f))).lower(*placed) for f in functions]
        coded, plain = (collective_traffic(step.compile().as_text()) for step in steps)
    assert coded <= plain + SAMPLES


class _Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 64, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(8, 64, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = x + self.attention(x)
        return x + self.down(nnx.gelu(self.up(x)))


def _step(model, x):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, x):
        return jnp.square(nnx.merge(graphdef, params, rest, copy=True)(x)).mean()

    return jax.jit(jax.grad(loss))(params, x)


def test_a_stock_model_has_the_gradients_of_automatic_axes():
    """The batch over the devices; `jax.make_mesh` makes explicit axes."""
    images = jax.random.normal(jax.random.key(0), (16, 16, 16, 3))
    found = []
    for kind in (AxisType.Explicit, AxisType.Auto):
        mesh = jax.make_mesh((8,), ("data",), (kind,))
        with jax.set_mesh(mesh):
            model = jc.compress(_Net(nnx.Rngs(0)))
            placed = jax.device_put(images, NamedSharding(mesh, P("data")))
            found.append(jax.tree.map(np.asarray, _step(model, placed)))
    assert_close(*found, 1e-4)


def test_parameters_that_lie_on_no_mesh():
    """Such as new ones: the gradient of each example, and the type of a gradient."""
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"))):
        x = jax.device_put(_multiples(8, 16), P("data"))
        weights = jnp.eye(16) / 2

        def product(weights, x):
            return jnp.tanh(jnp.einsum("...d,df->...f", x, weights))

        coded = jc.checkpoint(product, jc.Exact())
        grads = []
        for fn in (product, coded):
            gradient = jax.grad(lambda w, x, fn=fn: fn(w, x).sum())
            of_each = jax.jit(jax.vmap(gradient, (None, 0)))(weights, x)
            grads.append((of_each, jax.jit(gradient)(weights, x)))
        assert_close(*grads)
        assert jax.typeof(grads[0][1]).sharding.spec == jax.typeof(grads[1][1]).sharding.spec


@pytest.mark.slow
def test_gradients_are_checked_on_a_sharded_batch():
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"))):
        x = jax.device_put(jax.random.normal(jax.random.key(0), (256, 64)), P("data"))
        rngs = nnx.Rngs(0)
        layers = nnx.Linear(64, 256, rngs=rngs), nnx.gelu, nnx.Linear(256, 64, rngs=rngs)
        model = jc.compress(nnx.Sequential(*layers), "quantize:bits=4")
        report = jc.check_gradients(lambda m, x: jnp.square(m(x)).mean(), model, x)
    assert 0.001 < report.noise_over_sgd < 1
