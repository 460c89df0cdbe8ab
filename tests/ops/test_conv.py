import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

from jaxcomp import AvgPool, Exact, Quantize, SignAware, memory, ops
from jaxcomp.codecs._codec import array_nbytes
from tests.helpers import (
    assert_close,
    assert_same_bits,
    assert_unbiased,
    check_bilinear,
    collectives,
    normal,
    replicate,
    shard,
    slow,
    stored_shapes,
    without_type_checks,
)

NHWC = ("NHWC", "HWIO", "NHWC")
NCHW = ("NCHW", "OIHW", "NCHW")


def conv(x, w, codec=None, seed=None):
    return ops.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=NHWC, codec=codec, seed=seed
    )


# lhs shape, rhs shape, layout, strides, padding, further arguments
CASES = {
    "same": ((4, 6, 5, 3), (3, 3, 3, 4), NHWC, (1, 1), "SAME", {}),
    "valid, strides": ((4, 7, 6, 3), (3, 2, 3, 4), NHWC, (2, 1), "VALID", {}),
    "explicit padding": ((4, 6, 5, 3), (3, 3, 3, 4), NHWC, (2, 2), ((0, 2), (-1, 3)), {}),
    "lhs dilation": (
        (4, 5, 4, 3),
        (3, 3, 3, 4),
        NHWC,
        (1, 1),
        ((1, 1), (2, 2)),
        {"lhs_dilation": (2, 1)},
    ),
    "rhs dilation": ((4, 8, 7, 3), (3, 3, 3, 4), NHWC, (1, 1), "SAME", {"rhs_dilation": (2, 3)}),
    "groups": ((4, 5, 5, 6), (3, 3, 2, 9), NHWC, (1, 1), "SAME", {"feature_group_count": 3}),
    "batch groups": ((4, 5, 5, 3), (3, 3, 3, 6), NHWC, (1, 1), "SAME", {"batch_group_count": 2}),
    "channels first": ((4, 3, 6, 5), (4, 3, 3, 3), NCHW, (2, 1), "SAME", {}),
    "odd layout": ((6, 4, 3, 5), (3, 3, 3, 4), ("HNCW", "HWIO", "NHWC"), (1, 1), "SAME", {}),
    "1d": ((4, 9, 3), (3, 3, 4), ("NWC", "WIO", "NWC"), (2,), "SAME", {}),
    "3d": ((2, 4, 5, 3, 2), (2, 3, 2, 2, 3), ("NDHWC", "DHWIO", "NDHWC"), (1, 2, 1), "VALID", {}),
    "default layout": ((4, 3, 6, 5), (4, 3, 3, 3), None, (1, 1), "SAME", {}),
    "precision": ((4, 6, 5, 3), (3, 3, 3, 4), NHWC, (1, 1), "SAME", {"precision": "highest"}),
}

SELDOM = ("same", "explicit padding", "default layout", "precision")  # as others


def channels_last(layout):
    """The axes of the input in the order batch, spatial, channels."""
    spec = layout[0] if layout else "NCHW"
    spatial = [i for i, letter in enumerate(spec) if letter not in "NC"]
    return (spec.index("N"), *spatial, spec.index("C"))


@pytest.mark.parametrize(
    ("case", "dtype", "codec"),
    [
        *((case, jnp.float32, Quantize(2)) for case in CASES if case not in SELDOM),
        *(slow(case, jnp.float32, Quantize(2)) for case in SELDOM),
        *((case, jnp.float32, AvgPool(2)) for case in ("same", "channels first")),
        ("groups", jnp.bfloat16, Quantize(2)),
        slow("groups", jnp.float16, Quantize(2)),
    ],
)
def test_forward_is_stock_and_backward_is_stock_at_the_decoded_lhs(case, dtype, codec):
    lhs_shape, rhs_shape, layout, strides, padding, kwargs = CASES[case]
    kwargs = {
        "window_strides": strides,
        "padding": padding,
        "dimension_numbers": layout,
        **kwargs,
    }
    lhs, rhs = normal(lhs_shape, dtype), normal(rhs_shape, dtype, 1)
    axes = channels_last(layout)

    @jax.jit
    def decode(x):
        decoded = codec.decode(codec.encode(x.transpose(axes), 7))
        return jnp.moveaxis(decoded, range(x.ndim), axes)

    op = functools.partial(ops.conv_general_dilated, **kwargs, codec=codec, seed=7)
    stock = functools.partial(lax.conv_general_dilated, **kwargs)
    check_bilinear(op, stock, lhs, rhs, decode(lhs))


