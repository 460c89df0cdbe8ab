"""What `checkpoint` computes backward: in what order, and what it writes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxcomp as jc
from jaxcomp import memory
from jaxcomp.transform._program.primitives import tangents_of
from jaxcomp.transform._program.program import variables
from tests.helpers import assert_close, normal
from tests.transform.mlp import CODEC, W1, W2, X, mlp


def _primitives(jaxpr):
    """Names of the primitives, in order, with those of calls in their places."""
    found = []
    for equation in jaxpr.eqns:
        called = [getattr(p, "jaxpr", p) for p in equation.params.values() if hasattr(p, "jaxpr")]
        found += [n for inner in called for n in _primitives(inner)] or [equation.primitive.name]
    return found


def test_a_derivative_is_coded_before_what_follows_is_computed():
    def loss(x, w1, w2):
        return jnp.sum(jnp.sin(x @ w1) @ w2)

    def vjp(*args):
        return jax.vjp(jc.checkpoint(loss, CODEC), *args)

    names = _primitives(jax.make_jaxpr(vjp)(X, W1, W2).jaxpr)
    last_product = len(names) - names[::-1].index("dot_general")
    # Seeds of the call and of both codes, the operand before and after it is coded, the derivative.
    assert names[:last_product].count("optimization_barrier") == 6
    assert "optimization_barrier" not in names[last_product:]


def test_the_gradient_of_a_weight_is_transposed_before_the_next_product():
    # XLA makes the transposition a part of the product, unless a barrier stands between them.
    gradient = jax.grad(lambda *args: jc.checkpoint(mlp, CODEC)(*args).sum(), (1, 2))
    names = _primitives(jax.make_jaxpr(gradient)(X, W1, W2).jaxpr)
    at = [i for i, name in enumerate(names) if name == "transpose"]
    assert [names[i - 1 : i + 1] for i in at] == [["dot_general", "transpose"]] * len(at) != []


def test_a_mask_is_unpacked_when_its_cotangent_is_there():
    # The derivative of ReLU chooses between the cotangent and zeros, which are there before.
    y, pull = jax.vjp(jc.checkpoint(lambda x: jax.nn.relu(x @ W1), CODEC), normal((256, 128)))
    backward = jax.make_jaxpr(pull)(y).jaxpr
    arriving = tangents_of(backward.eqns, backward.invars)
    barriers = [e for e in backward.eqns if e.primitive.name == "optimization_barrier"]
    assert barriers and all(arriving.intersection(variables(e.invars)) for e in barriers)


def test_what_a_transposition_reads_may_be_a_gradient_too():
    def block(a, b, x, w):
        return x @ w + (a + b.T) @ jnp.tanh(x @ w)

    args = 0.1 * normal((32, 32), seed=3), 0.1 * normal((32, 32), seed=4), X, W1
    coded, exactly, expected = (
        jax.grad(lambda *args, f=f: jnp.sum(f(*args) ** 2), (0, 1, 2, 3))(*args)
        for f in (jc.checkpoint(block, CODEC), jc.checkpoint(block, jc.Exact()), block)
    )
    assert_close(exactly, expected, 1e-5)
    assert_close(coded, expected, 0.1)


def test_effects_of_the_backward_pass_stay(capsys):
    def inner(x):
        jax.debug.print("{}", x.size)
        return jnp.sin(x)

    def block(x, w1):
        return jnp.tanh(jax.checkpoint(inner)(x @ w1))

    got, expected = (
        jax.grad(lambda *args, f=f: f(*args).sum())(X, W1)
        for f in (jc.checkpoint(block, jc.Exact()), block)
    )
    jax.effects_barrier()
    assert_close(got, expected, 1e-5)
    assert set(capsys.readouterr().out.split()) == {str(32 * 256)}


@pytest.mark.aot
def test_a_row_of_products_is_not_computed_again_before_its_cotangent_is_there():
    def gate(x, w1, w2):
        return x * jax.nn.sigmoid((jnp.tanh(x @ w1) @ w2).mean(-1, keepdims=True))

    x, w1, w2 = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 64), (64, 256), (256, 64)))

    def temp(gate):
        def loss(x, w1, w2):
            for _ in range(4):
                x = jnp.sin(gate(x, w1, w2))
            return jnp.sum(x**2)

        return memory.analyze(jax.grad(loss, (0, 1, 2)), x, w1, w2, target="h100").temp_bytes

    bare = temp(jc.checkpoint(gate, jax.checkpoint_policies.nothing_saveable))
    print(f"h100, four gates: {bare}, plain {temp(gate)} bytes")
    assert bare < 0.7 * temp(gate)


@pytest.mark.aot
def test_the_backward_pass_of_a_norm_writes_no_more_than_jax_does():
    x, row = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 512, 256), (1, 1, 256)))

    def layer_norm(x, scale, bias):  # as Flax has it
        wide = x.astype(jnp.float32)
        mean = wide.mean(-1, keepdims=True)
        variance = jnp.square(wide).mean(-1, keepdims=True) - mean**2
        return ((wide - mean) * (lax.rsqrt(variance + 1e-6) * scale) + bias).astype(x.dtype)

    def report(norm):
        def pull(x, scale, bias, cotangent):
            return jax.vjp(lambda *args: jnp.tanh(norm(*args)), x, scale, bias)[1](cotangent)

        return memory.analyze(pull, x, row, row, x, target="h100")

    coded, plain = map(report, (jc.checkpoint(layer_norm, CODEC), layer_norm))
    print(f"h100, layer norm: {coded.temp_bytes}, plain {plain.temp_bytes} bytes")
    assert coded.temp_bytes < 1.1 * plain.temp_bytes


@pytest.mark.aot
def test_tpus_read_the_wide_arrays_of_a_feed_forward_network_in_few_passes():
    def loss(w1, b1, w2, b2, x):
        return (jax.nn.gelu(x @ w1 + b1) @ w2 + b2).astype(jnp.float32).sum()

    shapes = (384, 1536), (1, 1, 1536), (1536, 384), (1, 1, 384), (128, 196, 384)
    kinds = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    coded, plain = (
        memory.analyze(jax.grad(f, (0, 1, 2, 3, 4)), *kinds, target="v5e").estimated_seconds
        for f in (jc.checkpoint(loss, "transformer:bits=4"), loss)
    )
    print(f"v5e, a feed-forward network: {1e6 * coded:.0f} us, plain {1e6 * plain:.0f} us")
    assert coded < 1.6 * plain
