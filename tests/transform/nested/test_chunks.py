"""Long loops encode what a chunk of iterations stored at once, and give the same gradients."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxcomp as jc
from jaxcomp.memory._tracing import inner_jaxprs
from jaxcomp.policies import Policy, Rule
from jaxcomp.transform._pieces.limits import limits_of
from tests.helpers import assert_scattered_by_chance, distance, eight_devices, kept, normal, slow

LENGTH = 12  # chunks of 3
X = normal((LENGTH, 8, 32))
WEIGHTS = 0.2 * normal((2, 32, 32), seed=1)
CODEC = jc.Quantize(bits=4)
NEAREST = jc.Quantize(bits=4, rounding="nearest")  # the last bits of a value redraw no noise


def _recurrent(weights, x, **options):
    def step(h, x):
        h = jnp.tanh(x @ weights[0] + h @ weights[1])
        return h, h

    return lax.scan(step, jnp.zeros_like(x[0]), x, **options)[1]


def _backwards(weights, x):
    return _recurrent(weights, x, reverse=True, unroll=2)


def _with_masks(weights, x):
    """It saves booleans, and a softmax that appears twice in its derivative."""

    def step(carry, x):
        h, count = carry
        h = jax.nn.softmax(jax.nn.relu(x @ weights[0]) + h @ weights[1])
        return (h, count + 1), h * count

    return lax.scan(step, (jnp.zeros_like(x[0]), 1), x)[1]


def _in_a_loop(weights, x):
    def step(x, weights):
        return _recurrent(weights, x), None

    return lax.scan(step, x, jnp.stack([weights] * LENGTH))[0]


def _mapped(weights, x):
    return lax.map(lambda x: jnp.sin(jnp.sin(x @ weights[0]) @ weights[1]), _recurrent(weights, x))


FUNCTIONS = [_recurrent, _backwards, _with_masks, _in_a_loop, _mapped]


def _gradients(function, policy=NEAREST, around=lambda f: f, x=X):
    def loss(weights, x):
        return jnp.square(jc.checkpoint(function, policy)(weights, x)).mean()

    return jax.jit(jax.grad(around(loss), (0, 1)))(WEIGHTS, x)


def _scans(jaxpr):
    """The lengths of all loops, from outside in."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation.params["length"]
        for inner in inner_jaxprs(equation):
            yield from _scans(inner)


@pytest.mark.parametrize("function", kept(FUNCTIONS, (_backwards, _with_masks)))
def test_chunks_give_the_gradients_of_single_iterations(function):
    with limits_of(loop_length=LENGTH):
        in_chunks = _gradients(function)
        scans = list(_scans(jax.make_jaxpr(functools.partial(_gradients, function))().jaxpr))
    alone = _gradients(function)
    assert 3 in scans
    assert 4 in scans
    assert distance(in_chunks, alone) < 1e-3  # a value in the middle of two levels may have either
    exact = jax.jit(jax.grad(lambda w, x: jnp.square(function(w, x)).mean(), (0, 1)))(WEIGHTS, X)
    assert 1e-3 < distance(in_chunks, exact) < 0.5


def _mapped_outside(loss):
    return lambda w, x: jax.vmap(loss, (None, 2))(w, jnp.stack([x, x + 1], 2)).sum()


def _over_devices(loss):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(spec(), spec(None, "data")), out_specs=spec()
    )
    def mean(w, x):
        return lax.pmean(loss(w, x), "data")

    return mean


@pytest.mark.parametrize(
    "around",
    [slow(jax.checkpoint), slow(_mapped_outside), _over_devices],
    ids=["remat", "vmap", "shard_map"],
)
def test_chunks_inside_of_others(around):
    alone = _gradients(_recurrent, around=around)
    with limits_of(loop_length=LENGTH):
        assert distance(_gradients(_recurrent, around=around), alone) < 1e-3


