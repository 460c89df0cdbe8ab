"""Batch norms, skip connections, ReLUs and max pools of stock models are recognized."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

import jaxcomp as jc
from jaxcomp.codecs import noise
from jaxcomp.models import resnet
from tests.helpers import AS_WRITTEN, error_of_mean, slow
from tests.transform.batch_norms import RANGE, as_users_write, conv

__all__ = ("as_users_write",)


def standard(x, scale, bias):
    """As most people write it, in two passes."""
    wide = x.astype(jnp.float32)
    mean, var = jnp.mean(wide, (0, 1, 2)), jnp.var(wide, (0, 1, 2))
    return ((wide - mean) * lax.rsqrt(var + 1e-5) * scale + bias).astype(x.dtype), mean, var


def divided(x, scale, bias):
    mean = x.mean((0, 1, 2), keepdims=True)
    var = ((x - mean) ** 2).mean((0, 1, 2), keepdims=True)
    return scale * (x - mean) / jnp.sqrt(var + 1e-5) + bias, mean, var


def one_pass(x, scale, bias):
    wide = x.astype(jnp.float32)
    mean = wide.mean((0, 1, 2))
    var = jnp.maximum((wide * wide).mean((0, 1, 2)) - mean * mean, 0)
    y = (wide - mean) * (scale * (1 / jnp.sqrt(var + 1e-5))) + bias
    return y.astype(x.dtype), mean, var


def folded(x, scale, bias):
    """As TensorFlow and Keras write it."""
    wide = x.astype(jnp.float32)
    mean, var = wide.mean((0, 1, 2), keepdims=True), wide.var((0, 1, 2), keepdims=True)
    factor = lax.rsqrt(var + 1e-5) * scale
    return (wide * factor + (-mean * factor + bias)).astype(x.dtype), mean, var


def network(norm, params, x):
    """A stem with a pool, a block with a projected skip connection, and one without."""
    p = iter(params)
    y, *stem = norm(conv(x, next(p)), next(p), next(p))
    y = nnx.max_pool(jax.nn.relu(y), (3, 3), (2, 2), ((1, 1), (1, 1)))
    z, *_ = norm(conv(y, next(p)), next(p), next(p))
    z, *_ = norm(conv(jax.nn.relu(z), next(p)), next(p), next(p))
    skip, *_ = norm(conv(y, next(p)), next(p), next(p))
    y = jax.nn.relu(skip + z)
    z, *_ = norm(conv(y, next(p)), next(p), next(p))
    return jax.nn.relu(z + y).mean((1, 2)), stem


def make_params():
    keys = iter(jax.random.split(jax.random.key(0), 20))
    params = []
    for cin, cout in (3, 8), (8, 8), (8, 16), (8, 16), (16, 16):
        params.append(jax.random.normal(next(keys), (3, 3, cin, cout)) / (3 * cin**0.5))
        params.append(1 + 0.1 * jax.random.normal(next(keys), (cout,)))
        params.append(0.3 * jax.random.normal(next(keys), (cout,)))
    return params


@pytest.mark.parametrize(
    ("norm", "dtype"),
    [
        (standard, jnp.float32),
        slow(standard, jnp.bfloat16),
        (divided, jnp.bfloat16),
        slow(one_pass, jnp.float32),
        (folded, jnp.float32),
        slow(folded, jnp.bfloat16),
    ],
)
def test_plain_functions(norm, dtype):
    params = make_params()
    x = jax.random.normal(jax.random.key(1), (8, 16, 16, 3), dtype)
    target = jax.random.normal(jax.random.key(2), (8, 16))
    stock = functools.partial(network, norm)

    def loss(fn, params):
        y, _ = fn(params, x)
        return ((y - target) ** 2).sum().astype(jnp.float32)

    @jax.jit
    def coded(params, seed):
        fn = jc.checkpoint(stock, RANGE, seed=seed)
        return jax.grad(functools.partial(loss, fn))(params)

    same, expected = (
        jax.jit(f, compiler_options=AS_WRITTEN)(params)
        for f in (
            lambda params: jax.vjp(lambda p: jc.checkpoint(stock, RANGE)(p, x), params)[0],
            lambda params: stock(params, x),
        )
    )
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(one, other)
    gradient = jax.jit(jax.grad(functools.partial(loss, stock)))(params)
    # Unbiased: the mean over seeds is the exact gradient, as far as noise can tell.
    draws = [coded(params, seed) for seed in range(40)]
    for i, one in enumerate(gradient):
        error, chance = error_of_mean([draw[i] for draw in draws], one)
        rounding = 0.02 if dtype == jnp.bfloat16 else 1e-4
        assert error < 2.2 * chance + rounding * np.linalg.norm(one)
    plan = jc.plan(jc.checkpoint(stock, RANGE), params, x)
    assert sum(value.op == "norm_act" for value in plan.values) >= 1
    assert plan.saved_bytes < 0.45 * plan.exact_bytes


@pytest.mark.slow
def test_stock_layers_have_the_gradients_of_ours(monkeypatch):
    """The same codes, whether a policy is for layers or for stock operations."""
    salt = noise.salt
    monkeypatch.setattr(noise, "salt", lambda seed, x, *beside: salt(0, x))  # their seeds differ

    def make():
        options = dict(imagenet=True, num_classes=10, rngs=nnx.Rngs(0))
        return resnet.ResNet(resnet.BasicBlock, (1, 1), 8, **options)

    model, x = make(), jax.random.normal(jax.random.key(1), (8, 32, 32, 3))
    ours = jc.compress(make(), "fused:bits=4")
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def forward(params, rest, x):
        return nnx.merge(graphdef, params, rest, copy=True)(x)

    coded = jc.checkpoint(forward, "fused:bits=4")
    gradient = jax.jit(jax.grad(lambda p: (coded(p, rest, x) ** 2).sum()))(params)
    expected = nnx.jit(nnx.grad(lambda m: (m(x) ** 2).sum()))(ours)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3 * np.abs(other).max())
    plan = jc.plan(coded, params, rest, x)
    units = sum(value.saved_bytes for value in plan.values if value.op == "norm_act")
    layers = [v for v in jc.plan(ours, x).values if v.op == "norm_act"]
    assert units == pytest.approx(sum(value.saved_bytes for value in layers), rel=0.01)


def test_linen():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            norm = functools.partial(linen.BatchNorm, use_running_average=False)
            y = linen.relu(norm()(linen.Conv(8, (3, 3), use_bias=False)(x)))
            y = norm(scale_init=linen.initializers.zeros)(linen.Conv(8, (1, 1))(y))
            skip = norm(name="norm_proj")(linen.Conv(8, (1, 1), name="conv_proj")(x))
            return linen.relu(skip + y).mean((1, 2))

    net = Net()
    x = jax.random.normal(jax.random.key(1), (8, 16, 16, 3))
    variables = net.init(jax.random.key(0), x)

    def forward(params, stats, x):
        return net.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])

    arguments = variables["params"], variables["batch_stats"], x
    coded = jc.checkpoint(forward, "fused:bits=4")
    for one, other in zip(
        jax.tree.leaves(jax.jit(forward)(*arguments)),
        jax.tree.leaves(jax.jit(coded)(*arguments)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    plan = jc.plan(coded, *arguments)
    units = [value for value in plan.values if value.op == "norm_act"]
    assert sum(u.saved_bytes for u in units) < sum(u.exact_bytes for u in units) / 5


def almost(x, scale, bias, *, axes=(0, 1, 2), ddof=0, root=lax.rsqrt):
    mean = x.mean(axes, keepdims=True)
    var = x.var(axes, ddof=ddof, keepdims=True)
    return (x - mean) * root(var + 1e-5) * scale + bias


def shifted(shift, x, scale, bias):
    """Returns a ReLU of `x * factor + shift(...)`."""
    mean, var = x.mean((0, 1, 2), keepdims=True), x.var((0, 1, 2), keepdims=True)
    factor = lax.rsqrt(var + 1e-5) * scale
    return jax.nn.relu(x * factor + shift(x, mean, factor, bias))


@pytest.mark.parametrize(
    ("shift", "recognized"),
    [
        (lambda x, mean, factor, bias: bias - mean * factor, True),
        (lambda x, mean, factor, bias: bias - factor * mean, True),
        (lambda x, mean, factor, bias: bias + -(mean * factor), True),
        (lambda x, mean, factor, bias: -mean * factor, True),
        (lambda x, mean, factor, bias: -(factor * mean), True),
        (lambda x, mean, factor, bias: bias + mean * factor, False),
        (lambda x, mean, factor, bias: mean * factor - bias, False),
        (lambda x, mean, factor, bias: bias - mean, False),
        (lambda x, mean, factor, bias: bias - mean * factor * factor, False),
        (lambda x, mean, factor, bias: bias - jnp.square(x).mean((0, 1, 2)) * factor, False),
        (lambda x, mean, factor, bias: bias - x.mean((1, 2), keepdims=True) * factor, False),
    ],
)
def test_a_mean_may_be_subtracted_from_the_bias(shift, recognized):
    norm = functools.partial(shifted, shift)
    arguments = jax.random.normal(jax.random.key(1), (8, 16, 16, 16)), *2 * [jnp.full(16, 0.7)]
    coded = jc.checkpoint(norm, "automatic")
    plan = jc.plan(coded, *arguments)
    assert any(value.op == "norm_act" for value in plan.values) == recognized
    np.testing.assert_array_equal(coded(*arguments), norm(*arguments))

    def gradients(fn, argnums):
        def loss(*arguments):
            return (fn(*arguments) * jnp.cos(arguments[0])).mean()

        return jax.grad(loss, argnums)(*arguments)

    for argnums in [(0,), (1,), (2,), (0, 1, 2)]:
        pairs = zip(gradients(norm, argnums), gradients(coded, argnums), strict=True)
        for exact, found in pairs:
            assert np.linalg.norm(found - exact) <= 0.2 * np.linalg.norm(exact)


def test_a_root_may_be_a_power():
    x, ones = jax.random.normal(jax.random.key(1), (8, 8, 8, 8)), jnp.ones(8)

    def f(x, scale, bias):
        return jax.nn.relu(almost(x, scale, bias, root=lambda var: var**-0.5))

    plan = jc.plan(jc.checkpoint(f, "fused:bits=4"), x, ones, ones)
    assert [value.op for value in plan.values if value.saved_bytes > x.size // 4] == ["norm_act"]


@pytest.mark.parametrize(
    "other",
    [
        functools.partial(almost, axes=3),
        functools.partial(almost, ddof=1),
        functools.partial(almost, root=lambda var: var**-0.25),
        lambda x, scale, bias: (x - x.mean((0, 1, 2))) * scale / (1 + x.var((0, 1, 2))) + bias,
        lambda x, scale, bias: (x - x.mean()) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5) * scale + bias,
    ],
)
def test_what_is_no_batch_norm_is_not_taken_for_one(other):
    x = jax.random.normal(jax.random.key(1), (8, 8, 8, 8))
    ones = jnp.ones(8)

    def f(x, scale, bias):
        return jax.nn.relu(other(x, scale, bias)).sum()

    with pytest.raises(ValueError, match="matches nothing"):
        jax.grad(jc.checkpoint(f, "fused:bits=4"))(x, ones, ones)


def test_a_maximum_is_no_relu():
    """At 0, `jnp.maximum` has half of the gradient: it stays outside of the unit."""
    x = jax.random.normal(jax.random.key(1), (8, 8, 8, 8))
    zeros = jnp.zeros(8)

    def f(x, bias):
        return jnp.maximum(standard(x, zeros, bias)[0], 0).sum()

    gradient = jax.jit(jax.grad(jc.checkpoint(f, "fused:bits=4"), 1))(x, zeros)
    np.testing.assert_allclose(gradient, jax.jit(jax.grad(f, 1))(x, zeros))
    assert float(gradient[0]) == 256


@pytest.mark.parametrize("spec", ["quantize:bits=4", "pooling:window=2", "fused:bits=4"])
def test_the_max_pool_after_a_norm_without_a_code_saves_packed_indices(spec):
    """Before, the pool belonged to the norm, and the result of the ReLU was kept exactly."""

    class Stem(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.conv, self.norm = nnx.Conv(3, 16, (3, 3), rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
            self.next = nnx.Conv(16, 16, (3, 3), rngs=rngs)

        def __call__(self, x):
            h = jax.nn.relu(self.norm(self.conv(x)))
            return self.next(nnx.max_pool(h, (3, 3), (2, 2), [(1, 1), (1, 1)]))

    plan = jc.plan(jc.compress(Stem(), spec), jnp.ones((8, 32, 32, 3)))
    ops = [value.op for value in plan.values if value.op]
    assert ("max_pool" in ops) == (spec != "fused:bits=4")
    assert ("norm_act" in ops) == (spec == "fused:bits=4")
    if spec == "quantize:bits=4":
        assert plan.saved_bytes < 0.1 * plan.exact_bytes


def test_max_pool_alone_saves_packed_indices():
    x = jax.random.normal(jax.random.key(1), (4, 16, 16, 8))
    policy = jc.Policy((jc.Rule(jc.Packed(4), op="max_pool"),))

    def f(x):
        return jnp.sin(nnx.max_pool(jnp.sin(x), (3, 3), (2, 2), "SAME")).sum()

    coded = jc.checkpoint(f, policy)
    np.testing.assert_allclose(jax.jit(jax.grad(coded))(x), jax.jit(jax.grad(f))(x), rtol=1e-6)
    pooled = [value for value in jc.plan(coded, x).values if value.op == "max_pool"]
    assert sum(value.saved_bytes for value in pooled) == 4 * 8 * 8 * 8 // 2


@pytest.mark.parametrize(("rows", "recognized"), [(16, True), (17, False)])
def test_an_index_in_a_window_has_at_most_8_bits(rows, recognized):
    x = jax.ShapeDtypeStruct((2, 34, 32, 8), jnp.float32)
    rule = jc.Rule(jc.Packed(8), op="max_pool", required=False)

    def f(x):
        return nnx.max_pool(jnp.sin(x), (rows, 16), (rows, 16)).sum()

    plan = jc.plan(jc.checkpoint(f, jc.Policy((rule,))), x)
    assert ("max_pool" in {value.op for value in plan.values}) == recognized


def test_side_effects_beside_a_norm_stay():
    seen = []

    def f(x):
        jax.debug.callback(seen.append, x.sum())
        return jax.nn.relu(standard(x, jnp.ones(4), jnp.zeros(4))[0]).sum()

    jax.block_until_ready(jax.grad(jc.checkpoint(f, "fused:bits=4"))(feature_map()))
    jax.effects_barrier()
    assert seen == [feature_map().sum()]


def feature_map(seed=1):
    return 0.3 + jax.random.normal(jax.random.key(seed), (4, 4, 4, 4))


def test_a_unit_that_reads_what_follows_from_its_results_stays_as_it_is():
    x, one, zero = feature_map(), jnp.ones(4), jnp.zeros(4)
    automatic = jc.recipes.automatic()

    def by_variance(x):
        y, _, var = one_pass(x, one, zero)
        return jax.nn.relu(y + x * var).sum()

    def crossed(x):
        both = x, jnp.sin(x)
        (_, mean, var), (_, other_mean, other_var) = (one_pass(a, one, zero) for a in both)
        first = (both[0] - mean) * lax.rsqrt(var + 1e-5) * other_var + other_mean
        second = (both[1] - other_mean) * lax.rsqrt(other_var + 1e-5) * var + mean
        return (first**2 + second**3).sum()

    found = jax.jit(jax.grad(jc.checkpoint(by_variance, automatic)))(x)
    np.testing.assert_allclose(found, jax.jit(jax.grad(by_variance))(x), rtol=1e-4, atol=1e-5)
    assert jax.jit(jax.grad(jc.checkpoint(crossed, automatic)))(x).shape == x.shape


def test_a_rounded_input_has_no_gradient():
    x, one, zero = feature_map(), jnp.ones(4), jnp.zeros(4)

    def f(x):
        return (standard((10 * x).astype(jnp.int32).astype(jnp.float32), one, zero)[0] ** 3).sum()

    assert not jax.jit(jax.grad(jc.checkpoint(f, jc.recipes.automatic())))(x).any()


def test_a_variance_about_other_means_is_none():
    """All axes have one size: the means are subtracted along another axis than the features."""
    x, weight = feature_map(), feature_map(2)

    def f(x):
        mean = x.mean((0, 1, 2))
        var = ((x - mean[:, None]) ** 2).mean((0, 1, 2))
        return (weight * (x - mean) * lax.rsqrt(var + 1e-5)).sum()

    found = jax.jit(jax.grad(jc.checkpoint(f, jc.recipes.automatic())))(x)
    np.testing.assert_allclose(found, jax.jit(jax.grad(f))(x), rtol=1e-4, atol=1e-5)


def test_float64_has_gradients_of_float64():
    """`norm_act` computes in float32."""

    def fn(x, scale, bias):
        y = divided(x, scale, bias)[0]
        return jnp.sum(jax.nn.relu(y) ** 3)

    with jax.enable_x64():
        x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4, 4, 16)))
        args = x, jnp.ones(16), jnp.zeros(16)
        assert not any(value.op for value in jc.plan(jc.checkpoint(fn), *args).values)
        found, expected = (jax.jit(jax.grad(f, (0, 1, 2)))(*args) for f in (jc.checkpoint(fn), fn))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * np.abs(other).max())


def rounded(x, scale, bias):
    """No gradient passes the mean."""
    mean = x.sum((0, 1, 2)).astype(jnp.int32).astype(jnp.float32) / x[..., 0].size
    var = jnp.square(x - mean).mean((0, 1, 2))
    return (x - mean) * lax.rsqrt(var + 1e-5) * scale + bias


def with_late_bias(x, scale, bias):
    """The bias comes after a cast."""
    y = (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5) * scale
    return y.astype(jnp.bfloat16) + bias.astype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("fn", "features", "error"),
    [
        (lambda *args: lax.top_k(jax.nn.relu(divided(*args)[0]), 2)[0], 4, 0.3),
        (lambda *args: jnp.split(jax.nn.relu(divided(*args)[0]), 2, -1)[1], 4, 0.3),
        (lambda *args: jax.nn.relu(divided(*args)[0]), 0, 0),
        (lambda *args: jax.nn.relu(divided(*args)[0] + 1.0), 4, 0.3),
        (lambda *args: jax.nn.relu(with_late_bias(*args)), 4, 0.3),
        (rounded, 4, 1e-5),
    ],
)
def test_what_follows_and_goes_before_a_norm(fn, features, error):
    x = 1 + jax.random.normal(jax.random.key(1), (8, 8, 8, features))
    args = x, jnp.ones(features), jnp.zeros(features)

    def gradient(fn):
        return jax.jit(jax.grad(lambda x: jnp.sin(fn(x, *args[1:])).sum()))(x)

    ranges = jc.SignAware(4, scale_source="range")  # a single draw of it is near enough
    policy = jc.Policy((jc.Rule(ranges, op="norm_act", required=False),)) + jc.recipes.automatic()
    found, exact = gradient(jc.checkpoint(fn, policy)), gradient(fn)
    assert found.shape == exact.shape
    assert np.linalg.norm(found - exact) <= error * np.linalg.norm(exact)


@pytest.mark.parametrize("equation", ["nc,cd->nd", "cd,nc->dn"])
def test_a_linear_layer_reads_the_code_of_the_norm(equation):
    def hidden(params, x):
        w, scale, bias, last = params
        y = x @ w
        y = (y - y.mean(0)) * lax.rsqrt(y.var(0) + 1e-5) * scale + bias
        operands = (jax.nn.relu(y), last) if equation.startswith("n") else (last, jax.nn.relu(y))
        return jnp.einsum(equation, *operands)

    keys = jax.random.split(jax.random.key(0), 4)
    params = [
        jax.random.normal(keys[0], (64, 64)) / 8,
        jnp.full(64, 1.2),
        jnp.full(64, 0.3),
        jax.random.normal(keys[1], (64, 32)) / 8,
    ]
    x = jax.random.normal(keys[2], (512, 64))
    target = jax.random.normal(keys[3], hidden(params, x).shape)

    def loss(fn, params):
        return ((fn(params, x) - target) ** 2).sum()

    @jax.jit
    def draws(params):
        def one(seed):
            coded = jc.checkpoint(hidden, "automatic", seed=seed)
            return jax.grad(functools.partial(loss, coded))(params)

        return lax.map(one, jnp.arange(30))

    coded = jc.checkpoint(hidden, "automatic")
    assert jc.plan(coded, params, x).saved_bytes < 1.05 * 512 * 64 / 2 + 4096  # one code
    gradient = jax.jit(jax.grad(functools.partial(loss, hidden)))(params)
    for one, found in zip(gradient, draws(params), strict=True):
        error, chance = error_of_mean(list(found), one)
        assert error < 2 * chance + 1e-3 * np.linalg.norm(one)
    np.testing.assert_array_equal(jax.jit(coded)(params, x), jax.jit(hidden)(params, x))
