import hypothesis
import hypothesis.extra.numpy as numpy_strategies
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp.diagnostics._bits import BitPlanner, Needs, plan_bits, sensitivities

WIDTHS = (1, 2, 4, 8)


class Net(nnx.Module):
    def __init__(self, codec):
        rngs = nnx.Rngs(0)
        self.conv = jc.nn.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = jc.nn.BatchNorm(8, rngs=rngs)
        self.relu = jc.nn.ReLU()
        self.conv2 = jc.nn.Conv(8, 8, (1, 1), rngs=rngs)
        self.head = jc.nn.Linear(8, 4, rngs=rngs)
        jc.compress(self, codec)

    def __call__(self, x):
        return self.head(self.conv2(self.relu(self.norm(self.conv(x)))).mean((1, 2)))


def loss(model, batch):
    return (model(batch) ** 2).mean()


def images(size):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(size, 6, 6, 3)) * 4.0 ** rng.normal(size=(size, 1, 1, 1)))


X = images(16).astype(jnp.float32)


@hypothesis.given(
    needs=numpy_strategies.arrays(float, (3, 4), elements=st.floats(0, 1e6)),
    elements=st.lists(st.integers(1, 10**6), min_size=3, max_size=3),
    bits=st.floats(1, 8),
)
def test_widths_meet_the_budget_and_fall(needs, elements, bits):
    elements = np.array(elements)
    table = needs[..., None] / (2.0 ** np.array(WIDTHS) - 1) ** 2
    widths = Needs(("a", "b", "c"), table, elements).allocate(bits)
    assert set(np.unique(widths)) <= set(WIDTHS)
    assert np.all(np.diff(widths, axis=1) <= 0)
    assert elements @ widths.mean(1) <= bits * elements.sum() * (1 + 1e-6)


@hypothesis.given(st.integers(0, 10**6), st.floats(1, 8))
def test_widths_fall_whatever_the_variances(seed, bits):
    needs = np.random.default_rng(seed).exponential(size=(2, 8, 4)) * np.array([64, 9, 1, 0.01])
    widths = Needs(("a", "b"), needs, np.array([8, 24])).allocate(bits)
    assert np.all(np.diff(widths, axis=1) <= 0)
    assert np.array([8, 24]) @ widths.mean(1) <= bits * 32 * (1 + 1e-6)


class Two(nnx.Module):
    """Two linear layers, called as `call` does."""

    def __init__(self, call):
        rngs = nnx.Rngs(0)
        self.a, self.b = (jc.nn.Linear(4, 4, codec=jc.Quantize(2), rngs=rngs) for _ in range(2))
        self.call = call

    def __call__(self, x):
        return self.call(self, x)


VECTORS = jnp.asarray(np.random.default_rng(1).normal(size=(16, 4)), jnp.float32)


@pytest.mark.parametrize(
    ("call", "planned"),
    [
        (lambda s, x: s.b(inputs=s.a(inputs=x)), 2),
        (lambda s, x: s.a(x), 1),
        (lambda s, x: s.b(jax.checkpoint(lambda x: jnp.tanh(s.a(x)))(x)), 2),
        (lambda s, x: s.b(jax.jit(s.a)(x)), 2),
    ],
)
def test_layers_may_be_called_in_any_way(call, planned):
    policy = plan_bits(loss, Two(call), VECTORS, bits=2, run=1)
    assert len(policy.rules) == 2
    assert all(rule.action == jc.Quantize(2) for rule in policy.rules)
    assert len(Needs.measure(loss, Two(call), VECTORS, 1).paths) == planned


def test_a_layer_that_is_called_twice_has_the_sum_of_its_variances():
    once, twice = (
        sensitivities(lambda m, x: m(x).sum(), Two(call), VECTORS)["a"][:, 2:].sum(0)
        for call in (lambda s, x: s.a(x), lambda s, x: s.a(x) + s.a(x + 5))
    )
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-4)


def test_frozen_layers_are_not_planned():
    model = Two(lambda s, x: s.b(s.a(x)))
    model.a.kernel = nnx.Variable(model.a.kernel[...])
    assert Needs.measure(loss, model, VECTORS, 1).paths == ("b",)
    rows = {v.path: v for v in jc.plan(model, VECTORS).values}
    assert rows["a"].saved_bytes == 0  # with nothing coded, the input of b is what it made
    assert rows["b"].saved_bytes == jc.Quantize(2).nbytes((16, 4), X.dtype)


def test_norms_that_store_nothing_keep_their_bits():
    model = Net(jc.Quantize(2))
    model.norm.eval()
    found = {rule.path: rule.action for rule in plan_bits(loss, model, X, bits=2).rules}
    assert found.pop("norm") == jc.Quantize(2) and found.pop("relu") == jc.Packed(1)
    assert found.keys() == {"conv", "conv2", "head"}
    sizes = {"conv": 3 * 36, "conv2": 8 * 36, "head": 8}
    means = {path: np.mean(codec.bits) for path, codec in found.items()}
    spent = sum(means[path] * size for path, size in sizes.items())
    assert spent <= 2 * sum(sizes.values())


def test_greedy_is_optimal_where_steps_are_even():
    """Of all ways to give 3 layers 1, 2, 4 or 8 bits with a mean that the greedy meets exactly."""
    needs = np.array([[90.0], [10.0], [1.0]])
    table = needs[..., None] / (2.0 ** np.array(WIDTHS) - 1) ** 2
    plan = Needs(("a", "b", "c"), table, np.array([5, 5, 5]))
    widths = plan.allocate(7 / 3)
    every = np.array(np.meshgrid(WIDTHS, WIDTHS, WIDTHS)).reshape(3, -1).T[..., None]
    fitting = [w for w in every if w.sum() <= 7]
    assert plan.variance(widths) == min(plan.variance(w) for w in fitting)


