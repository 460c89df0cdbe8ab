"""`fit`: what it returns was compiled and fits, and bad input is refused before any compilation."""

import contextlib
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp.memory._sizes import bytes_of
from jaxcomp.planning import DoesNotFitError, FittedPlan, _largest, _plans, fit, largest_batch
from tests.planning.small import (
    BATCH,
    DATA,
    DEPTH,
    WIDTH,
    Net,
    RematNet,
    make_step,
    plain_bytes,
    step_of,
    total_bytes,
)


@functools.cache
def of_four_bits():
    return fit(
        make_step, batch=BATCH, budget="1GiB", target="cpu", actions=("quantize",), bits=(4,)
    )


def test_plans_fit_and_take_longer_within_less():
    plain = plain_bytes()
    before = 0.0
    for fraction in (1.1, 0.5):
        budget = int(fraction * plain)
        actions = ("keep", "quantize", "recompute")
        given = {"batch": BATCH, "budget": budget, "target": "cpu", "actions": actions}
        plan = fit(make_step, **given, bits=(4,))
        assert total_bytes(plan.strategy) == plan.total_bytes <= budget
        assert plan.milliseconds >= 0.98 * before
        before = plan.milliseconds
        exact = [c.is_exact for c in plan.frontier if c.name == plan.name] == [True]
        fitting = [c.milliseconds for c in plan.frontier if c.fits and c.is_exact >= exact]
        assert plan.milliseconds <= 1.02 * min(fitting)
        assert plan.verdict.startswith(f"Answer: {plan.name}")
        assert len(plan.frontier) <= 8
        assert (plan.name == "plain") == (fraction > 1)
        exact = {c.name for c in plan.frontier if c.is_exact}
        assert exact == {"plain"} if fraction > 1 else exact >= {"plain", "remat", "remat:weights"}


def test_a_plan_is_mixed_saved_and_verified(tmp_path):
    budget = int(0.7 * plain_bytes())
    plan = fit(
        make_step,
        batch=BATCH,
        budget=budget,
        target="cpu",
        actions=("keep", "quantize"),
        bits=(4, 8),
        pin={"blocks/0/.*": "keep", "blocks/2/.*": "bits=8"},
    )
    chosen = {part.group: part.action for part in plan.parts}
    assert chosen["blocks/0/mlp"] == "keep"
    assert chosen["blocks/2/mlp"] == "bits=8"
    plan.save(tmp_path / "plan.json")
    loaded = FittedPlan.load(tmp_path / "plan.json")
    assert loaded == plan
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["made"]["jaxcomp"] == jc.__version__ and written["made"]["date"]
    assert written["policy"]["rules"]
    older = written | {"version": 1, "compiler": "JAX 0.10.2"}
    older["policy"] = json.dumps(older["policy"])
    assert FittedPlan.from_json(json.dumps(older)).policy == plan.policy
    apply = "\n".join(plan.usage("plan.json")[1:])
    assert apply.split() == [
        *("plan", "=", "jc.planning.FittedPlan.load('plan.json')"),
        *("model", "=", "plan.strategy(model)"),
    ]
    assert str(plan).endswith("Apply it:\n    model = plan.strategy(model)")
    assert len(repr(plan).splitlines()) == 1 and "<pre>" in plan._repr_html_()
    assert loaded.verify(make_step).total_bytes == plan.total_bytes
    model = jc.compress(nnx.eval_shape(lambda: Net(DEPTH, nnx.Rngs(0))), loaded.policy)
    listed = {v.path: v.decision for v in jc.plan(model, jnp.ones((BATCH, WIDTH))).values}
    assert "bits=8" in listed["blocks/2/mlp"]
    assert listed["blocks/0/mlp"] == "exact"
    with pytest.raises(ValueError, match=r"gone: blocks/2, blocks/2/mlp; new: none"):
        loaded.verify(lambda transform, batch: make_step(transform, batch, depth=2))
    with pytest.raises(ValueError, match="expected JSON"):
        FittedPlan.from_json("{}")
    assert "blocks/*/mlp" in str(plan)
    plan.draw(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(self.norm(x.reshape(-1, 64, WIDTH))).reshape(x.shape)


@pytest.mark.slow
def test_operands_of_attention_are_kept_where_they_fit():
    """By default queries, keys and values are computed again, which takes time."""

    def make_step(transform, batch):
        model = transform(nnx.eval_shape(lambda: Attention(nnx.Rngs(0))))
        return step_of(transform, model), (model, jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32))

    given = {"batch": BATCH, "target": "cpu", "actions": ("quantize",), "bits": (4,)}
    chosen = fit(make_step, budget="1GiB", **given)
    assert chosen.name == "bits=4:products=keep"
    assert {v.decision for v in _values(chosen) if v.path.startswith("attention/")} == {"exact"}
    less = fit(make_step, budget=chosen.total_bytes - 1, **given)
    assert less.name == "bits=4"
    assert less.milliseconds > chosen.milliseconds


