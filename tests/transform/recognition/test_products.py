"""Stock convolutions and linear layers with the codecs of rules for them."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import jaxcomp as jc
from jaxcomp import ops
from jaxcomp.policies import Policy, Rule
from tests.helpers import assert_close, assert_same_bits, distance, kept, normal, only, slow

X = normal((4, 8, 8, 16))
ROWS = normal((4, 8, 16))
W = 0.3 * normal((16, 24), seed=1)
NEAREST = jc.Quantize(bits=2, rounding="nearest")
SPARSE = jc.BlockSparse(block=4, density=0.25)


def hidden(x):
    """Values that are not made again."""
    return jnp.sort(x, axis=1)


def _conv(size, strides=1, groups=1):
    w = 0.3 * normal((size, size, 16 // groups, 24), seed=1)

    def fn(w, x, by=lax.conv_general_dilated, hidden=hidden, **options):
        return by(
            hidden(x),
            w,
            (strides, strides),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
            **options,
        )

    return fn, w, X


def _channels_first(w, x, by=lax.conv_general_dilated, **options):
    layout = "NCHW", "OIHW", "NCHW"
    x = hidden(x).transpose(0, 3, 1, 2)
    return by(x, w, (1, 1), "SAME", dimension_numbers=layout, **options)


def _linear(w, x, by=lax.dot_general, **options):
    return by(hidden(x), w, (((2,), (0,)), ((), ())), **options)


def _over_tokens(w, x, by=lax.dot_general, **options):
    return by(hidden(x).swapaxes(1, 2), w, (((2,), (0,)), ((), ())), **options)


# Functions of a kernel and an input, of which the same with an operation of ours is expected.
SAME = {
    "3x3": (*_conv(3), ops.conv_general_dilated),
    "1x1": (*_conv(1), ops.conv_general_dilated),
    "1x1, strides": (*_conv(1, 2), ops.conv_general_dilated),
    "groups": (*_conv(3, groups=4), ops.conv_general_dilated),
    "channels first": (
        _channels_first,
        0.3 * normal((24, 16, 3, 3)),
        X,
        ops.conv_general_dilated,
    ),
    "linear": (_linear, W, ROWS, ops.dot_general),
    "over tokens": (_over_tokens, 0.3 * normal((8, 24)), ROWS, ops.dot_general),
}


CODECS = [NEAREST, jc.AvgPool(2), SPARSE, jc.Cast("float16")]
# Each product, and each codec.
BY_DEFAULT = [(name, NEAREST) for name in SAME if name not in ("3x3", "1x1", "linear")]
BY_DEFAULT += [("3x3", CODECS[1]), ("linear", SPARSE), ("1x1", CODECS[3])]


@pytest.mark.parametrize(
    ("name", "codec"), kept(itertools.product(SAME, CODECS), BY_DEFAULT), ids=str
)
def test_a_stock_product_does_what_the_operation_does(name, codec):
    fn, w, x, operation = SAME[name]
    kind = "dot" if operation is ops.dot_general else "conv"
    if kind not in codec.kinds:
        return
    coded = jc.checkpoint(fn, only(codec, op=kind))

    def gradients(run):
        return jax.jit(jax.grad(lambda w, x: jnp.square(run(w, x)).sum(), (0, 1)))(w, x)

    got = gradients(coded)
    assert_close(got, gradients(lambda w, x: fn(w, x, operation, codec=codec)))
    assert_same_bits(coded(w, x), fn(w, x))
    (row,) = [v for v in jc.plan(coded, w, x).values if v.op == kind]
    assert row.decision == str(codec)
    assert row.saved_bytes < 0.6 * row.exact_bytes


def _other_layouts():
    """Products of which the parameter comes first, has several axes, or is contracted whole."""
    return {
        "kernel first": (lambda w, x: jnp.einsum("fd,bsd->bsf", w, hidden(x)), W.T, ROWS),
        "heads": (
            lambda w, x: jnp.einsum("bsd,dhf->bshf", hidden(x), w),
            0.3 * normal((16, 2, 8)),
            ROWS,
        ),
        "of heads": (
            lambda w, x: jnp.einsum("bshf,hfd->bsd", hidden(x), w),
            0.3 * normal((2, 8, 16)),
            normal((4, 8, 2, 8)),
        ),
        "experts": (
            lambda w, x: jnp.einsum("ebd,edf->ebf", hidden(x), w),
            0.3 * normal((4, 16, 24)),
            ROWS,
        ),
        "bfloat16": (lambda w, x: hidden(x).astype("bfloat16") @ w.astype("bfloat16"), W, ROWS),
    }


@pytest.mark.parametrize("name", _other_layouts())
def test_products_in_other_layouts(name):
    fn, w, x = _other_layouts()[name]
    coded = jc.checkpoint(fn, only(jc.Quantize(bits=8), op="dot"))
    (row,) = [v for v in jc.plan(coded, w, x).values if v.op == "dot"]
    assert row.saved_bytes < 0.7 * row.exact_bytes

    def gradients(run):
        def loss(w, x):
            return jnp.square(run(w, x).astype(jnp.float32)).sum()

        return jax.jit(jax.grad(loss, (0, 1)))(w, x)

    (got, got_x), (exact, exact_x) = gradients(coded), gradients(fn)
    assert_close(got_x, exact_x, rtol=1e-5 if name != "bfloat16" else 2e-2)
    error = jnp.linalg.norm((got - exact).ravel()) / jnp.linalg.norm(exact.ravel())
    assert 1e-5 < error < 0.02


def test_products_that_read_the_same_activation_share_its_code():
    def fn(weights, x):
        x = hidden(x)
        q, k, v = (x @ w for w in weights)
        return jax.nn.softmax(q @ k.mT) @ v

    weights = 0.3 * normal((3, 16, 16))
    coded = jc.checkpoint(fn, only(jc.Quantize(bits=4), op="dot"))
    rows = [v for v in jc.plan(coded, weights, ROWS).values if v.op == "dot"]
    one = jc.Quantize(bits=4).nbytes(ROWS.shape, ROWS.dtype)
    assert sum(row.saved_bytes for row in rows) == one


def test_frozen_kernels_and_the_batch_take_nothing():
    def fn(w, frozen, x):
        return jnp.tanh(x @ w) @ frozen

    coded = jc.checkpoint(fn, only(jc.Quantize(bits=4), op="dot", required=False))
    frozen = normal((24, 8))
    plan = jc.plan(lambda w: coded(w, frozen, ROWS), W)
    assert not [v for v in plan.values if v.op == "dot"]


class Mixed(nnx.Module):
    """A model with layers of Flax and of jaxcomp."""

    def __init__(self, rngs):
        self.first = nnx.Conv(16, 16, (3, 3), rngs=rngs)
        self.stock = nnx.Conv(16, 16, (3, 3), rngs=rngs)
        self.ours = jc.nn.Conv(16, 16, (3, 3), rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        for layer in (self.first, self.stock, self.ours):
            x = jnp.tanh(layer(x))
        return self.head(x.mean((1, 2)))


def test_a_model_with_both_kinds_of_layers_is_compressed_as_a_whole():
    model = jc.compress(Mixed(nnx.Rngs(0)), "pooling:window=2,rest_bits=4")
    assert model.ours.codec == jc.AvgPool(2)
    rows = {v.path: v for v in jc.plan(model, X).values if "AvgPool" in v.decision or not v.role}
    assert rows["stock"].decision == str(jc.AvgPool(2))
    assert rows["ours"].saved_bytes == rows["stock"].saved_bytes == X.nbytes // 4
    stock = Mixed(nnx.Rngs(0))
    assert_same_bits(model(X), stock(X))


@pytest.mark.parametrize(
    "spec",
    [
        "pooling:window=2",
        "pruning:density=0.25,rest_bits=2",
        slow("actnn:level=L1"),
        slow("division"),
    ],
)
def test_the_published_methods_take_stock_models(spec):
    stock = nnx.Sequential(
        nnx.Conv(16, 32, (3, 3), rngs=nnx.Rngs(0)),
        jnp.tanh,
        nnx.Conv(32, 32, (3, 3), rngs=nnx.Rngs(1)),
        jnp.tanh,
        nnx.Linear(32, 8, rngs=nnx.Rngs(2)),
    )
    x = normal((8, 32, 32, 16))
    expected = stock(x)
    model = jc.compress(stock, spec)
    assert_same_bits(model(x), expected)
    plan = jc.plan(model, x)
    assert plan.saved_bytes < 0.8 * plan.exact_bytes


def test_a_codec_that_cannot_store_a_shape():
    def fn(w, x):
        return jnp.sort(x) @ w

    vector = normal((16,))
    with pytest.raises(ValueError, match=r"op='dot'\) matches dot: .*BlockSparse"):
        jc.plan(jc.checkpoint(fn, only(SPARSE, op="dot")), W, vector)
    plan = jc.plan(jc.checkpoint(fn, only(SPARSE, op="dot", required=False)), W, vector)
    assert plan.saved_bytes == plan.exact_bytes


def test_a_rule_passes_over_products_that_do_not_fit():
    """As those of adapters of a low rank."""

    def fn(weights, x):
        return hidden(hidden(x) @ weights["first"]) @ weights["second"]

    weights = {"first": normal((16, 3)), "second": normal((3, 16))}
    plan = jc.plan(jc.checkpoint(fn, only(SPARSE, op="dot")), weights, ROWS)
    (row,) = [value for value in plan.values if value.op == "dot"]
    assert row.exact_bytes == ROWS.nbytes


@pytest.mark.parametrize("kind", ["conv", "dot"])
def test_a_call_of_which_only_the_input_is_differentiated(kind):
    """As of a critic whose parameters are held: its products save nothing, which is no error."""
    fn, w, x, *_ = SAME["3x3" if kind == "conv" else "linear"]
    coded = jc.checkpoint(fn, only(jc.Quantize(bits=4), op=kind))

    def loss(run):
        def of(w, x):
            through = run(lax.stop_gradient(w), jnp.sin(x))
            return jnp.square(through).sum() + jnp.square(run(w, lax.stop_gradient(x))).sum()

        return jax.jit(jax.grad(of, (0, 1)))(w, x)

    (of_w, of_x), (stock_w, stock_x) = loss(coded), loss(fn)
    assert_close(of_x, stock_x)
    assert 1e-4 < jnp.linalg.norm((of_w - stock_w).ravel()) / jnp.linalg.norm(stock_w.ravel()) < 0.2


@pytest.mark.parametrize(
    ("kind", "around"),
    [
        ("conv", jax.checkpoint),
        ("dot", lambda f: f),
        slow("conv", lambda f: f),
        slow("dot", jax.checkpoint),
    ],
    ids=["conv-regions", "dot-loop", "conv-loop", "dot-regions"],
)
def test_products_that_read_what_a_loop_carries(kind, around):
    @around
    def block(x, w):
        product = jnp.tensordot(x, w, 1) if kind == "dot" else _conv(3)[0](w, x, hidden=lambda x: x)
        return x + jnp.sin(product)

    def fn(weights, x):
        return lax.scan(lambda x, w: (block(x, w), None), x, weights)[0]

    shape = (16, 16) if kind == "dot" else (3, 3, 16, 16)
    weights = 0.1 * normal((3, *shape), seed=1)
    opened = Rule("open", op="checkpoint", required=False)
    coded = jc.checkpoint(fn, Policy((opened, Rule(jc.Quantize(bits=8), op=kind))))
    (row,) = [v for v in jc.plan(coded, weights, X).values if v.op == kind]
    assert row.saved_bytes < 0.4 * row.exact_bytes == 0.4 * 3 * X.nbytes
    got, exact = (
        jax.jit(jax.grad(lambda w, f=f: jnp.square(f(w, X)).sum()))(weights) for f in (coded, fn)
    )
    assert 1e-5 < distance(got, exact) < 0.01


def _standardized(w, x):
    axes = tuple(range(w.ndim - 1))
    w = (w - w.mean(axes, keepdims=True)) * lax.rsqrt(w.var(axes, keepdims=True) + 1e-4)
    return _conv(3)[0](w, x) if w.ndim == 4 else jnp.einsum("df,bsd->bsf", w, hidden(x))


@pytest.mark.parametrize("name", [slow("3x3"), "linear"])
def test_kernels_that_are_normalized(name):
    w, x = SAME[name][1:3]
    kind = "conv" if w.ndim == 4 else "dot"
    coded = jc.checkpoint(_standardized, only(jc.Quantize(bits=8), op=kind))
    (row,) = [v for v in jc.plan(coded, w, x).values if v.op == kind]
    assert row.exact_bytes == x.nbytes and row.saved_bytes < 0.5 * x.nbytes
    got, exact = (
        jax.jit(jax.grad(lambda w, f=f: jnp.sin(f(w, x)).sum()))(w) for f in (coded, _standardized)
    )
    assert 1e-5 < distance(got, exact) < 0.02


def test_a_product_of_normalized_arguments_has_no_parameter():
    """As of two embeddings in a contrastive loss."""

    def fn(a, b):
        a, b = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b))
        return a @ b.T

    coded = jc.checkpoint(fn, only(jc.Quantize(bits=8), op="dot", required=False))
    assert not [v for v in jc.plan(coded, X[0, 0], X[0, 1]).values if v.op == "dot"]


def test_outer_products_have_no_features():
    def fn(w, x):
        return jnp.sin(jnp.einsum("bsd,f->bsdf", hidden(x), w))

    coded = jc.checkpoint(fn, only(jc.Quantize(bits=4), op="dot", required=False))
    assert not [v for v in jc.plan(coded, W[0], X[0]).values if v.op == "dot"]
