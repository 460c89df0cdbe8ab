"""What Python and notebooks show of models, functions and reports, and what mistakes are told."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import jaxcomp as jc

X = jax.ShapeDtypeStruct((512, 64), jnp.float32)


def model():
    rngs = nnx.Rngs(0)
    first, second = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs)
    return nnx.Sequential(first, jnp.sin, second, nnx.gelu)


def test_a_compressed_model_tells_its_policy():
    compressed = jc.compress(model())
    assert repr(compressed).startswith("Sequential( # compressed by automatic:bits=4, Param: 8,320")
    assert jc.policy_of(compressed) == jc.recipes.automatic()
    assert jc.policy_of(nnx.clone(compressed)) == jc.recipes.automatic()
    whole = nnx.Sequential(compressed, nnx.Linear(64, 8, rngs=nnx.Rngs(0)))
    assert "Sequential( # compressed by automatic:bits=4" in repr(whole)
    assert jc.policy_of(whole) is None
    assert "compressed" not in repr(jc.uncompress(compressed))
    assert jc.policy_of(compressed) is None
    of_layers = jc.compress(jc.nn.Linear(64, 64, rngs=nnx.Rngs(0)), "quantize:bits=2")
    assert repr(of_layers).startswith("Linear( # compressed by quantize:bits=2")
    assert jc.policy_of(of_layers) == jc.policies.from_spec("quantize:bits=2")


def test_a_function_tells_its_policy():
    saved = jax.checkpoint_policies.dots_saveable
    name = getattr(saved, "__name__", type(saved).__name__)
    for policy, shown in ((jc.Quantize(4), "a policy of 1 rule"), (saved, name)):
        function = jc.checkpoint(jnp.sin, policy)
        assert repr(function) == f"<jaxcomp.checkpoint of sin, by {shown}>"
        assert jc.policy_of(function) == function.policy
    assert jc.policy_of(jnp.sin) is None


def test_the_plan_of_a_stock_model_is_what_jax_saves():
    stock = jc.plan(model(), X)
    assert stock.saved_bytes == stock.exact_bytes == jc.plan(jc.compress(model()), X).exact_bytes
    assert "layers/2" in {value.path for value in stock.values}
    assert {value.decision for value in stock.values} == {"exact"}
    assert str(stock).endswith("nothing is compressed: this is what JAX saves")
    assert "note" not in str(stock).splitlines()[0]  # an empty column


def test_reports_are_one_line_and_tables_in_notebooks():
    @jax.jit
    def step(x):
        return jnp.sin(x).sum()

    compressed = jc.compress(model(), jc.Quantize(4))
    plan = jc.plan(compressed, X)
    assert max(map(len, str(plan).splitlines())) <= 80
    batch = jax.random.normal(jax.random.key(0), (512, 64))
    gradients = jc.check_gradients(lambda m, x: jnp.square(m(x)).mean(), compressed, batch, 4)
    report = jc.memory.analyze(step, X, target="cpu", capacity="1MiB")
    live = jc.memory.timeline(step, X, target="cpu")
    starts = ("Plan(", "GradientReport(", "MemoryReport(target='cpu': ")
    for shown, start in zip((plan, gradients, report, live), (*starts, "Timeline("), strict=True):
        assert repr(shown).startswith(start)
        assert len(repr(shown)) < 160 and "\n" not in repr(shown)
        assert "<pre>" in shown._repr_html_()
    assert repr(report).endswith(" KiB needed, fits)")
    assert live._repr_html_().startswith("<svg ")
    alike = jnp.ones((512, 64))
    same = jc.check_gradients(lambda m, x: jnp.square(m(x)).mean(), compressed, alike, 4)
    assert "all examples are alike: give real data" in same.verdict


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jc.plan(linen.Dense(3), X), "Dense: a Linen module is no function of arrays"),
        (lambda: jc.plan(model()), r"plan\(model, \*inputs\): no input is given; expected the"),
        (lambda: jc.plan(jc.compress(model())), r"plan\(model, \*inputs\): no input is given"),
        (lambda: jc.plan(nnx.Linear(4, 4, rngs=nnx.Rngs(0))), "missing a required argument"),
        (lambda: jc.plan(model(), (8, 64)), r"mean jax.ShapeDtypeStruct\(\(8, 64\), jnp.float32"),
        (lambda: jc.compress(model(), "remat"), r"Strategy.parse\('remat'\)\(model\) applies it"),
        (lambda: jc.compress(model(), "accumulate:4"), "split the batch in the training step"),
        (lambda: jc.compress(model(), "quantise"), "did you mean 'quantize'"),
        (lambda: jc.compress(model(), "quantize:bit=4"), "did you mean 'bits'"),
    ],
)
def test_mistakes_are_told_with_what_to_do(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