def _values(plan):
    model = jc.compress(Attention(nnx.Rngs(0)), plan.policy)
    return jc.plan(model, jnp.ones((BATCH, WIDTH))).values


def test_micro_batches_fit_where_nothing_else_is_allowed():
    budget = int(0.7 * plain_bytes())
    plan = fit(make_step, batch=BATCH, budget=budget, target="cpu", actions=("keep", "accumulate"))
    assert plan.spec.startswith("accumulate:")
    assert plan.strategy.micro_batches >= 2


@pytest.mark.slow
def test_a_plan_may_split_the_batch_too():
    budget = int(0.5 * plain_bytes())
    plan = fit(
        make_step,
        batch=BATCH,
        budget=budget,
        target="cpu",
        actions=("keep", "quantize", "accumulate"),
        bits=(4,),
    )
    names = [point.name for point in plan.frontier]  # 4 parts fit and are slower than the whole
    assert "accumulate:4" in names and any(name.endswith(", accumulate:2") for name in names)
    assert "accumulate:8" not in names
    assert total_bytes(plan.strategy) == plan.total_bytes <= budget
    assert FittedPlan.from_json(plan.to_json()).strategy == plan.strategy


def test_micro_batches_are_not_for_batch_norms():
    def normed(transform, batch):
        model = nnx.Sequential(
            nnx.Linear(WIDTH, 512, rngs=nnx.Rngs(0)),
            nnx.BatchNorm(512, use_running_average=False, rngs=nnx.Rngs(0)),
            nnx.Linear(512, 4, rngs=nnx.Rngs(0)),
        )
        model = transform(model)
        return step_of(transform, model), (model, jax.ShapeDtypeStruct((batch, WIDTH), "f4"))

    with pytest.raises(DoesNotFitError, match=r"the least is plain.* split_batch_statistics"):
        fit(normed, batch=BATCH, budget="4MiB", target="cpu", actions=("accumulate",))
    plan = fit(
        normed,
        batch=BATCH,
        budget="6MiB",
        target="cpu",
        actions=("accumulate",),
        split_batch_statistics=True,
    )
    assert plan.strategy.micro_batches > 1


def test_pins_and_actions_hold_where_the_plain_step_fits():
    given = {"batch": BATCH, "budget": "1GiB", "target": "cpu"}
    actions = ("keep", "quantize")
    plan = fit(
        make_step, **given, pin={"blocks/1/mlp": "bits=3"}, actions=actions, bits=(3,), compiles=4
    )
    assert "blocks/1/mlp" in {p.group for p in plan.parts if p.action == "bits=3"}
    assert {p.action for p in plan.parts} == {"keep", "bits=3"}
    plan = fit(make_step, **given, pin={"head": "keep"})
    assert plan.spec == "plain"
    assert of_four_bits().name == "bits=4"


def test_nothing_fits():
    with pytest.raises(DoesNotFitError, match=r"nothing fits; the least is .* are arguments"):
        fit(make_step, batch=BATCH, budget="1.2MiB", target="cpu", compiles=3)