def test_a_plan_has_less_noise_than_equal_bits():
    model = Net(jc.Quantize(bits=2))
    before = jc.check_gradients(loss, model, X, draws=8)
    planned = plan_bits(loss, model, X, bits=2, run=8)
    jc.compress(jc.uncompress(model), planned)
    assert any(isinstance(m.codec, jc.PerSample) for m in (model.conv, model.conv2))
    after = jc.check_gradients(loss, model, X, draws=8)
    assert after.coded.noise < 0.9 * before.coded.noise
    low, _ = after.coded.bias_interval
    assert low == 0.0 or after.coded.bias < after.coded.floor


def test_a_plan_meets_its_budget_in_bytes():
    """Codes alone: ranges, and the order of runs, come on top."""
    model = Net(jc.Quantize(bits=2))
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    for bits in (1, 3.5):
        planned = plan_bits(loss, model, X, bits=bits, run=4)
        jc.compress(jc.uncompress(model), planned)
        saved = jc.plan(model, shape).values
        floats = [v for v in saved if v.op in ("conv", "dot", "batch_norm")]
        elements = sum(v.elements for v in floats)
        bits_of = {rule.path: np.mean(rule.action.bits) for rule in planned.rules}
        codes = sum(v.elements * bits_of[v.path] for v in floats)
        assert codes <= bits * elements


def test_measures_what_a_norm_passes_on():
    """More than the noise of its own scale, which is all that its sink sees."""
    model = Net(jc.Quantize(bits=2))
    found = sensitivities(loss, model, X)
    assert set(found) == {"conv", "norm", "conv2", "head"}
    exact = nnx.clone(model)
    for layer in (exact.conv, exact.conv2, exact.head):
        layer.codec = None
    report = jc.check_gradients(loss, exact, X, draws=32)
    _, params, rest = nnx.split(exact, nnx.Param, ...)
    graphdef = nnx.graphdef(exact)
    gradient = jax.jit(jax.grad(lambda p: loss(nnx.merge(graphdef, p, rest, copy=True), X)))(params)
    norm = np.sqrt(sum(np.square(np.asarray(g)).sum() for g in jax.tree.leaves(gradient)))
    measured = (report.coded.noise * norm) ** 2
    predicted = found["norm"][:, 3].sum()
    assert 0.4 < predicted / measured < 2.5


def test_a_planner_is_bounded_and_shown():
    model = Net(jc.Quantize(bits=2))
    planner = BitPlanner(loss, bits=2, run=4, every=10, most=1)
    assert not planner.update(model, X, 5)
    assert planner.update(model, X, 10)
    assert not planner.update(model, 100 * X, 20)
    assert str(planner) == "1 of at most 1 plans taken, at steps 10"
    other = Net(jc.Quantize(bits=2))
    again = BitPlanner(loss)
    again.taken = planner.taken
    again.restore(other)
    assert [m.codec for m in (other.conv, other.head)] == [
        m.codec for m in (model.conv, model.head)
    ]


def test_a_planner_keeps_a_plan_that_is_good_enough():
    model = Net(jc.Quantize(bits=2))
    planner = BitPlanner(loss, run=4, every=1)
    assert [planner.update(model, X, step) for step in (0, 1, 2)] == [True, False, False]


def test_one_sample_a_run_gives_every_layer_one_width():
    model = Net(jc.Quantize(bits=2))
    rules = plan_bits(loss, model, X[:1], bits=2, run=1).rules
    assert {type(rule.action) for rule in rules} == {jc.Quantize, jc.Packed}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"bits": 0.5}, "bits=0.5: expected a mean of 1 to 8"),
        ({"bits": 9}, "bits=9: expected a mean of 1 to 8"),
        ({"run": 0}, "run=0: expected an integer from 1 to 256"),
        ({"run": 32}, "run=32: the batch has 16 samples"),
    ],
)
def test_budgets_that_cannot_be_met_are_an_error(kwargs, message):
    with pytest.raises(ValueError, match=message):
        plan_bits(loss, Net(jc.Quantize(bits=2)), X, **kwargs)


def test_models_and_batches_that_cannot_be_planned_are_an_error():
    with pytest.raises(ValueError, match="expected layers that store by Quantize or PerSample"):
        plan_bits(loss, Net(jc.Exact()), X)
    with pytest.raises(ValueError, match="its gradient at conv is not finite"):
        plan_bits(loss, Net(jc.Quantize(bits=2)), X.at[0].set(jnp.nan))
    with pytest.raises(ValueError, match="expected arrays of one size of axis 0"):
        plan_bits(lambda m, b: loss(m, b[0]), Net(jc.Quantize(bits=2)), (X, X[:3]))
    with pytest.raises(ValueError, match="expected positive numbers"):
        BitPlanner(loss, every=0)


def test_sharded_over_devices_the_step_gets_no_collective():
    """But for the sums of the gradients, which the exact step has too."""
    from tests.helpers import collectives, replicate, shard

    def step(codec):
        model = Net(codec)
        if codec != jc.Exact():
            planned = plan_bits(loss, model, X, run=2)
            jc.compress(jc.uncompress(model), planned)
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        gradient = jax.grad(lambda p, x: loss(nnx.merge(graphdef, p, rest, copy=True), x))
        return collectives(gradient, replicate(params), shard(X))

    assert step(jc.Quantize(bits=2)) == step(jc.Exact())
