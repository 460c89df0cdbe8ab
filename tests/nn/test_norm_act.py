import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcomp as jc
from tests.helpers import (
    assert_close,
    assert_same_bits,
    normal,
    slow,
    stored_shapes,
    without_type_checks,
)

X = normal((4, 6, 6, 3))


def unit(codec=None, relu=True, cin=3, **kwargs):
    rngs = nnx.Rngs(0)
    conv = jc.nn.Conv(cin, 8, (3, 3), use_bias=False, rngs=rngs)
    norm = jc.nn.BatchNorm(8, rngs=rngs, **kwargs)
    return jc.nn.ConvNormAct(conv, norm, relu=relu, codec=codec)


def test_training_gives_the_stock_layers_value_and_statistics():
    coded, stock = unit(jc.SignAware(4)), unit()
    y, expected = coded(X), stock(X)
    assert isinstance(y, jc.ops.CodedArray)
    assert isinstance(expected, jax.Array)
    assert_close(y.value, expected)
    assert_close(nnx.state(coded), nnx.state(stock))
    np.testing.assert_array_equal(jc.ops.value(expected), expected)


def test_evaluation_is_stock_and_has_no_code():
    coded, stock = unit(jc.SignAware(4)), unit()
    coded.eval()
    stock.eval()
    assert_same_bits(coded(X), stock(X))


def test_state_is_that_of_its_layers():
    state = nnx.to_flat_state(nnx.state(unit(jc.SignAware(2))))
    names = {"/".join(map(str, path)) for path, _ in state}
    assert names == {"conv/kernel", "norm/scale", "norm/bias", "norm/mean", "norm/var"}


def block(codec, **options):
    """A unit that adds the norm of a residual, and one that pools."""
    rngs = nnx.Rngs(0)
    norms = [jc.nn.BatchNorm(8, rngs=rngs) for _ in range(2)]
    norms.append(jc.nn.BatchNorm(8, rngs=rngs, **options))
    pool = jc.nn.MaxPool((3, 3), (2, 2), "SAME", codec=jc.Packed(4))
    pooled = jc.nn.NormAct(norms[0], pool=pool, codec=codec)
    return pooled, jc.nn.NormAct(norms[1], residual_norm=norms[2], codec=codec)


@pytest.mark.parametrize("codec", [slow(jc.SignAware(4)), jc.Offload(jc.SignAware(2))], ids=str)
def test_a_residuals_norm_and_a_pool_are_the_layers_own(codec):
    x = normal((4, 6, 6, 8))
    (pooled, added), (one, other) = block(codec), block(None)
    y = added(x, 2 * x + 1)
    assert isinstance(y, jc.ops.CodedArray)
    assert_close(y.value, other(x, 2 * x + 1))
    y = pooled(x)
    assert y.value.shape == y.code.shape == (4, 3, 3, 8)
    assert_close(y.value, one(x))
    for coded, stock in ((pooled, one), (added, other)):
        assert_close(nnx.state(coded), nnx.state(stock))
        assert all(norm.any() for norm in jax.tree.leaves(nnx.state(coded, nnx.BatchStat)))
        coded.eval()
        stock.eval()
        assert_same_bits(coded(x, *[x][: stock is other]), stock(x, *[x][: stock is other]))


def test_a_residuals_frozen_norm_is_used_as_it_is():
    x = normal((4, 6, 6, 8))
    (_, coded), (_, stock) = block(jc.SignAware(4)), block(None)
    for unit in (coded, stock):
        unit.residual_norm.eval()
    assert_close(coded(x, 3 * x).value, stock(x, 3 * x))
    assert_close(nnx.state(coded), nnx.state(stock))
    assert not nnx.state(coded)["residual_norm"]["mean"][...].any()


def test_a_pool_of_large_windows_has_wider_indices():
    pool = jc.nn.MaxPool((5, 5), (2, 2), "SAME", codec=jc.Packed(8))
    norm = jc.nn.BatchNorm(8, rngs=nnx.Rngs(0))
    unit = jc.nn.NormAct(norm, pool=pool, codec=jc.SignAware(4))
    x = normal((4, 6, 6, 8))
    assert_close(
        unit(x).value, nnx.max_pool(jax.nn.relu(nnx.clone(norm)(x)), (5, 5), (2, 2), "SAME")
    )
    assert ((4, 3, 3, 8), "uint8") in stored_shapes(lambda x: nnx.clone(unit)(x).value, x)


NORM, POOL = jc.nn.BatchNorm(8, rngs=nnx.Rngs(0)), jc.nn.MaxPool((2, 2))