def test_interrupting_returns_the_best_so_far():
    names = []

    def progress(name):
        names.append(name)
        if len(names) == 3:
            raise KeyboardInterrupt
        return contextlib.nullcontext()

    budget = int(0.6 * plain_bytes())
    plan = fit(make_step, batch=BATCH, budget=budget, target="cpu", progress=progress)
    assert plan.name == names[1] == "bits=4"
    assert plan.notes[0] == "stopped early: the best that was compiled until then"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"budget": "11"}, "a number with a unit"),
        ({"budget": "0GiB"}, "a positive number of bytes"),
        ({"budget": -1}, "a positive number of bytes"),
        ({"budget": "100KiB"}, "the arguments of the step alone"),
        ({"budget": None}, "memory of target='cpu' is not known"),
        ({"actions": ("keep", "guess")}, "expected some of"),
        ({"actions": "keep"}, "expected some of"),
        ({"bits": (5,)}, "expected some of"),
        ({"compiles": 0}, "expected a positive integer"),
        ({"calibrate": True, "target": "h100"}, "h100 is not attached"),
        ({"noise": 0.1}, r"expected data=\(loss, model, batch\)"),
        ({"noise": -1, "data": DATA}, "expected a positive number"),
        ({"data": (*DATA[:2], jnp.ones((3, WIDTH)))}, "the same multiple of 4"),
        ({"data": (DATA[0], nnx.Linear(2, 2, rngs=nnx.Rngs(0)), DATA[2])}, "the modules of that"),
        ({"pin": {"tail": "keep"}}, "matches no module"),
        ({"pin": {"head": "drop"}}, "expected one of"),
        ({"pin": {"head(": "keep"}}, "not a regular expression"),
        ({"pin": {"head": "recompute"}}, "not in a list of blocks"),
        ({"pin": {"head": "bits=4"}, "actions": ("keep",)}, "expected one of"),
        ({"pin": {"blocks/0/mlp/layers/0": "keep", "blocks/0/mlp": "recompute"}}, "by another"),
        ({"batch": 0}, "batch=0: expected a positive integer"),
        ({"target": "h100:x"}, "expected h100:COUNT"),
        ({"target": "rtx3060-12gb", "budget": "13GiB"}, "rtx3060-12gb has 11.8 GiB"),
    ],
)
def test_bad_input_is_told_before_any_compilation(changed, message):
    if changed.get("target") in ("h100", "rtx3060-12gb"):
        pytest.importorskip("jax_cuda13_plugin")

    def progress(name):
        raise AssertionError(f"{name} is compiled")

    given = {"batch": BATCH, "budget": "8MiB", "target": "cpu", "progress": progress} | changed
    with pytest.raises(ValueError, match=message):
        fit(make_step, **given)


@pytest.mark.slow
def test_the_largest_batch_has_a_plan():
    budget = plain_bytes()
    given = {"budget": budget, "target": "cpu", "actions": ("keep", "quantize")}
    batch = largest_batch(make_step, **given, multiple=64)
    assert batch > 1.3 * BATCH
    assert fit(make_step, batch=batch, **given).total_bytes <= budget
    with pytest.raises(DoesNotFitError):
        fit(make_step, batch=batch + 128, **given)


def test_the_allowance_is_left_free(monkeypatch):
    pytest.importorskip("jax_cuda13_plugin")
    seen = []
    monkeypatch.setattr(_largest, "max_batch", lambda *args, **given: seen.append(given) or 1)
    given = {"target": "h100", "actions": ("keep",)}
    for allowance in (None, "1GiB", 0):
        largest_batch(make_step, budget="2GiB", allowance=allowance, **given)
    assert [each["capacity"] for each in seen] == [2**31 - 96 * 2**20, 2**30, 2**31]
    total = plain_bytes()
    plain = {"batch": BATCH, "target": "cpu", "actions": ("keep",), "budget": total + 1}
    assert fit(make_step, **plain, allowance=1).allowance_bytes == 1
    with pytest.raises(DoesNotFitError):
        fit(make_step, **plain, allowance=2)


def test_a_factory_that_changes_is_compiled_anew():
    depth = 2

    def changing(transform, batch):
        return make_step(transform, batch, depth)

    small = fit(changing, batch=BATCH, budget="1GiB", target="cpu")
    depth = 4
    large = fit(changing, batch=BATCH, budget="1GiB", target="cpu")
    assert large.total_bytes > 1.5 * small.total_bytes


def test_a_model_of_the_factory_keeps_its_classes():
    model = Net(2, nnx.Rngs(0))
    kinds = [type(module) for _, module in nnx.iter_modules(model)]

    def shared(transform, batch):
        step = nnx.grad(lambda model, x: jnp.square(model(x)).mean())
        return step, (transform(model), jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32))

    assert fit(shared, batch=8, budget="1GiB", target="cpu").spec == "plain"
    assert [type(module) for _, module in nnx.iter_modules(model)] == kinds


def test_what_fails_is_told_and_the_rest_is_tried():
    class Encoder(nnx.Module):
        def __init__(self):
            self.net = Net(DEPTH, nnx.Rngs(0))

        def encode(self, x):
            return self.net(x)

    def methods(transform, batch):
        model = transform(nnx.eval_shape(Encoder))
        step = jax.jit(
            nnx.grad(lambda model, x: jnp.square(model.encode(x)).mean()),
            compiler_options=jc.memory.compiler_options(),
        )
        return step, (model, jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32))

    budget = int(0.6 * plain_bytes())
    plan = fit(methods, batch=BATCH, budget=budget, target="cpu")
    assert plan.spec == "remat:2"
    assert any("bits=4 failed: TypeError" in note for note in plan.notes)


