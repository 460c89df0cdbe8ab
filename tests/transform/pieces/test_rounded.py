"""Operands of bfloat16 products, rounded where they are made."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxcomp as jc
from jaxcomp import memory
from jaxcomp._core import remat3
from jaxcomp.memory._tracing import inner_jaxprs
from jaxcomp.transform._pieces import pieces
from jaxcomp.transform._pieces.rounded import with_rounded_operands
from jaxcomp.transform._program.builder import flat
from jaxcomp.transform._program.program import Program, avals
from tests.helpers import assert_close, normal

BF16 = lax.DotAlgorithmPreset.BF16_BF16_F32


def _product(x, y, precision=BF16):
    return lax.dot(x, y, precision=precision, preferred_element_type=jnp.float32)


def _nested(x, y):
    def body(carry, _):
        return jax.checkpoint(lambda c: lax.cond(c[0, 0] > 0, _step, _other, c, y))(carry), None

    return lax.scan(body, x, jnp.arange(2))[0]


def _step(c, y):
    return jnp.tanh(_product(c, y))


def _other(c, y):
    return _product(y, c)


def _wide_operands(jaxpr):
    found = sum(
        str(v.aval.dtype) == "float32"
        for e in jaxpr.eqns
        if e.primitive.name == "dot_general"
        for v in e.invars
    )
    return found + sum(_wide_operands(inner) for e in jaxpr.eqns for inner in inner_jaxprs(e))


def test_what_a_product_would_round():
    """On values that bfloat16 has, the program computes the same, but for the order of sums."""
    x, y = (normal((16, 16), jnp.bfloat16, i).astype(jnp.float32) for i in range(2))
    with remat3.traced_without():  # as programs of this package are traced
        program = flat(Program.trace(_nested, x, y))
    rounded = with_rounded_operands(program)
    assert _wide_operands(program.jaxpr) == 4
    assert _wide_operands(rounded.jaxpr) == 0
    assert avals(rounded.results) == avals(program.results)

    def once(x, y):
        return _step(x, y)

    program = flat(Program.trace(once, x, y))
    (expected,) = jax.jit(program)(x, y)
    (found,) = jax.jit(with_rounded_operands(program))(x, y)
    assert_close(found, expected, 1e-6)


@pytest.mark.parametrize("precision", [None, "highest", lax.DotAlgorithmPreset.BF16_BF16_F32_X3])
def test_other_products_keep_their_operands(precision):
    x = normal((8, 8))
    program = flat(Program.trace(lambda x: _product(x, x, precision), x))
    assert with_rounded_operands(program) is program


@pytest.mark.aot
def test_a_step_of_an_attention_needs_less(monkeypatch):
    """The cotangents of scores of `jax.nn.dot_product_attention`."""
    q, k, v = (jax.ShapeDtypeStruct((32, 256, 8, 64), jnp.bfloat16) for _ in range(3))

    def loss(q, k, v):
        mixed = jax.checkpoint(jax.nn.dot_product_attention)(q, k, v)
        return jnp.sin(mixed.astype(jnp.float32)).sum()

    def report():
        jax.clear_caches()
        gradient = jax.grad(jc.checkpoint(loss, jc.Exact()), (0, 1, 2))
        return memory.analyze(gradient, q, k, v, target="h100")

    rounded = report()
    monkeypatch.setattr(pieces, "with_rounded_operands", lambda program: program)
    wide = report()
    print(f"{rounded.hbm_traffic_bytes:,} bytes of traffic, {wide.hbm_traffic_bytes:,} before")
    assert rounded.hbm_traffic_bytes < 0.93 * wide.hbm_traffic_bytes
    assert rounded.temp_bytes < 0.9 * wide.temp_bytes
