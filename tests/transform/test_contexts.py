"""`checkpoint` under JAX's other transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxcomp as jc
from tests.helpers import assert_close, assert_same_bits, normal, replicate, shard, slow

X, W = normal((16, 32)), 0.2 * normal((32, 32), seed=1)
EXACT, CODEC, HALF = jc.Exact(), jc.Quantize(bits=8), jc.Cast("bfloat16")


def _block(x, w):
    return x + jnp.tanh(jax.nn.gelu(x @ w) @ w)


def _loss(block):
    return lambda x, w: jnp.mean(block(block(x, w), w) ** 2)


def _gradients(loss, *args):
    return jax.jit(jax.grad(loss, (0, 1)))(*args)


def _near(got, expected, rtol):
    """Apart from rounding noise, as a whole."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(b)


def _closing_over(policy):
    return lambda x, w: _loss(lambda x, _: jc.checkpoint(lambda x: _block(x, w), policy)(x))(x, w)


CONTEXTS = {
    "plain": lambda policy: _loss(jc.checkpoint(_block, policy)),
    "around jit": lambda policy: _loss(jc.checkpoint(jax.jit(_block), policy)),
    "nested": lambda policy: jc.checkpoint(_loss(jc.checkpoint(_block, policy)), policy),
    "in remat": lambda policy: jax.checkpoint(_loss(jc.checkpoint(_block, policy))),
    "in remat with names": lambda policy: jax.checkpoint(
        _loss(jc.checkpoint(_block, policy)), policy=jc.policies.save_compressed()
    ),
    "around remat": lambda policy: jc.checkpoint(_loss(jax.checkpoint(_block)), policy),
    "in a branch": lambda policy: (
        lambda x, w: lax.cond(
            x.sum() < 1e9, _loss(jc.checkpoint(_block, policy)), _loss(_block), x, w
        )
    ),
    "closing over weights": _closing_over,
    "keywords": lambda policy: _loss(lambda x, w: jc.checkpoint(_block, policy)(x, w=w)),
}
if jax.config.values.get("jax_remat3"):
    del CONTEXTS["in remat with names"]  # save_compressed is an error


@pytest.mark.parametrize(
    ("policy", "rtol"), [slow(EXACT, 1e-5), (HALF, 0.02)], ids=["exact", "coded"]
)
def test_composes(policy, rtol):
    block = jc.checkpoint(_block, policy)
    assert_same_bits(jax.jit(block)(X, W), jax.jit(_block)(X, W))
    _near(jax.grad(_loss(block), (0, 1))(X, W), _gradients(_loss(_block), X, W), rtol)

    def all_contexts(x, w):
        return {name: jax.grad(make(policy), (0, 1))(x, w) for name, make in CONTEXTS.items()}

    expected = _gradients(_loss(_block), X, W)
    for found in jax.jit(all_contexts)(X, W).values():
        _near(found, expected, rtol)


@pytest.mark.parametrize(
    ("policy", "rtol"), [slow(EXACT, 1e-5), (CODEC, 0.02)], ids=["exact", "coded"]
)
def test_layers_in_a_scan(policy, rtol):
    stack = jnp.stack([W, 0.5 * W, -W])

    def loss(block):
        def run(x, stack):
            return jnp.mean(lax.scan(lambda x, w: (block(x, w), None), x, stack)[0] ** 2)

        return run

    block = jc.checkpoint(_block, policy, coded_argnums=0)
    _near(_gradients(loss(block), X, stack), _gradients(loss(_block), X, stack), rtol)


def test_a_scan_stacks_codes_and_nothing_else():
    stack = jnp.stack([W, 0.5 * W, -W])
    block = jc.checkpoint(_block, CODEC, coded_argnums=0)

    def run(x, stack):
        return lax.scan(lambda x, w: (block(x, w), None), x, stack)[0]

    leaves = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(run, *a)[1], X, stack))
    stacked = [leaf for leaf in leaves if leaf.shape == (3, *X.shape)]
    assert stacked and {leaf.dtype for leaf in stacked} == {jnp.dtype(jnp.uint8)}


def test_vmap_draws_other_noise_for_other_values():
    block = jc.checkpoint(_block, jc.Quantize(bits=2))
    gradient = jax.grad(lambda x: jnp.sum(block(x, W)))
    many = jnp.stack([X, X + 1e-3])
    mapped = jax.jit(jax.vmap(gradient))(many)
    exact = jax.jit(jax.vmap(jax.grad(lambda x: jnp.sum(_block(x, W)))))(many)
    noise = mapped - exact
    assert np.corrcoef(noise[0].ravel(), noise[1].ravel())[0, 1] < 0.9
    assert_close(mapped[0], jax.jit(gradient)(X), 1e-5)


def test_shards_hold_codes_of_their_own_samples():
    block = jc.checkpoint(_block, CODEC)
    expected = _gradients(_loss(block), X, W)
    assert_close(_gradients(_loss(block), shard(X), replicate(W)), expected, 1e-4)
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    batch, whole = jax.P("batch"), jax.P()
    mapped = jax.shard_map(block, mesh=mesh, in_specs=(batch, whole), out_specs=batch)
    _near(_gradients(_loss(mapped), X, W), expected, 0.02)


def test_shard_map_inside_is_exact():
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    batch, whole = jax.P("batch"), jax.P()
    mapped = jax.shard_map(_block, mesh=mesh, in_specs=(batch, whole), out_specs=batch)
    got = _gradients(jc.checkpoint(_loss(mapped), CODEC), X, W)
    _near(got, _gradients(_loss(_block), X, W), 0.02)


