import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp.diagnostics._losses import vector
from jaxcomp.planning import Strategy
from tests.helpers import normal, only, slow, without_type_checks


class Net(nnx.Module):
    def __init__(self, codec):
        rngs = nnx.Rngs(0)
        self.conv = jc.nn.Conv(3, 4, (3, 3), rngs=rngs, codec=codec)
        self.relu = jc.nn.ReLU()
        self.head = jc.nn.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.relu(self.conv(x)).mean((1, 2)))


def loss(model, batch):
    x, y = batch
    logits = model(x)
    return -(jax.nn.log_softmax(logits)[jnp.arange(len(y)), y]).mean()


# Neighbouring pixels are alike, and not their differences alone matter: pooling shows.
BATCH = normal((16, 8, 8, 3)) + 0.5, jnp.arange(16) % 3


def test_an_unbiased_code_shows_noise_alone():
    report = jc.check_gradients(loss, Net(jc.Quantize(bits=2)), BATCH, draws=32)
    low, high = report.coded.bias_interval
    assert low == 0.0
    assert report.coded.bias <= high
    assert report.coded.noise > 0.01
    np.testing.assert_allclose(report.coded.floor, report.coded.noise / 32**0.5)
    assert report.noise_over_sgd == report.coded.noise / report.sgd_noise
    assert f"no bias was found; the noise is {report.noise_over_sgd:.2f} of SGD's" in str(report)


def test_a_biased_code_shows_its_bias():
    report = jc.check_gradients(loss, Net(jc.AvgPool(window=4)), BATCH, draws=4)
    low, high = report.coded.bias_interval
    assert 0.01 < low <= report.coded.bias <= high
    assert f"biased by {low:.1%} of the gradient or more" in str(report)
    model, exact = Net(jc.AvgPool(window=4)), Net(None)
    coded, wanted = (
        np.concatenate([np.ravel(g) for g in jax.tree.leaves(nnx.jit(nnx.grad(loss))(m, BATCH))])
        for m in (model, exact)
    )
    bias = np.linalg.norm(coded - wanted) / np.linalg.norm(wanted)
    np.testing.assert_allclose(report.coded.bias, bias, rtol=1e-3)


def test_errors_of_each_parameter_are_parts_of_its_own_gradient():
    model, exact = Net(jc.AvgPool(window=4)), Net(None)
    report = jc.check_gradients(loss, model, BATCH, draws=4)
    gradient = nnx.jit(nnx.grad(loss))
    coded, wanted = gradient(model, BATCH), gradient(exact, BATCH)
    found = dict(report.parameters)
    assert list(found) == ["conv/bias", "conv/kernel", "head/bias", "head/kernel"]
    difference = coded["conv"]["kernel"][...] - wanted["conv"]["kernel"][...]
    bias = np.linalg.norm(difference) / np.linalg.norm(wanted["conv"]["kernel"][...])
    np.testing.assert_allclose(found["conv/kernel"].bias, bias, rtol=1e-3)
    assert bias > report.coded.bias > 100 * found["head/kernel"].bias


def test_biased_parameters_are_named_and_others_are_not():
    report = jc.check_gradients(loss, Net(jc.AvgPool(window=4)), BATCH, draws=8)
    assert report.biased == ("conv/kernel",)
    assert "(1 of 4 parameters, first conv/kernel); the noise is" in str(report)
    assert dict(report.parameters)["conv/kernel"].p_value == 1 / 2**7
    unbiased = jc.check_gradients(loss, Net(jc.Quantize(bits=2)), BATCH, draws=16)
    assert unbiased.biased == ()
    assert all(errors.p_value > 0.001 for _, errors in unbiased.parameters)


