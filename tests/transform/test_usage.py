"""What users' models and losses do besides computing: state, arguments, methods, parts."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import jaxcomp as jc
from jaxcomp.planning import Strategy
from jaxcomp.policies import Policy, Rule
from tests.helpers import assert_close, assert_same_bits, distance, normal, only, slow

X = normal((64, 16))
KEEP = only("keep", required=False)


def linear(size, seed=0):
    return nnx.Linear(16, size, rngs=nnx.Rngs(seed))


class Router(nnx.Module):
    """Its loss has a part that the call leaves in a variable, as of a mixture of experts."""

    def __init__(self):
        self.router, self.linear = linear(4), linear(4, 1)
        self.balance = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.balance[...] = jnp.square(jax.nn.softmax(self.router(x)).mean(0)).sum()
        return jnp.tanh(self.linear(x))


class Recurrent(nnx.Module):
    def __init__(self):
        self.cell = linear(16)
        self.state = nnx.Variable(jnp.zeros((64, 16)))

    def __call__(self, x):
        self.state[...] = jnp.tanh(self.cell(x + self.state[...]))
        return self.state[...]


@pytest.mark.parametrize("policy", [KEEP, slow(jc.Exact()), only(jc.Quantize(8))])
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (Router, lambda model: model(X).sum() + model.balance[...]),
        (Recurrent, lambda model: sum(jnp.sum(model(X + i) ** 2) for i in range(3))),
    ],
)
def test_a_loss_may_read_what_a_call_wrote(make, loss, policy):
    ours, stock = (
        jax.tree.leaves(nnx.jit(nnx.grad(loss))(model))
        for model in (jc.compress(make(), policy), make())
    )
    assert_close(ours, stock, 0.02 if policy == only(jc.Quantize(8)) else 1e-5)


def test_a_call_may_write_parameters():
    def make():
        return nnx.SpectralNorm(linear(5), rngs=nnx.Rngs(1))

    ours, stock = jc.compress(make(), KEEP), make()
    call = nnx.jit(lambda model: model(X, update_stats=True))
    assert_close(call(ours), call(stock))
    assert_close(nnx.state(ours, nnx.Param), nnx.state(stock, nnx.Param))


class Options(nnx.Module):
    def __init__(self):
        self.linear, self.dropout = linear(16), nnx.Dropout(0.5)

    def __call__(self, x, dtype=jnp.float32, rngs=None):
        return self.dropout(self.linear(x), rngs=rngs, deterministic=rngs is None).astype(dtype)


def test_a_dtype_and_a_stream_of_numbers_are_arguments():
    ours, stock = jc.compress(Options(), KEEP), Options()
    call = nnx.jit(lambda model: model(X, dtype=jnp.float16))
    assert_same_bits(call(ours), call(stock))
    rngs, same = nnx.Rngs(3), nnx.Rngs(3)
    assert_same_bits(ours(X, rngs=rngs), stock(X, rngs=same))
    assert_same_bits(*(jax.random.key_data(stream()) for stream in (rngs, same)))


def test_a_module_that_updates_its_state_in_a_function_is_refused():
    norm, dropout = nnx.BatchNorm(16, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    call = jc.checkpoint(lambda module, x: module(x), KEEP)
    with pytest.raises(ValueError, match=r"changes its argument \(.*mean.*has no effect outside"):
        call(norm, X)
    with pytest.raises(ValueError, match=r"changes its argument .*count"):
        call(dropout, X)
    norm.eval(), dropout.eval()
    assert_same_bits(call(norm, X), norm(X))
    assert_same_bits(call(dropout, X), X)


def test_checkpoint_decorates_a_method():
    class Plain:
        scale = 2.0

        @functools.partial(jc.checkpoint, policy=KEEP, static_argnums=0)
        def __call__(self, x):
            return jnp.sin(self.scale * x)

    assert_close(jax.grad(lambda x: Plain()(x).sum())(X), 2 * jnp.cos(2 * X))


def test_codecs_of_units_are_not_for_values():
    with pytest.raises(ValueError, match=r"only for layers of jaxcomp\.nn of the kinds norm_act"):
        jc.checkpoint(lambda x, w: jnp.sin(x @ w), only(jc.SignAware(4))).plan(X, X.T)
    notes = jc.checkpoint(lambda x, w: jnp.sin(x @ w), jc.Cast("bfloat16")).plan(X, X.T).notes
    assert "biased: Cast(dtype='bfloat16') is a biased codec" in notes


def test_the_plan_of_a_model_with_a_compressed_part():
    def make(policy=None):
        body = nnx.Sequential(linear(16), jnp.sin, linear(16, 1), jnp.sin)
        return nnx.Sequential(body if policy is None else jc.compress(body, policy), linear(2))

    stock, ours = jc.plan(make(), X), jc.plan(make(only(jc.Quantize(2))), X)
    assert ours.exact_bytes == stock.exact_bytes
    assert ours.saved_bytes < 0.7 * stock.saved_bytes
    decisions = {v.decision for v in ours.values if v.path.startswith("layers/0") and v.saved_bytes}
    assert decisions == {"by the policy of a part"}


def test_blocks_with_encoded_inputs_hand_back_what_they_write():
    def gradient(spec):
        model = Strategy.parse(spec)(nnx.Sequential(Router()))
        loss = nnx.grad(lambda model: model(X).sum() + model.layers[0].balance[...])
        return jax.tree.leaves(nnx.jit(loss)(model))

    assert_close(gradient("boundary:quantize:bits=8"), gradient("plain"), 0.05)


class Talkative(nnx.Module):
    """Returns more than arrays, and sets its attributes in its call."""

    def __init__(self, to_set=None):
        self.linear, self.calls, self.to_set = linear(16), 0, to_set
        self.seen = nnx.List([])

    def __call__(self, x):
        self.calls += 1
        self.seen.append(x.shape)
        self.first = nnx.Variable(x[0])
        y = jnp.tanh(self.linear(x)).sum()
        if self.to_set is not None:
            self.linear.found = self.to_set(y)
        return y, {"name": "talkative", "size": 16, "none": None, "scale": 0.5}


def test_a_call_may_set_attributes_and_return_no_arrays():
    def loss(model):
        y, others = model(X)
        results.append(others)
        return y

    results = []
    for model in (Talkative(), jc.compress(Talkative(), KEEP)):
        nnx.jit(nnx.grad(loss))(model)
        nnx.grad(loss)(model)
        assert model.calls == 2 and list(model.seen) == [X.shape] * 2
        assert_same_bits(model.first[...], X[0])
    assert results[:2] == results[2:]
    for value, kind in ((lambda y: y, "array"), (lambda y: nnx.data(linear(2)), "Linear")):
        with pytest.raises(TypeError, match=f"linear/found: .* to a new {kind}; expected"):
            jc.compress(Talkative(value), KEEP)(X)


class Bridged(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.BatchNorm(use_running_average=False)(linen.Dense(16, use_bias=False)(x))
        return linen.Dense(1)(jnp.tanh(x))


def test_a_linen_module_may_be_bridged():
    @nnx.jit
    def gradient(model, x):
        return nnx.grad(lambda model: jnp.sum(model(x, mutable=["batch_stats"])))(model)

    stock = nnx.bridge.ToNNX(Bridged(), rngs=nnx.Rngs(0)).lazy_init(X)
    ours = jc.compress(nnx.clone(stock), jc.Exact())
    assert_close(jax.tree.leaves(gradient(ours, X)), jax.tree.leaves(gradient(stock, X)))
    means, ours_means = (jax.tree.leaves(nnx.state(m, nnx.BatchStat)) for m in (stock, ours))
    assert_close(ours_means, means)


def test_a_function_under_vmap_has_no_gradient_of_each_example():
    def network(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    weights = [normal((128, 128), seed=i) / 8 for i in range(3)]
    xs = normal((256, 128), seed=9)

    def temp_and_gradient(batched):
        def loss(weights, xs):
            return jnp.square(batched(weights, xs)).sum()

        step = jax.jit(jax.grad(loss), compiler_options=jc.memory.compiler_options())
        return jc.memory.analyze(step, weights, xs, target="cpu").temp_bytes, step(weights, xs)

    def over_examples(function):
        return jax.vmap(function, (None, 0))

    exact, expected = temp_and_gradient(over_examples(network))
    temp, found = temp_and_gradient(over_examples(jc.checkpoint(network)))
    one_of_each = 256 * weights[0].nbytes
    assert temp < exact + one_of_each / 2
    for ours, stock in zip(found, expected, strict=True):
        assert_close(ours, stock, 0.05 * float(jnp.abs(stock).max()))


class _Rematerialised(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([linear(16), linear(16)])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.remat(lambda layer, x: x + nnx.remat(jnp.tanh)(layer(x)))(layer, x)
        return x


class _Scanned(nnx.Module):
    def __init__(self):
        made = nnx.vmap(lambda rngs: nnx.Linear(16, 16, rngs=rngs))
        self.layers = made(nnx.Rngs(0).split(2))

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def apply(layer, x):
            return nnx.remat(lambda layer, x: x + jnp.tanh(layer(x)))(layer, x)

        return apply(self.layers, x)


@pytest.mark.parametrize("module", [_Rematerialised, slow(_Scanned)])
def test_parameters_that_are_passed_on_are_unchanged(module):
    """Flax sets them to the results of regions and loops, which are the same."""
    graphdef, parameters = nnx.split(module())

    def apply(parameters, x):
        return nnx.merge(graphdef, parameters)(x)

    def gradient(fn):
        return jax.jit(jax.grad(lambda p: jnp.square(fn(p, X)).sum()))(parameters)

    exact = gradient(apply)
    assert distance(gradient(jc.checkpoint(apply, jc.Exact())), exact) < 1e-5
    opened = Policy((Rule("open", op="checkpoint"), Rule(jc.Quantize(bits=8))))
    assert 1e-5 < distance(gradient(jc.checkpoint(apply, opened)), exact) < 0.02

    def scale(parameters, x):
        model = nnx.merge(graphdef, parameters)
        layer = model.layers if module is _Scanned else model.layers[0]
        layer.kernel[...] = jax.checkpoint(lambda w: 2 * w)(layer.kernel[...])
        return model(x)

    with pytest.raises(ValueError, match=r"changes its argument \(.*kernel"):
        jc.checkpoint(scale, jc.Exact())(parameters, X)