def test_seed_redraws_noise():
    def gradient(seed):
        block = jc.checkpoint(_block, jc.Quantize(bits=2), seed=seed)
        return jax.grad(lambda w: jnp.sum(block(X, w)))(W)

    jitted = jax.jit(gradient)
    assert_same_bits(jitted(3), jitted(3))
    assert np.any(jitted(3) != jitted(4))


def test_second_derivatives_are_right_or_refused():
    def second(block):
        def gradient_norm(x):
            return jnp.sum(jax.grad(lambda x: jnp.sum(block(x, W) ** 2))(x) ** 2)

        return jax.jit(jax.grad(gradient_norm))

    assert_close(second(jc.checkpoint(_block, EXACT))(X), second(_block)(X), 1e-4)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        second(jc.checkpoint(_block, CODEC))(X)


def test_hessian_vector_product_with_exact_codec():
    def product(block):
        gradient = jax.grad(lambda x: jnp.sum(block(x, W) ** 2))
        return jax.jit(lambda x: jax.jvp(gradient, (x,), (jnp.ones_like(x),))[1])(X)

    assert_close(product(jc.checkpoint(_block, EXACT)), product(_block), 1e-4)


def test_static_arguments_and_functions_without_arguments():
    def power(x, name, times):
        return (jnp.sin(x @ W) if name == "sine" else x) ** times

    f = jc.checkpoint(power, CODEC, static_argnums=(1, -1))
    assert_same_bits(f(X, "sine", 2), power(X, "sine", 2))
    assert_same_bits(jc.checkpoint(lambda: jnp.arange(3), CODEC)(), jnp.arange(3))
    assert jc.checkpoint(lambda x: None, CODEC)(X) is None
    empty = jnp.zeros((0, 32))
    assert jax.grad(lambda x: jc.checkpoint(_block, CODEC)(x, W).sum())(empty).shape == (0, 32)
    gradient = jax.grad(lambda w: jc.checkpoint(lambda: jnp.sin(X @ w).sum(), EXACT)())(W)
    assert_close(gradient, jax.grad(lambda w: jnp.sin(X @ w).sum())(W), 1e-5)


def test_static_arguments_by_name():
    def apply(x, w, train=True):
        return jnp.sin(x @ w) if train else x @ w

    f = jc.checkpoint(apply, CODEC, static_argnames="train")
    assert_same_bits(f(X, W, False), apply(X, W, False))
    gradient = jax.jit(jax.grad(lambda x, train: f(x, W, train=train).sum()), static_argnums=1)
    assert_close(gradient(X, False), jnp.ones_like(X @ W) @ W.T, 1e-5)
    assert np.any(gradient(X, True) != gradient(X, False))
    with pytest.raises(ValueError, match=r"static_argnames='tran': expected names among \['x', "):
        jc.checkpoint(apply, CODEC, static_argnames="tran")
    message = r"(?s)function apply at .*test_contexts.py.*argument train"
    with pytest.raises(jax.errors.TracerBoolConversionError, match=message):
        jc.checkpoint(apply, CODEC)(X, W, train=True)


@pytest.mark.slow
def test_half_precision():
    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    got = _gradients(_loss(jc.checkpoint(_block, CODEC)), x, w)
    assert all(g.dtype == jnp.bfloat16 for g in got)
    expected = _gradients(_loss(_block), X, W)
    _near([g.astype(jnp.float32) for g in got], expected, 0.1)


def test_loops_without_a_derivative_say_so():
    def loop(x):
        return lax.while_loop(lambda c: c.sum() > 1e9, jnp.sin, x)

    with pytest.raises(ValueError, match="Reverse-mode"):
        jax.grad(lambda x: jc.checkpoint(loop, CODEC)(x).sum())(X)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(jc.checkpoint(lambda x: jnp.sin(x @ W), CODEC), (X,), (X,))


def test_results_that_nobody_uses():
    def two(x, w):
        return jnp.sin(x @ w), {"other": jnp.cos(x @ w)}

    def gradient(fn):
        return jax.jit(jax.grad(lambda x: fn(x, W)[0].sum()))(X)

    assert_close(gradient(jc.checkpoint(two, EXACT)), gradient(two), 1e-5)


def test_prints_are_kept(capfd):
    def loud(x):
        jax.debug.print("here {}", x.shape[0])
        return jnp.sin(x)

    jax.block_until_ready(jax.grad(lambda x: jc.checkpoint(loud, CODEC)(x).sum())(X))
    assert "here 16" in capfd.readouterr().out


def test_not_a_number_stays_visible():
    bad = X.at[3, 5].set(jnp.nan)
    gradient = jax.jit(jax.grad(lambda w: jc.checkpoint(_block, CODEC)(bad, w).sum()))(W)
    assert np.isnan(gradient).any()


def test_names_reach_an_outer_checkpoint():
    def named(x, w):
        return jnp.sin(checkpoint_name(x @ w, "hidden")) @ w

    outer = jax.checkpoint(
        jc.checkpoint(named, EXACT),
        policy=jax.checkpoint_policies.save_only_these_names("hidden"),
    )
    _near(_gradients(_loss(outer), X, W), _gradients(_loss(named), X, W), 1e-5)


def test_a_value_that_is_the_same_on_all_shards_has_the_same_code_on_all():
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x, w):
        h = jnp.tanh(x @ w)
        return h * jnp.sin(lax.psum(h, "batch"))

    def gradients(function):
        specs = jax.P("batch"), jax.P()
        mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=jax.P("batch"))
        return _gradients(lambda x, w: jnp.mean(mapped(x, w) ** 2), X, W)

    _near(gradients(jc.checkpoint(local, CODEC)), gradients(local), 0.02)