class Unit(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        conv = jc.nn.Conv(3, 4, (3, 3), rngs=rngs)
        self.unit = jc.nn.ConvNormAct(conv, jc.nn.BatchNorm(4, rngs=rngs))
        self.head = jc.nn.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(jc.ops.value(self.unit(x)).mean((1, 2)))


def test_clipped_values_are_counted_and_warned_of():
    model = jc.compress(Unit(), "fused:bits=4")
    report = jc.check_gradients(loss, model, BATCH, draws=3)
    assert report.clipped == (("unit", 0.0),)
    x = jnp.zeros((32, 8, 8, 3)).at[0, 0, 0].set(100.0)  # more than 16 standard deviations
    with pytest.warns(UserWarning, match="of the values of unit are beyond the last level"):
        report = jc.check_gradients(loss, model, (x, jnp.arange(32) % 3), draws=3)
    assert 1e-4 < report.clipped[0][1] < 0.01


def test_a_parameter_without_a_gradient_is_left_out():
    def of_logits(model, batch):
        return (model(batch[0]) ** 2).mean() + 0 * model.unused[...].sum()

    model = Net(jc.Quantize(bits=2))
    model.unused = nnx.Param(jnp.ones(3))
    found = dict(jc.check_gradients(of_logits, model, BATCH, draws=4).parameters)
    assert list(found) == ["conv/bias", "conv/kernel", "head/bias", "head/kernel"]


@pytest.mark.parametrize("normed", [False, True])
def test_the_control_is_rounding(normed):
    model = Net(jc.Quantize(bits=2))
    if normed:  # a code that is packed by bfloat16 numbers on a TPU
        norm = jc.nn.BatchNorm(4, rngs=nnx.Rngs(0))
        coded = jc.nn.NormAct(norm, codec=jc.SignAware(bits=3))
        model.relu = nnx.Sequential(coded, jc.ops.value)
    report = jc.check_gradients(loss, model, BATCH)
    assert report.control.noise < 1e-5
    assert report.control.bias < 1e-5


class Blocks(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List(nnx.Linear(16, 16, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        for block in self.blocks:
            x = x + jax.nn.gelu(block(x))
        return x


@pytest.mark.parametrize("way", [slow("quantize:bits=2"), "boundary:quantize:bits=2"])
def test_the_control_of_a_model_that_is_coded_as_a_whole_is_exact(way):
    model = Strategy.parse(way)(Blocks())
    batch = normal((1024, 16)), jnp.arange(1024) % 16
    report = jc.check_gradients(loss, model, batch, draws=3)
    assert report.coded.noise > 1e-3
    assert report.control.noise < 1e-5
    assert jc.check_gradients(loss, model, batch, draws=3) == report


def _mlp(params, x):
    for w in params["blocks"]:
        x = x + jax.nn.gelu(x @ w)
    return x


def _scanned(params, x):
    block = jc.checkpoint(lambda x, w: x + jax.nn.gelu(x @ w), "quantize:bits=2")
    return jax.lax.scan(lambda x, w: (block(x, w), None), x, jnp.stack(params["blocks"]))[0]


def _again(params, x):
    return jax.checkpoint(jc.checkpoint(_mlp, "quantize:bits=2"))(params, x)


@pytest.mark.parametrize(
    "forward", [slow(jc.checkpoint(_mlp, "quantize:bits=2")), _scanned, slow(_again)]
)
def test_any_function_of_parameters_is_compared_with_its_exact_gradient(forward):
    params = {"blocks": [0.1 * normal((16, 16), seed=i) for i in range(2)]}
    batch = normal((1024, 16)), jnp.arange(1024) % 16

    def of(forward):
        return lambda params, batch: loss(lambda x: forward(params, x), batch)

    report = jc.check_gradients(of(forward), params, batch, draws=8)
    assert report.coded.noise > 1e-3 > 1e-5 > report.control.noise
    assert [name for name, _ in report.parameters] == ["blocks/0", "blocks/1"]
    assert report.coded.bias_interval[0] == 0.0 and not report.clipped
    exact, coded = (jax.grad(of(each))(params, batch) for each in (_mlp, forward))
    norm = np.linalg.norm(vector(exact))
    error = np.linalg.norm(vector(coded) - vector(exact)) / norm
    assert 0.5 < error / report.coded.noise < 2  # of one draw
    with pytest.raises(ValueError, match="model=dict: nothing is compressed"):
        jc.check_gradients(of(_mlp), params, batch)


def test_a_parameter_may_be_named_value():
    params = {"query": normal((16, 16)), "value": normal((16, 16), seed=1)}
    batch = normal((1024, 16)), jnp.arange(1024) % 16

    @jc.checkpoint
    def forward(params, x):
        return jnp.tanh(x @ params["query"]) @ params["value"]

    report = jc.check_gradients(
        lambda p, b: loss(lambda x: forward(p, x), b), params, batch, draws=3
    )
    assert [name for name, _ in report.parameters] == ["query", "value"]


def test_codes_whose_exact_gradient_is_not_known_are_an_error():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (jax.P(), jax.P("d")), "out_specs": jax.P("d")}
    forward = jax.shard_map(jc.checkpoint(_mlp, "quantize:bits=2"), mesh=mesh, **specs)
    params = {"blocks": [normal((16, 16))]}
    batch = normal((8192, 16)), jnp.arange(8192) % 16
    with pytest.raises(ValueError, match=r"codes in a while loop or in jax.shard_map"):
        jc.check_gradients(lambda p, b: loss(lambda x: forward(p, x), b), params, batch)


def test_sgd_noise_falls_with_the_batch():
    def sgd_noise(examples):
        x = normal((examples, 8, 8, 3))
        y = jnp.asarray(np.random.default_rng(0).integers(0, 3, examples))
        return jc.check_gradients(loss, Net(jc.Cast()), (x, y), draws=3, parts=8).sgd_noise

    assert 2.5 < sgd_noise(64) / sgd_noise(1024) < 6  # 4, were the gradients' norms the same


def test_the_layer_that_is_coded_has_the_variance():
    report = jc.check_gradients(loss, Net(jc.Quantize(bits=1)), BATCH)
    assert report.layers[0][0] == "conv/kernel"
    assert report.layers[0][1] > 0.99
    np.testing.assert_allclose(sum(share for _, share in report.layers), 1)
    assert "conv/kernel" in str(report)


def test_the_model_is_left_as_it_was():
    model = Net(jc.Quantize(bits=2))
    before = jax.tree.map(np.asarray, nnx.state(model))
    jc.check_gradients(loss, model, BATCH, draws=3)
    assert model.conv.codec == jc.Quantize(bits=2)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"draws": 2}, "draws=2, parts=4: expected at least 3 and 2"),
        ({"parts": 1}, "draws=16, parts=1: expected at least 3 and 2"),
        ({"parts": 5}, "batch: expected arrays whose axis 0 is the same multiple of 5"),
        ({"batch": (BATCH[0], BATCH[1][:8])}, "batch: expected arrays whose axis 0"),
        ({"loss": lambda model, batch: 0 * model(batch[0]).sum()}, "exact gradient has the norm"),
        ({"model": Net(None)}, "model=Net: nothing is compressed"),
        ({"draws": 4.0}, "draws=4.0: expected an integer"),
        ({"batch": (BATCH[0], [0, 1])}, "batch: expected a pytree of arrays; it has .*, int"),
        ({"model": loss}, "expected a Flax NNX module or a pytree of .* it has function"),
        ({"loss": 1.0}, "loss=1.0: expected a function"),
        ({"loss": lambda *_: 1.0}, "loss returned float: expected a floating-point scalar"),
        ({"loss": lambda *a: (loss(*a), 1)}, "loss returned tuple: .* with has_aux=True a pair"),
        ({"has_aux": True}, r"loss returned a .*Tracer: expected a pair \(has_aux\)"),
    ],
)
def test_bad_input(change, error):
    arguments = {"loss": loss, "model": Net(jc.Quantize()), "batch": BATCH} | change
    with without_type_checks(), pytest.raises((TypeError, ValueError), match=error):
        jc.check_gradients(**arguments)