@pytest.mark.slow
def test_sharded_states():
    x = jax.device_put(X, jax.NamedSharding(eight_devices(), jax.P(None, "batch")))
    alone = _gradients(_recurrent, x=x)
    with limits_of(loop_length=LENGTH):
        assert distance(_gradients(_recurrent, x=x), alone) < 1e-3


def test_unbiased_over_seeds():
    def draw(seed):
        coded = jc.checkpoint(_recurrent, jc.Quantize(bits=2), seed=seed)
        return jax.grad(lambda w: jnp.square(coded(w, X)).mean())(WEIGHTS)

    with limits_of(loop_length=LENGTH):
        draws = jax.jit(lambda: lax.map(draw, jnp.arange(64)))()
    exact = jax.grad(lambda w: jnp.square(_recurrent(w, X)).mean())(WEIGHTS)
    assert_scattered_by_chance([draws], [exact])


def test_iterations_of_a_chunk_round_equal_values_differently():
    def same(x, kernels):
        return lax.scan(lambda c, w: (jnp.abs(c), jnp.abs(c) @ w), jnp.abs(x), kernels)[1].sum(1)

    coded = jc.checkpoint(same, jc.Quantize(bits=2), coded_argnums=0)
    with limits_of(loop_length=LENGTH):
        _, pull = jax.vjp(lambda w: coded(X[0], w), jnp.stack([WEIGHTS[0]] * LENGTH))
        (gradient,) = pull(jnp.ones((LENGTH, 32)))
    assert all(distance(gradient[0], other) > 1e-3 for other in gradient[1:])


def test_codes_of_chunks_are_saved_by_their_names_and_have_no_derivatives():
    coded = jc.checkpoint(_recurrent, CODEC)

    def loss(w):
        return jnp.square(coded(w, X)).mean()

    with limits_of(loop_length=LENGTH):
        kept = jax.checkpoint(loss, policy=jc.policies.save_compressed())
        again = jax.checkpoint(loss)
        saved, none = (jc.memory.declared_residual_bytes(f, WEIGHTS) for f in (kept, again))
        assert saved > X.nbytes / 8 > none
        with pytest.raises(NotImplementedError, match="second derivatives through an encoded"):
            jax.grad(lambda w: jnp.square(jax.grad(loss)(w)).sum())(WEIGHTS)


def test_which_loops_are_in_chunks():
    def notes(policy=CODEC, length=LENGTH, **limits):
        x = normal((length, 8, 32))
        with limits_of(**limits):
            plan = jc.plan(jc.checkpoint(_recurrent, policy), WEIGHTS, x)
        return " ".join(value.note for value in plan.values)

    assert "in chunks" not in notes()
    assert "in chunks of 3" in notes(loop_length=LENGTH)
    assert "in chunks of 8" in notes(length=64)
    assert "in chunks" not in notes(length=67)  # a prime
    assert "in chunks" not in notes(jc.Exact(), loop_length=LENGTH)
    assert "in chunks" not in notes(jc.Offload(CODEC), loop_length=LENGTH)
    assert "in chunks" not in notes(loop_length=LENGTH, iteration_nbytes=1000)
    only_names = Policy((Rule("keep", required=False),))
    assert "in chunks" not in notes(only_names, loop_length=LENGTH)


@pytest.mark.aot
def test_a_long_loop_has_hardly_more_kernels_than_plain():
    def loss(weights, x):
        return jnp.square(_recurrent(weights, x)).mean()

    weights, x = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2, 256, 256), (1024, 32, 256)))
    plain, coded = (
        jc.memory.analyze(jax.jit(jax.grad(f)), weights, x, target="h100")
        for f in (loss, jc.checkpoint(loss))
    )
    print(f"{coded.kernels / plain.kernels:.2f} kernels, {coded.temp_bytes / plain.temp_bytes:.2f}")
    assert coded.kernels < 1.3 * plain.kernels
    assert coded.temp_bytes < 0.75 * plain.temp_bytes