@pytest.mark.parametrize("codec", [jc.SignAware(4), None])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pool": POOL, "relu": False}, ValueError, "pool of type MaxPool: expected None with"),
        (
            {"residual_norm": NORM, "relu": False},
            ValueError,
            "residual_norm of type BatchNorm: expec",
        ),
        (
            {"pool": POOL, "residual_norm": NORM},
            ValueError,
            "pool: expected None with a residual_no",
        ),
        ({"pool": ((2, 2), None, "SAME")}, TypeError, "pool of type tuple: expected a jaxcomp"),
        ({"residual_norm": nnx.relu}, TypeError, "residual_norm of type .*: expected a ja"),
    ],
    ids=["pool", "norm", "both", "tuple", "function"],
)
def test_what_does_not_go_together_is_an_error(options, error, message, codec):
    with without_type_checks(), pytest.raises(error, match=message):
        jc.nn.NormAct(NORM, codec=codec, **options)


def test_a_residuals_norm_without_a_residual_is_an_error():
    for codec in (jc.SignAware(4), None):
        with pytest.raises(ValueError, match="residual=None: expected an array"):
            block(codec)[1](normal((4, 6, 6, 8)))


def test_a_norm_that_has_lost_its_scale_is_an_error():
    module = jc.nn.NormAct(jc.nn.BatchNorm(8, rngs=nnx.Rngs(0)), codec=jc.SignAware(4))
    module.norm.scale = None
    with pytest.raises(ValueError, match="norm with scale=None"):
        module(normal((4, 6, 6, 8)))


def test_norms_that_differ_are_an_error():
    with pytest.raises(ValueError, match=r"residual_norm with .*0\.1.*: expected .*1e-05"):
        block(jc.SignAware(4), epsilon=0.1)
    block(None, epsilon=0.1)


def chain(codec):
    def loss(x):
        y = unit(codec, cin=8)(unit(codec)(x), unit(codec, relu=False)(x))
        pooled = jc.nn.MaxPool((2, 2), (2, 2), codec=jc.Packed(2))(y)
        return (jc.nn.Conv(8, 2, (1, 1), rngs=nnx.Rngs(1))(pooled) ** 2).mean()

    return loss


def test_what_a_chain_of_units_stores_is_codes():
    pull = jax.eval_shape(lambda x: jax.vjp(chain(jc.SignAware(4)), x)[1], X)
    maps = [leaf for leaf in jax.tree.leaves(pull) if leaf.ndim == 4 and leaf.shape[0] == len(X)]
    codes = [leaf.shape for leaf in maps if leaf.dtype == jnp.uint4]
    # Of the first, of the shortcut's norm and of the second's, and of their sum; the pool's indices
    # share elements. The pooled map's is for a kernel's gradient, which is not asked for.
    assert sorted(codes) == sorted([(4, 6, 6, 8)] * 4 + [(4, 3, 3, 4)])
    floats = {leaf.shape for leaf in maps if jnp.issubdtype(leaf.dtype, jnp.floating)}
    assert floats <= {X.shape, (4, 3, 3, 2)}  # the input, and the loss's own argument


def test_gradients_of_a_chain_are_near_the_exact_ones():
    coded, exact = (jax.jit(jax.grad(chain(codec)))(X) for codec in (jc.SignAware(4), None))
    error = jnp.linalg.norm(coded - exact) / jnp.linalg.norm(exact)
    assert 0 < error < 0.3


def test_a_convolution_of_a_value_without_code_stores_by_its_own_codec():
    conv = jc.nn.Conv(8, 2, (1, 1), rngs=nnx.Rngs(0), codec=jc.Quantize(bits=2))
    shortcut = unit(jc.SignAware(4), relu=False)(X)
    assert shortcut.code is None
    assert_close(conv(shortcut), conv(shortcut.value))


@pytest.mark.parametrize(
    "options", [{"use_scale": False}, {"use_bias": False}, {"axis": 1}], ids=str
)
def test_a_norm_that_it_cannot_serve_is_an_error(options):
    with pytest.raises(ValueError, match="expected a norm with scale and bias, and axis=-1"):
        unit(jc.SignAware(4), **options)


def test_another_codec_is_an_error():
    with without_type_checks(), pytest.raises(ValueError, match="not norm_act"):
        unit(jc.Quantize(bits=2))


def test_a_unit_with_a_codec_covers_its_norm_and_relu():
    model = nnx.Sequential(unit())
    jc.compress(model, jc.recipes.fused(bits=2) + jc.recipes.everywhere(jc.Quantize(bits=2)))
    layer = model.layers[0]
    assert (layer.codec, layer.conv.codec) == (jc.SignAware(bits=2), jc.Quantize(bits=2))
    assert layer.norm.codec is layer.relu.codec is None
    norms = jc.Policy((jc.Rule(jc.Quantize(bits=2), op="batch_norm"),))
    with pytest.raises(ValueError, match="matches nothing"):
        jc.compress(nnx.Sequential(unit()), jc.recipes.fused(bits=2) + norms)