def test_a_loss_may_return_more():
    model = Net(jc.Quantize(bits=2))
    more = jc.check_gradients(
        lambda *a: (loss(*a), {"name": a[0](a[1][0])}), model, BATCH, draws=3, has_aux=True
    )
    assert more == jc.check_gradients(loss, model, BATCH, draws=3)


def test_a_policy_that_encodes_nothing_is_an_error():
    """As where values are too small, of one example under `jax.vmap`."""
    model = jc.compress(Blocks(), only(jc.Quantize(), min_size=10**6))
    batch = normal((64, 16)), jnp.arange(64) % 16
    with pytest.raises(ValueError, match="model=Blocks: nothing is coded"):
        jc.check_gradients(loss, model, batch, draws=3)

    model = jc.compress(Blocks(), only(jc.Quantize(), min_size=512))

    def of_each(model, batch):
        return jnp.mean(jax.vmap(lambda x: model(x[None])[0])(batch[0]) ** 2)

    plan = jc.plan(model, batch[0])
    assert plan.saved_bytes < plan.exact_bytes
    with pytest.raises(ValueError, match=r"under jax\.vmap"):
        jc.check_gradients(of_each, model, batch, draws=3)


class Adapted(nnx.Module):
    """A frozen layer with a low-rank adapter, whose input is made by the model."""

    def __init__(self, rngs):
        self.first = nnx.Linear(16, 64, rngs=rngs)
        self.second = nnx.LoRALinear(64, 8, lora_rank=4, rngs=rngs)
        self.second.lora.lora_b[...] = jnp.ones((4, 8))

    def __call__(self, x):
        return self.second(jnp.sort(self.first(x)))