POINTWISE = {
    "stride 1": ((4, 7, 6, 3), (1, 1, 3, 5), NHWC, (1, 1), "SAME", {}),
    "2d": ((4, 7, 6, 3), (1, 1, 3, 5), NHWC, (2, 3), "SAME", {}),
    "channels first": ((4, 3, 6, 5), (5, 3, 1, 1), NCHW, (2, 1), ((0, 0), (0, 0)), {}),
    "1d": ((4, 9, 3), (1, 3, 4), ("NWC", "WIO", "NWC"), (2,), "VALID", {}),
    "groups": ((4, 5, 5, 6), (1, 1, 2, 9), NHWC, (2, 2), "SAME", {"feature_group_count": 3}),
    "as Flax": ((4, 6, 5, 3), (1, 1, 3, 4), NHWC, (2, 2), "SAME", {"lhs_dilation": (1, 1)}),
}


@pytest.mark.parametrize(
    ("case", "codec"),
    [
        *((case, Quantize(2)) for case in POINTWISE),
        ("2d", AvgPool(2)),
        *(slow(case, AvgPool(2)) for case in POINTWISE if case != "2d"),
    ],
)
def test_pointwise_convolutions_store_what_they_read(case, codec):
    lhs_shape, rhs_shape, layout, strides, padding, kwargs = POINTWISE[case]
    kwargs |= {"window_strides": strides, "padding": padding, "dimension_numbers": layout}
    lhs, rhs = normal(lhs_shape), normal(rhs_shape, seed=1)
    axes = channels_last(layout)
    strided = (slice(None), *(slice(None, None, stride) for stride in strides))

    @jax.jit
    def decode(x):
        x = x.transpose(axes)
        code = codec.encode(x[strided], 7)
        return jnp.moveaxis(x.at[strided].set(codec.decode(code)), range(x.ndim), axes)

    op = functools.partial(ops.conv_general_dilated, **kwargs, codec=codec, seed=7)
    check_bilinear(op, functools.partial(lax.conv_general_dilated, **kwargs), lhs, rhs, decode(lhs))
    read = tuple(-(-lhs.shape[axes[i + 1]] // stride) for i, stride in enumerate(strides))
    nbytes = codec.nbytes((lhs.shape[0], *read, lhs.shape[axes[-1]]), lhs.dtype)
    stored = sum(array_nbytes(*leaf) for leaf in stored_shapes(op, lhs, rhs))
    assert stored == nbytes + rhs.nbytes


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_strided_pointwise_convolutions_decode_what_they_read(bits):
    x, w = normal((4, 7, 6, 5)), normal((1, 1, 5, 3), seed=1)
    activation, *_ = jax.jit(functools.partial(ops.norm_act, codec=SignAware(bits)))(
        x, jnp.ones(5), jnp.zeros(5)
    )
    decoded = activation.codec.decode(activation.code)

    def pull(conv, lhs):
        def run(lhs, w):
            out, pull = jax.vjp(lambda w: conv(lhs, w, (2, 2), "VALID", dimension_numbers=NHWC), w)
            return pull(normal(out.shape, seed=2))

        return jax.jit(run)(lhs, w)

    of_code = pull(ops.conv_general_dilated, activation)
    assert_close(of_code, pull(lax.conv_general_dilated, decoded))


X, W = normal((16, 6, 5, 3)), normal((3, 3, 3, 4), seed=1)


def gradient(codec, seed=None):
    return jax.grad(lambda x, w: jnp.sin(conv(x, w, codec, seed)).sum(), (0, 1))


def test_exact_codec_gives_the_stock_gradient():
    assert_close(jax.jit(gradient(Exact()))(X, W), jax.jit(gradient(None))(X, W), 1e-6)


def test_gradient_is_unbiased_over_seeds():
    x = X[:2]
    seeds = jnp.arange(1000)
    draws = jax.jit(lambda s: lax.map(lambda s: gradient(Quantize(1), s)(x, W)[1], s))(seeds)
    assert_unbiased(draws, jax.jit(gradient(None))(x, W)[1])


def test_pooled_pointwise_convolution_loses_what_varies_inside_the_windows():
    """The gradient of a pointwise kernel is that of pooled input and pooled cotangent."""
    x, w = normal((2, 4, 6, 3)), normal((1, 1, 3, 4), seed=1)
    dy = normal((2, 4, 6, 4), seed=2)
    dw = jax.jit(lambda w: jax.vjp(lambda w: conv(x, w, AvgPool(2)), w)[1](dy)[0])(w)

    def windows(a):
        return a.reshape(2, 2, 2, 3, 2, -1)

    expected = jnp.einsum("bhwi,bhwo->io", windows(x).mean((2, 4)), windows(dy).sum((2, 4)))
    assert_close(dw[0, 0], expected)


@pytest.mark.parametrize("window", [2, 4])
def test_pooled_pointwise_convolution_multiplies_means(window):
    x, w, dy = normal((8, 16, 16, 32)), normal((1, 1, 32, 48)), normal((8, 16, 16, 48))

    def flops(codec):
        def gradient(x, w, dy):
            return jax.vjp(lambda w: conv(x, w, codec), w)[1](dy)[0]

        return memory.analyze(gradient, x, w, dy).flops

    whole = 2 * 8 * 16 * 16 * 32 * 48  # of the product at the decoded input
    assert flops(Quantize(8)) - flops(AvgPool(window)) == whole * (1 - window**-2)


def test_vmap_of_grad_equals_a_loop():
    x = X[:4].reshape(2, 2, 6, 5, 3)
    batched = jax.jit(jax.vmap(gradient(Quantize(2)), (0, None)))(x, W)
    for i in range(2):
        expected = jax.jit(gradient(Quantize(2)))(x[i], W)
        assert_close(jax.tree.map(lambda g, i=i: g[i], batched), expected)


def test_stores_the_code_and_the_weights():
    code = [((16, 6, 5, 3), "uint4"), ((16, 1, 1, 3), "float32"), ((16, 1, 1, 3), "float32")]
    stored = stored_shapes(lambda x, w: conv(x, w, Quantize(4)), X, W)
    assert stored == sorted([*code, (W.shape, "float32")])
    stored = stored_shapes(lambda x, w: conv(x, w, AvgPool(2)), X, W)
    assert stored == sorted([((16, 3, 3, 3), "float32"), (W.shape, "float32")])


@pytest.mark.parametrize("codec", [Quantize(3), AvgPool(2)], ids=str)
def test_eight_devices_give_the_gradient_of_one(codec):
    x, w = shard(X), replicate(W)
    one, eight = (jax.jit(gradient(codec))(*args) for args in [(X, W), (x, w)])
    assert_close(eight, one)
    assert collectives(lambda x, w: gradient(codec)(x, w)[0], x, w) == set()
    assert collectives(lambda x, w: gradient(codec)(x, w)[1], x, w) == {"all-reduce"}


def test_injected_in_flax():
    def layer(**kwargs):
        return nnx.Conv(3, 4, (3, 3), strides=2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **kwargs)

    op = functools.partial(ops.conv_general_dilated, codec=Quantize(2))
    ours, stock = layer(conv_general_dilated=op), layer()
    call = nnx.jit(lambda layer, x: layer(x))
    assert_same_bits(call(ours, X), call(stock, X))


def test_window_larger_than_the_map_is_an_error_at_the_call():
    with pytest.raises(ValueError, match="window=8 is larger than the map"):
        conv(X, W, AvgPool(8))


def test_integers_are_an_error():
    with without_type_checks(), pytest.raises(TypeError, match="got x of dtype int32"):
        conv(X.astype(jnp.int32), W.astype(jnp.int32), Quantize(2))


TRANSPOSED = {
    "1d": ((2, 7, 3), (3, 3, 5), dict(strides=(2,), padding="SAME")),
    "2d": ((2, 6, 5, 3), (3, 3, 3, 5), dict(strides=(2, 1), padding="VALID")),
    "3d": ((2, 4, 3, 4, 2), (2, 2, 2, 2, 3), dict(strides=(2, 2, 2), padding="SAME")),
    "dilated": (
        (2, 6, 5, 3),
        (3, 3, 3, 5),
        dict(strides=(1, 1), padding="SAME", rhs_dilation=(2, 1)),
    ),
    "transposed kernel": (
        (2, 6, 5, 3),
        (3, 3, 5, 3),
        dict(strides=(2, 2), padding=((1, 2), (0, 1)), transpose_kernel=True),
    ),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, jnp.float32) for case in TRANSPOSED),
        ("2d", jnp.bfloat16),
        *(slow(case, jnp.bfloat16) for case in TRANSPOSED if case != "2d"),
    ],
)
def test_conv_transpose(case, dtype):
    shape, kernel, options = TRANSPOSED[case]
    lhs, rhs = normal(shape, dtype), normal(kernel, dtype, 1)
    codec = Quantize(bits=2)
    check_bilinear(
        functools.partial(ops.conv_transpose, codec=codec, seed=1, **options),
        functools.partial(jax.lax.conv_transpose, **options),
        lhs,
        rhs,
        jax.jit(lambda x: codec.decode(codec.encode(x, 1)))(lhs),
    )


def test_a_frozen_kernel_keeps_nothing_of_the_input():
    x, w = normal((4, 6, 6, 3)), normal((3, 3, 3, 5))

    def conv(x, w):
        layout = ("NHWC", "HWIO", "NHWC")
        return ops.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=layout, codec=Quantize(bits=2)
        )

    assert stored_shapes(lambda x: conv(x, w), x) == [(w.shape, "float32")]
    assert any(shape[0] == 4 for shape, _ in stored_shapes(lambda w: conv(x, w), w))
    cotangent = normal((4, 6, 6, 5), seed=2)
    (frozen,) = jax.vjp(lambda x: conv(x, w), x)[1](cotangent)
    assert_same_bits(frozen, jax.vjp(conv, x, w)[1](cotangent)[0])
