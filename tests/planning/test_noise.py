"""Plans within a limit of the noise of their gradient."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp.planning import DoesNotFitError, FittedPlan, fit
from tests.planning.small import BATCH, DATA, LinenNet, loss, make_step, of_linen, plain_bytes


@pytest.mark.slow
def test_plans_keep_to_a_limit_of_noise():
    budget = int(0.6 * plain_bytes())
    given = {"batch": BATCH, "target": "cpu", "actions": ("keep", "quantize"), "data": DATA}
    given |= {"bits": (8, 4)}
    free = fit(make_step, budget=budget, **given)
    quiet = fit(make_step, budget=budget, noise=free.noise / 4, **given)
    assert quiet.noise <= free.noise / 4
    assert quiet.milliseconds >= free.milliseconds
    for plan in (free, quiet):
        model = jc.compress(nnx.clone(DATA[1]), plan.policy)
        report = jc.check_gradients(loss, model, DATA[2], draws=6)
        assert report.noise_over_sgd == pytest.approx(plan.noise, rel=0.4)
        assert FittedPlan.from_json(plan.to_json()) == plan
        assert f"estimated noise of the gradient: {plan.noise:.3f} of SGD's" in str(plan)
    with pytest.raises(DoesNotFitError, match=r"nothing fits with so little noise; .* fits, with"):
        fit(make_step, budget=budget, noise=1e-4, **given)


@pytest.mark.slow
def test_the_noise_of_a_function_is_measured_on_its_parameters():
    params = LinenNet().init(jax.random.key(0), DATA[2])

    def loss(params, x):
        return jnp.square(LinenNet().apply(params, x)).mean()

    plain = fit(of_linen, batch=BATCH, target="cpu", actions=("keep",), budget="1GiB")
    given = {"batch": BATCH, "target": "cpu", "actions": ("keep", "quantize"), "bits": (4,)}
    given |= {"budget": int(0.6 * plain.total_bytes), "data": (loss, params, DATA[2])}
    plan = fit(of_linen, **given)
    coded = jc.checkpoint(loss, plan.policy)
    report = jc.check_gradients(coded, params, DATA[2], draws=6)
    assert report.noise_over_sgd == pytest.approx(plan.noise, rel=0.4)
    with pytest.raises(TypeError, match="data: expected the parameters of a function"):
        fit(of_linen, **given | {"data": DATA})


@pytest.mark.slow
def test_noise_is_measured_on_a_small_batch_too():
    """Values that are too small for a code in the small batch are not in the step's."""
    budget = int(0.6 * plain_bytes())
    given = {"batch": BATCH, "target": "cpu", "actions": ("keep", "quantize"), "budget": budget}
    small = (*DATA[:2], DATA[2][:32])
    assert fit(make_step, data=small, **given).noise > 0.01
