import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import print_saved_residuals

from jaxcomp import (
    AvgPool,
    Cast,
    Exact,
    Packed,
    Quantize,
    ops,
    policies,
)
from jaxcomp._core import barriers
from jaxcomp.memory import compiler_options
from jaxcomp.memory._tracing import inner_jaxprs
from tests.helpers import assert_close, assert_same_bits, normal, stored_shapes

PRODUCT = (((1,), (0,)), ((), ()))


def layers(x, weights, codec):
    """Three layers, unrolled; the code of each is made of what the previous one returned."""
    for w in weights:
        x = ops.relu(ops.dot_general(x, w, PRODUCT, codec=codec))
    return (x**2).sum()


def scanned(x, weights, codec):
    def layer(x, w):
        return ops.relu(ops.dot_general(x, w, PRODUCT, codec=codec)), None

    return (jax.lax.scan(layer, x, weights)[0] ** 2).sum()


X, WEIGHTS = normal((64, 32)), normal((3, 32, 32), seed=1)


def names(fn, *args):
    """The names in the jaxpr of the gradient."""
    jaxpr = str(jax.make_jaxpr(jax.grad(fn))(*args))
    return {f"jaxcomp/{c.name}" for c in (Exact, Cast, AvgPool, Quantize, Packed)} & {
        part.strip("]") for part in jaxpr.replace("name=", " ").split()
    }


@pytest.mark.parametrize("codec", [Exact(), Cast(), Quantize(2)], ids=str)
def test_stored_arrays_carry_the_codecs_name(codec):
    expected = {f"jaxcomp/{codec.name}", "jaxcomp/packed"}
    assert names(lambda w: layers(X, w, codec), WEIGHTS) == expected


def test_barriers_tie_forward_and_backward():
    def count(jaxpr):
        own = sum(e.primitive.name == "optimization_barrier" for e in jaxpr.eqns)
        return own + sum(count(inner) for e in jaxpr.eqns for inner in inner_jaxprs(e))

    gradient = jax.make_jaxpr(jax.grad(lambda w: layers(X, w, Quantize(2))))(WEIGHTS)
    # Products, and the order of a gradient for a GPU; masks.
    assert count(gradient.jaxpr) == 3 * (3 + 1) + 3 * 2


def test_values_pass_unchanged():
    out, residual = (X, (X + 1, X + 2)), {"a": X.astype(jnp.int32)}
    assert_same_bits(barriers.save_residual(out, residual, Quantize(2)), (out, residual))
    assert_same_bits(barriers.barrier_together(residual, out), (residual, out))


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4)])
def test_decode_after_a_cotangent_is_decode(shape):
    x = normal(shape, jnp.bfloat16)
    cotangent = jnp.full(shape, jnp.nan)
    residual = Quantize(2).encode(x)
    decode_after = jax.jit(barriers.decode_after, static_argnums=2)
    decoded = decode_after(cotangent, residual, Quantize(2).decode)
    assert_same_bits(decoded, jax.jit(Quantize(2).decode)(residual))


def test_plain_checkpoint_throws_the_codes_away_and_the_policy_keeps_them():
    def loss(w, x, policy):
        layer = jax.checkpoint(
            lambda w, x: ops.relu(ops.dot_general(x, w, PRODUCT, codec=Quantize(2))), policy=policy
        )
        return (layer(w, x) ** 2).sum()

    def shapes(policy):
        return {dtype for _, dtype in stored_shapes(lambda w: loss(w, X, policy), WEIGHTS[0])}

    assert "uint4" not in shapes(None)
    assert {"uint4", "uint8"} <= shapes(policies.save_compressed())
    expected = jax.jit(jax.grad(lambda w: loss(w, X, jax.checkpoint_policies.everything_saveable)))
    for policy in (None, policies.save_compressed()):
        gradient = jax.jit(jax.grad(lambda w, policy=policy: loss(w, X, policy)))(WEIGHTS[0])
        assert_close(gradient, expected(WEIGHTS[0]))


def test_saved_residuals_are_the_codes_by_their_name(capsys):
    layer = jax.checkpoint(
        lambda w, x: ops.dot_general(x, w, PRODUCT, codec=Quantize(2)).sum(),
        policy=policies.save_compressed(),
    )
    print_saved_residuals(layer, WEIGHTS[0], X)
    printed = capsys.readouterr().out
    assert "u4[64,16] named 'jaxcomp/quantize'" in printed


def test_scan_over_layers_equals_the_unrolled_layers_and_stores_codes():
    codec = Quantize(2)
    unrolled = jax.jit(jax.grad(lambda w: layers(X, w, codec)))(WEIGHTS)
    assert_close(jax.jit(jax.grad(lambda w: scanned(X, w, codec)))(WEIGHTS), unrolled)
    stored = stored_shapes(lambda w: scanned(X, w, codec), WEIGHTS)
    assert ((3, 64, 16), "uint4") in stored
    assert ((3, 64, 32), "float32") not in stored


@pytest.mark.parametrize("codec", [Exact(), Quantize(2)], ids=str)
def test_a_further_layer_costs_in_the_compiled_program_what_it_declares(codec):
    x, mask = jnp.ones((4096, 64)), Packed(bits=1)

    def temp(count):
        w = jnp.ones((count, 64, 64))
        lowered = jax.jit(jax.grad(lambda w, x: layers(x, w, codec))).lower(w, x)
        compiled = lowered.compile(compiler_options())
        return compiled.memory_analysis().temp_size_in_bytes

    declared = codec.nbytes(x.shape, x.dtype) + mask.nbytes(x.shape, jnp.bool)
    kernel_gradient = 64 * 64 * 4
    assert temp(9) - temp(5) == pytest.approx(4 * (declared + kernel_gradient), rel=0.01)


@pytest.mark.parametrize("codec", [Cast(), Quantize(8)], ids=str)
@pytest.mark.parametrize("outer", ["reverse", "forward"])
def test_second_derivative_through_a_code_is_an_error(codec, outer):
    gradient = jax.grad(lambda w: layers(X, w, codec))
    with pytest.raises(NotImplementedError, match="second derivatives"):
        if outer == "forward":
            jax.eval_shape(lambda w: jax.jvp(gradient, (w,), (w,)), WEIGHTS)
        else:
            jax.eval_shape(jax.grad(lambda w: gradient(w).sum()), WEIGHTS)


def test_second_derivative_with_exact_residuals_is_right():
    def loss(w, codec):
        y = ops.relu(ops.dot_general(X, w, PRODUCT, codec=codec))
        return jnp.sin(ops.dot_general(y, w, PRODUCT, codec=codec)).sum()

    def product(codec):
        gradient = jax.grad(lambda w: loss(w, codec))
        return jax.jvp(gradient, (WEIGHTS[0],), (WEIGHTS[1],))[1]

    assert_close(product(Exact()), product(None), 1e-4)


def test_second_derivative_that_does_not_meet_the_code_is_right():
    """The code is of `X`, which is not differentiated."""

    def product(codec):
        gradient = jax.grad(lambda w: jnp.sin(ops.dot_general(X, w, PRODUCT, codec=codec)).sum())
        return jax.jvp(gradient, (WEIGHTS[0],), (WEIGHTS[1],))[1]

    codec = Cast("float32")
    assert_close(product(codec), product(None))