def test_a_step_without_a_gradient():
    def forward(transform, batch):
        model = transform(nnx.eval_shape(lambda: Net(1, nnx.Rngs(0))))
        return lambda model, x: model(x), (model, jax.ShapeDtypeStruct((batch, WIDTH), "f4"))

    with pytest.raises(ValueError, match="expected a step that takes a gradient"):
        fit(forward, batch=8, budget="1GiB", target="cpu")
    with pytest.raises(TypeError, match="expected bytes"):
        bytes_of("budget", 1.5)
    with pytest.raises(TypeError, match="expected a sequence of integers"):
        fit(forward, batch=8, budget="1GiB", target="cpu", bits=(4.0,))
    with pytest.raises(TypeError, match="expected a dict"):
        fit(forward, batch=8, budget="1GiB", target="cpu", pin="head")


@pytest.mark.slow
def test_all_values_in_few_bits_are_the_last_resort(monkeypatch):
    four = of_four_bits().total_bytes
    monkeypatch.setattr(_plans, "improve", lambda *arguments: [])  # as if no plan fitted
    given = {"batch": BATCH, "target": "cpu", "actions": ("quantize",)}
    plan = fit(make_step, **given, budget=four - 1)
    assert plan.name in ("bits=3", "bits=2")
    assert plan.total_bytes < four


def test_fewer_bits_are_compiled_where_four_do_not_fit():
    given = {"batch": BATCH, "target": "cpu"}
    four = of_four_bits().total_bytes
    budget = int(0.99 * four)
    plan = fit(make_step, **given, budget=budget, actions=("keep", "quantize"), bits=(4, 3))
    compiled = [c.name for c in plan.frontier]
    assert "plan 1" in compiled and "bits=3" in compiled
    assert plan.total_bytes < four


def test_all_values_but_pinned_ones_have_codes_where_no_plan_fits(monkeypatch):
    four = of_four_bits().total_bytes
    monkeypatch.setattr(_plans, "improve", lambda *arguments: [])
    given = {"batch": BATCH, "target": "cpu", "actions": ("keep", "quantize"), "bits": (4,)}
    plan = fit(make_step, **given, budget=2 * four, pin={"blocks/0/mlp": "keep"})
    assert plan.name == "bits=4 but for pin"
    actions = {part.group: part.action for part in plan.parts}
    assert (actions["blocks/0/mlp"], actions["blocks/1/mlp"]) == ("keep", "bits=4")


def test_no_answer_is_told_of_what_does_not_keep_to_a_pin():
    pin = {"blocks/0": "bits=8"}
    with pytest.raises(DoesNotFitError, match="which does not keep to pin and actions, with"):
        fit(make_step, batch=BATCH, budget="20MiB", target="cpu", pin=pin, compiles=2)


def test_a_plan_prints_its_frontier():
    plan = FittedPlan(
        "h100", 8, 2**30, "plan 1", jc.Policy(()), "", 1, 2**29, 1.5, (), (), "the peak is here"
    )
    assert str(plan).startswith("plan 1: JAX")
    assert "512.0 MiB of 1.0 GiB on h100, batch 8" in str(plan)
    assert dataclasses.replace(plan, policy=None, spec="remat").strategy.remat


def test_a_step_that_its_author_rematerialises():
    """As many of its regions are opened as fit; with encoded inputs they need the least."""
    step = functools.partial(make_step, net=RematNet, depth=2)
    fitted = functools.partial(fit, step, batch=BATCH, target="cpu", compiles=12)
    opened = fitted(budget="1GiB")
    assert opened.name == "open"
    (author,) = [c for c in opened.frontier if c.name == "plain"]
    assert author.total_bytes < opened.total_bytes
    assert author.milliseconds > opened.milliseconds

    between = fitted(budget=opened.total_bytes - 1)
    assert between.name == "open in 1 of 2 blocks"
    assert author.total_bytes < between.total_bytes < opened.total_bytes

    least = fitted(
        budget=author.total_bytes - 1, actions=["keep", "quantize"], bits=[8], biased=True
    )
    assert least.name == "inputs of regions in bits=8"