def test_variables_that_the_gradient_is_taken_by():
    model = jc.compress(Adapted(nnx.Rngs(0)), only(jc.Quantize(bits=2), min_size=256))
    x = normal((32, 16))

    def square(model, x):
        return jnp.square(model(x) - 1).mean()

    report = jc.check_gradients(square, model, x, wrt=nnx.LoRAParam)
    names = [name for name, _ in report.layers]
    assert sorted(names) == ["second/lora/lora_a", "second/lora/lora_b"]
    assert report.coded.noise > 0.01 > 100 * report.control.noise
    with pytest.raises(ValueError, match="the model has no such variables"):
        jc.check_gradients(square, model, x, wrt=nnx.BatchStat)
    with pytest.raises(ValueError, match="expected a Flax NNX module with it, not a pytree"):
        jc.check_gradients(lambda w, x: (x @ w).sum(), jnp.ones((16, 2)), x, wrt=nnx.LoRAParam)


def test_a_batch_that_has_no_parts():
    """A graph: its arrays have nodes and edges on their first axes."""

    @jc.checkpoint
    def messages(w, nodes, edges):
        sent = jnp.tanh(nodes @ w)[edges[:, 0]]
        return jax.ops.segment_sum(jnp.sin(sent @ w), edges[:, 1], len(nodes))

    def of_graph(w, graph):
        return jnp.square(messages(w, *graph)).mean()

    w, nodes = 0.1 * normal((64, 64)), normal((256, 64))
    edges = jax.random.randint(jax.random.key(0), (1000, 2), 0, 256)
    with pytest.raises(ValueError, match="parts=None measures no noise of SGD"):
        jc.check_gradients(of_graph, w, (nodes, edges))
    report = jc.check_gradients(of_graph, w, (nodes, edges), parts=None)
    assert np.isnan(report.sgd_noise) and np.isnan(report.noise_over_sgd)
    assert f"the noise is {report.coded.noise:.1%} of the gradient" in str(report)


def test_rounding_to_bfloat16_is_no_bias():
    x = normal((64, 16, 32), jnp.bfloat16)

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(32, dtype=jnp.bfloat16, rngs=rngs)
            self.linear = nnx.Linear(32, 32, dtype=jnp.bfloat16, rngs=rngs)

        def __call__(self, x):
            return x + jax.nn.gelu(self.linear(self.norm(x)))

    def verdict(policy):
        model = nnx.Sequential(Block(nnx.Rngs(0)), Block(nnx.Rngs(1)))
        compressed = jc.compress(model, policy)
        report = jc.check_gradients(
            lambda m, x: (m(x).astype(jnp.float32) ** 2).mean(), compressed, x
        )
        return report.verdict

    assert "no bias was found" in verdict("automatic:bits=4")
    assert verdict(only(jc.Quantize(bits=2, rounding="nearest"))).startswith("biased by")
