"""`checkpoint` with JAX's own checks, and with rarely used parts of JAX in or around it."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from tests.helpers import assert_close, assert_same_bits, normal, slow, without_type_checks

X, W = normal((16, 32)), 0.2 * normal((32, 32), seed=1)
STACK = jnp.stack([W, 0.5 * W, -W])


def _loops(x, stack):
    return lax.scan(lambda x, w: (jax.nn.gelu(jax.nn.relu(x) @ w), None), x, stack)[0].sum()


@pytest.mark.slow
def test_no_tracer_leaks():
    with jax.checking_leaks():
        got = jax.jit(jax.grad(jc.checkpoint(_loops, jc.Exact())))(X, STACK)
    assert_close(got, jax.grad(_loops)(X, STACK))


def test_a_cotangent_may_be_a_python_scalar():
    _, pull = jax.vjp(jc.checkpoint(lambda x: jnp.sin(x).sum(), jc.Exact()), X)
    assert_same_bits(pull(2.0), (2 * jnp.cos(X),))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float16)])
def test_jax_enable_checks(dtype):
    def mlp(x, w):
        return (jax.nn.gelu(x @ w) @ w).astype(jnp.float32).sum()

    x, w = (jnp.tile(a, (1, 2)).astype(dtype) for a in (X, W.repeat(2, axis=0)))
    gradient = jax.grad(jc.checkpoint(mlp, jc.Quantize(bits=4)))
    with jax.enable_checks(True):
        checked = gradient(x, w)
    assert_same_bits(checked, gradient(x, w))


def _switched(x, w):
    h = jnp.sin(x @ w)
    return lax.switch(jnp.argmax(h.sum(0)) % 2, [jnp.sum, lambda h: (h**3).sum()], h)


def _exponential(x, w):
    return jax.scipy.linalg.expm(w + x.T @ x / 100).sum()


@pytest.mark.parametrize("fn", [_switched, slow(_exponential)])
def test_second_derivatives_through_branches(fn):
    def second(fn):
        return jax.jit(jax.grad(lambda x: (jax.grad(fn)(x, W) ** 2).sum()))(X)

    for policy in (jc.Exact(), jax.checkpoint_policies.everything_saveable):
        assert_close(second(jc.checkpoint(fn, policy)), second(fn), 1e-4)


@pytest.mark.parametrize("name", [slow("nothing_saveable"), "dots_with_no_batch_dims_saveable"])
def test_recomputing_policies_in_shard_map(name):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def gradient(fn):
        def of_device(x, stack):
            return lax.psum(fn(x, stack) + fn(x, stack[:1]), "data")

        mapped = jax.shard_map(of_device, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
        return jax.jit(jax.grad(mapped, (0, 1)))(X, STACK)

    policy = getattr(jax.checkpoint_policies, name)
    assert_close(gradient(jc.checkpoint(_loops, policy)), gradient(_loops))


def test_export_with_a_symbolic_batch():
    def fn(x, w):
        return jnp.mean(jax.nn.gelu(x @ w) @ w)

    (batch,) = export.symbolic_shape("batch")
    shapes = jax.ShapeDtypeStruct((batch, 32), X.dtype), jax.ShapeDtypeStruct(W.shape, W.dtype)
    coded = jc.checkpoint(fn, jc.Exact())
    assert_close(export.export(jax.jit(coded))(*shapes).call(X, W), fn(X, W))
    message = r"symbolic shapes \[\(batch, 32\)\]: expected integers"
    with without_type_checks(), pytest.raises(NotImplementedError, match=message):
        export.export(jax.jit(jax.grad(coded)))(*shapes)


def test_references():
    count = jax.new_ref(jnp.int32(0))

    def counted(x):
        count[...] += 1
        return jnp.sin(x).sum()

    def written(x):
        ref = jax.new_ref(jnp.zeros_like(x))
        ref[...] = jnp.sin(x)
        return jnp.sum(x**2 * ref[...])

    def counted_inside(x):
        ref = jax.new_ref(jnp.int32(0))
        ref[...] += 1
        return jnp.sum(x) * ref[...]

    def scaled(x, ref):
        return jnp.sum(x * ref[...])

    def added(x, ref):
        return lax.scan(lambda c, _: (c * ref[...], ref.__setitem__(..., 1.0)), x, None, 2)[0].sum()

    assert_close(jax.jit(jax.grad(jc.checkpoint(counted, jc.Exact())))(X), jnp.cos(X))
    assert count[...] == 1
    scale = jax.new_ref(jnp.float32(3))
    assert_close(jax.grad(jc.checkpoint(scaled, jc.Exact()))(X, scale), jnp.full_like(X, 3))
    assert jc.plan(jc.checkpoint(scaled), X, scale).saved_bytes >= 0
    message = r"makes or differentiates a reference of jax.new_ref \(Ref{(float|int)32"
    for refused in (
        lambda: jax.grad(jc.checkpoint(written, jc.Exact()))(X),
        lambda: jax.grad(jc.checkpoint(counted_inside))(X),
        lambda: jax.vjp(jc.checkpoint(scaled), X, scale)[1](1.0),
        lambda: jax.grad(lambda x: jc.checkpoint(added)(x, jax.new_ref(jnp.float32(1))))(X),
    ):
        with pytest.raises(NotImplementedError, match=message):
            refused()


def test_numbers_of_64_bits():
    def fn(x):
        return jnp.square(jnp.tanh(x.astype(jnp.float64))).mean().astype(jnp.float32)

    def inside(x):
        with jax.enable_x64():
            return fn(x)

    with pytest.raises(NotImplementedError, match="switches to numbers of 64 bits inside"):
        jax.grad(jc.checkpoint(inside))(X)
    with jax.enable_x64():
        assert_close(jax.grad(jc.checkpoint(fn))(X), jax.grad(fn)(X))


def test_forward_mode():
    def fn(x):
        return (jnp.sin(x) * x.sum()).sum()

    kept = jc.checkpoint(fn, jax.checkpoint_policies.nothing_saveable)
    assert_close(jax.jit(jax.hessian(kept))(X[0]), jax.jit(jax.hessian(fn))(X[0]))
    assert_close(jax.jit(jax.jacfwd(kept))(X[0]), jax.jit(jax.jacfwd(fn))(X[0]))
    coded = jc.checkpoint(lambda x: jnp.sin(x @ x.T), jc.Quantize(bits=4))
    with pytest.raises(TypeError, match=r"forward-mode .* reached values that jaxcomp saves"):
        jax.jvp(coded, (jnp.ones((128, 4)),), (jnp.ones((128, 4)),))
    assert kept.__wrapped__ is fn


def test_equal_programs_are_decided_about_once():
    scale = {"by": 1.0}
    asked = []

    def policy(primitive, *_, **__):
        asked.append(primitive)
        return False

    def stock(x, w):
        return jnp.tanh(jax.nn.relu(x @ w)) * scale["by"]

    layer = jc.checkpoint(stock, policy)

    def gradient(layer):
        fn = jax.grad(lambda w: sum(layer(layer(X, w), w).sum() for _ in range(2)))
        return jax.jit(fn)(W)

    def asked_for():
        asked.clear()
        assert_close(gradient(layer), gradient(stock))
        return len(asked)

    first = asked_for()
    assert first and asked_for() == 0
    # What a function closes over may change, be a tracer, and be freed.
    for by in (2.0, jnp.float32(3), X[:1]):
        scale["by"] = by
        assert asked_for() > 0

    def of_scale(by, layer):
        scale["by"] = by
        return layer(X, W).sum()

    for by in (W[:1], W[1:2]):
        got, expected = (
            jax.jit(jax.grad(of_scale), static_argnums=1)(by, f) for f in (layer, stock)
        )
        assert_close(got, expected)
    scale["by"] = W[:1] + 1
    held = weakref.ref(scale["by"])
    assert asked_for() == 0  # it is an argument of the program
    scale.clear()
    gc.collect()
    assert held() is None
