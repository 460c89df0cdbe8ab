"""The statistic of a sink against the variance that coding brings in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import Exact, PerSample, Quantize, ops
from tests.helpers import kept, normal, without_type_checks

WIDTHS = (1, 2, 4, 8)
LAYOUT = ("NHWC", "HWIO", "NHWC")


def dot(x, w, **kwargs):
    return ops.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), **kwargs)


def conv(x, w, **kwargs):
    groups = x.shape[-1] // w.shape[-2]
    return ops.conv_general_dilated(
        x, w, (1, 1), "VALID", dimension_numbers=LAYOUT, feature_group_count=groups, **kwargs
    )


def conv_transpose(x, w, **kwargs):
    return ops.conv_transpose(x, w, (2, 2), "VALID", **kwargs)


def batch_norm(x, w, **kwargs):
    return ops.batch_norm(x, w, None, **kwargs)[0]


def layer_norm(x, w, **kwargs):
    return ops.layer_norm(x, w, None, **kwargs)


X = normal((8, 24, 24, 4))
OPS = {
    "dot": (dot, X[:, 0], (4, 5)),
    "dot of vectors": (dot, X[:, 0, 0], (4, 5)),
    "conv 1x1": (conv, X, (1, 1, 4, 6)),
    "conv 3x3": (conv, X, (3, 3, 4, 6)),
    "grouped conv": (conv, X, (3, 3, 2, 6)),
    "transposed conv": (conv_transpose, X, (3, 3, 4, 6)),
    "batch norm": (batch_norm, X, (4,)),
    "layer norm": (layer_norm, X.reshape(8, 24, 6, 16), (16,)),
}


@pytest.mark.parametrize(
    ("case", "rectified"),
    kept(
        [*((case, False) for case in OPS), ("dot", True), ("conv 3x3", True)],
        [
            *((case, False) for case in ("dot", "conv 3x3", "layer norm")),
            ("batch norm", False),
            ("dot", True),
        ],
    ),
)
def test_predicts_the_variance_of_the_gradient(case, rectified):
    op, x, shape = OPS[case]
    x = jax.nn.relu(x[:4]) if rectified else x[:4]
    w = normal(shape, seed=1)
    target = normal(jax.eval_shape(op, x, w).shape, seed=2)

    def loss(w, sink, seed, codec):
        return (op(x, w, codec=codec, sink=sink, seed=seed) * target).sum()

    @jax.jit
    def run(w, sink, seeds):
        found = jax.grad(functools.partial(loss, codec=Exact()), 1)(w, sink, 0)
        draws = {}
        for bits in (1, 2, 4):
            draw = jax.grad(functools.partial(loss, codec=Quantize(bits)))
            draws[bits] = jax.lax.map(functools.partial(draw, w, None), seeds)
        return found, draws

    found, draws = run(w, jnp.ones((len(x), 6)), jnp.arange(60))
    for bits, drawn in draws.items():
        measured = np.asarray(drawn).var(axis=0, ddof=1).sum()
        predicted = found[:, 2 + WIDTHS.index(bits)].sum()
        # Few values of a norm; at the borders a 3x3 kernel meets a value less often.
        assert 0.65 < measured / predicted < 1.5


def test_ranges_and_importance():
    x = X * jnp.arange(1.0, 9.0)[:, None, None, None]
    w = normal((1, 1, 4, 6), seed=1)

    def loss(sink):
        return (conv(x, w, codec=PerSample((8, 2)), sink=sink) ** 2).sum()

    found = jax.jit(jax.grad(loss))(jnp.ones((8, 6)))
    np.testing.assert_allclose(found[:, 0], np.square(np.ptp(x, axis=(1, 2))).sum(-1), rtol=1e-6)

    @jax.jit
    def gradient(importance):
        sink = jnp.ones((8, 6)).at[:, 1].set(importance)
        return jax.grad(lambda w: (conv(x, w, codec=PerSample((8, 2)), sink=sink) ** 2).sum())(w)

    even, odd = (gradient(jnp.where(jnp.arange(8) % 2 == i, 100.0, 1.0)) for i in (0, 1))
    assert not np.array_equal(even, odd)


def test_a_sink_of_another_shape_is_an_error():
    with without_type_checks(), pytest.raises(ValueError, match=r"sink of shape \(4, 6\)"):
        conv(X, normal((1, 1, 4, 6)), codec=Exact(), sink=jnp.ones((4, 6)))
