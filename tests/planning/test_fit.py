"""`fit`: what it returns was compiled and fits, and bad input is refused before any compilation."""

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import jaxcomp as jc
from jaxcomp.memory._targets import resolve
from jaxcomp.planning import DoesNotFitError, FittedPlan, _plans, fit, largest_batch
from jaxcomp.planning._budget import bytes_of
from jaxcomp.planning._groups import Groups, pattern_of, policy_of
from jaxcomp.planning._probe import Probe
from jaxcomp.planning._problem import Known, make_problem
from jaxcomp.planning._solver import Moment

WIDTH, BATCH = 64, 2048


class Block(nnx.Module):
    def __init__(self, rngs):
        self.mlp = nnx.Sequential(
            nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs),
            nnx.gelu,
            nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs),
        )
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.mlp(self.norm(x))


class Net(nnx.Module):
    def __init__(self, depth, rngs):
        self.blocks = nnx.List(Block(rngs) for _ in range(depth))
        self.head = nnx.Linear(WIDTH, 8, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_step(transform, batch, depth=4):
    model = transform(nnx.eval_shape(lambda: Net(depth, nnx.Rngs(0))))
    return _step(transform, model), (model, jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32))


def _step(transform, model):
    graphdef, _ = nnx.split(model)

    def step(model, x):
        def gradient(total, x):
            def loss(state):
                return jnp.square(nnx.merge(graphdef, state)(x)).mean()

            return jax.tree.map(jnp.add, total, jax.grad(loss)(state)), None

        _, state = nnx.split(model)
        zeros = jax.tree.map(jnp.zeros_like, state)
        if transform.micro_batches == 1:
            return gradient(zeros, x)[0]
        return jax.lax.scan(gradient, zeros, x.reshape(transform.micro_batches, -1, WIDTH))[0]

    return jax.jit(step, compiler_options=jc.memory.compiler_options())


def _loss(model, x):
    return jnp.square(model(x)).mean()


DATA = (_loss, Net(4, nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (256, WIDTH)))


def _total(strategy, target="cpu"):
    step, arguments = make_step(strategy, BATCH)
    return jc.memory.analyze(step, *arguments, target=target).total_bytes


def test_plans_fit_and_take_longer_within_less():
    plain = _total(jc.planning.Strategy.parse("plain"))
    before = 0.0
    for fraction in (1.1, 0.8, 0.6, 0.45):
        budget = int(fraction * plain)
        actions = ("keep", "quantize", "recompute")
        plan = fit(make_step, batch=BATCH, budget=budget, target="cpu", actions=actions)
        assert _total(plan.strategy) == plan.total_bytes <= budget
        assert plan.milliseconds >= 0.98 * before
        before = plan.milliseconds
        fitting = [c.milliseconds for c in plan.frontier if c.fits]
        assert plan.milliseconds == min(fitting)
        assert len(plan.frontier) <= 8
        assert (plan.name == "plain") == (fraction > 1)


def test_a_plan_is_mixed_saved_and_verified(tmp_path):
    budget = int(0.6 * _total(jc.planning.Strategy.parse("plain")))
    plan = fit(
        make_step,
        batch=BATCH,
        budget=budget,
        target="cpu",
        actions=("keep", "quantize"),
        pin={"blocks/0/.*": "keep", "blocks/3/.*": "quantize:bits=8"},
    )
    chosen = {part.group: part.action for part in plan.parts}
    assert chosen["blocks/0/mlp"] == "keep"
    assert chosen["blocks/3/mlp"] == "quantize:bits=8"
    plan.save(tmp_path / "plan.json")
    loaded = FittedPlan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.verify(make_step).total_bytes == plan.total_bytes
    model = jc.compress(Net(4, nnx.Rngs(0)), loaded.policy)
    listed = {v.path: v.decision for v in jc.plan(model, jnp.ones((BATCH, WIDTH))).values}
    assert "bits=8" in listed["blocks/3/mlp"]
    assert listed["blocks/0/mlp"] == "exact"
    with pytest.raises(ValueError, match=r"gone: blocks/3, blocks/3/mlp; new: none"):
        loaded.verify(lambda transform, batch: make_step(transform, batch, depth=3))
    with pytest.raises(ValueError, match="expected JSON"):
        FittedPlan.from_json("{}")
    assert "blocks/*/mlp" in str(plan)
    plan.draw(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_micro_batches_fit_where_nothing_else_is_allowed():
    budget = int(0.7 * _total(jc.planning.Strategy.parse("plain")))
    plan = fit(make_step, batch=BATCH, budget=budget, target="cpu", actions=("keep", "accumulate"))
    assert plan.spec.startswith("accumulate:")
    assert plan.strategy.micro_batches >= 2


def test_a_plan_may_split_the_batch_too():
    budget = int(0.5 * _total(jc.planning.Strategy.parse("plain")))
    plan = fit(
        make_step,
        batch=BATCH,
        budget=budget,
        target="cpu",
        actions=("keep", "quantize", "accumulate"),
    )
    assert any(point.name.endswith("accumulate:2") for point in plan.frontier)
    assert _total(plan.strategy) == plan.total_bytes <= budget
    assert FittedPlan.from_json(plan.to_json()).strategy == plan.strategy


def test_micro_batches_are_not_for_batch_norms():
    def normed(transform, batch):
        model = nnx.Sequential(
            nnx.Linear(WIDTH, 512, rngs=nnx.Rngs(0)),
            nnx.BatchNorm(512, use_running_average=False, rngs=nnx.Rngs(0)),
            nnx.Linear(512, 4, rngs=nnx.Rngs(0)),
        )
        model = transform(model)
        return _step(transform, model), (model, jax.ShapeDtypeStruct((batch, WIDTH), "f4"))

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
    plan = fit(make_step, **given, pin={"blocks/1/mlp": "quantize:bits=3"})
    assert {p.group for p in plan.parts if p.action == "quantize:bits=3"} == {"blocks/1/mlp"}
    plan = fit(make_step, **given, pin={"head": "keep"})
    assert plan.spec == "plain"
    plan = fit(make_step, **given, actions=("quantize",), bits=(4,))
    assert plan.name == "quantize:bits=4"


def test_nothing_fits():
    with pytest.raises(DoesNotFitError, match=r"nothing fits; the least is .* are arguments"):
        fit(make_step, batch=BATCH, budget="1.2MiB", target="cpu", compiles=3)


def test_interrupting_returns_the_best_so_far():
    names = []

    def progress(name):
        names.append(name)
        if len(names) == 3:
            raise KeyboardInterrupt
        return jax.ensure_compile_time_eval()

    budget = int(0.6 * _total(jc.planning.Strategy.parse("plain")))
    plan = fit(make_step, batch=BATCH, budget=budget, target="cpu", progress=progress)
    assert plan.name == names[1] == "quantize:bits=4"
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
        ({"pin": {"head": "quantize:bits=4"}, "actions": ("keep",)}, "expected one of"),
        ({"pin": {"blocks/0/mlp/layers/0": "keep", "blocks/0/mlp": "recompute"}}, "by another"),
        ({"batch": 0}, "expected a multiple of 1"),
        ({"target": "h100:x"}, "expected h100:COUNT"),
        ({"target": "rtx3060-12gb", "budget": "13GiB"}, "rtx3060-12gb has 11.8 GiB"),
    ],
)
def test_bad_input_is_told_before_any_compilation(changed, message):
    def progress(name):
        raise AssertionError(f"{name} is compiled")

    given = {"batch": BATCH, "budget": "8MiB", "target": "cpu", "progress": progress} | changed
    with pytest.raises(ValueError, match=message):
        fit(make_step, **given)


def test_the_largest_batch_has_a_plan():
    budget = _total(jc.planning.Strategy.parse("plain"))
    given = {"budget": budget, "target": "cpu", "actions": ("keep", "quantize")}
    batch = largest_batch(make_step, **given, multiple=64)
    assert batch > 1.3 * BATCH
    assert fit(make_step, batch=batch, **given).total_bytes <= budget
    with pytest.raises(DoesNotFitError):
        fit(make_step, batch=batch + 128, **given)


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
            self.net = Net(4, nnx.Rngs(0))

        def encode(self, x):
            return self.net(x)

    def methods(transform, batch):
        model = transform(nnx.eval_shape(Encoder))
        step = jax.jit(
            nnx.grad(lambda model, x: jnp.square(model.encode(x)).mean()),
            compiler_options=jc.memory.compiler_options(),
        )
        return step, (model, jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32))

    budget = int(0.6 * _total(jc.planning.Strategy.parse("plain")))
    plan = fit(methods, batch=BATCH, budget=budget, target="cpu")
    assert plan.spec == "remat"
    assert any("quantize:bits=4 failed: TypeError" in note for note in plan.notes)


def test_recomputed_blocks_start_from_what_they_keep():
    totals = {}
    for number in (0, 4):
        choice = {f"blocks/{i}": "recompute" if i < number else "keep" for i in range(4)}
        choice |= {f"{block}/mlp": what for block, what in choice.items()}
        policy = policy_of(choice | {"head": "keep", "": "keep"}, False)
        totals[number] = _total(jc.planning.Strategy.of(policy))
    assert totals[4] < 0.45 * totals[0]


def test_a_step_without_a_gradient():
    def forward(transform, batch):
        model = transform(nnx.eval_shape(lambda: Net(1, nnx.Rngs(0))))
        return lambda model, x: model(x), (model, jax.ShapeDtypeStruct((batch, WIDTH), "f4"))

    with pytest.raises(ValueError, match="expected a step that takes a gradient"):
        fit(forward, batch=8, budget="1GiB", target="cpu")
    with pytest.raises(TypeError, match="expected bytes"):
        bytes_of(1.5)
    with pytest.raises(TypeError, match="expected a sequence of integers"):
        fit(forward, batch=8, budget="1GiB", target="cpu", bits=(4.0,))
    with pytest.raises(TypeError, match="expected a dict"):
        fit(forward, batch=8, budget="1GiB", target="cpu", pin="head")


def test_groups_and_their_patterns():
    groups = Groups.of([nnx.eval_shape(lambda: Net(12, nnx.Rngs(0)))], None)
    assert groups.group_of("blocks/11/mlp/layers/0") == "blocks/11/mlp"
    assert groups.group_of("blocks/3/norm") == "blocks/3"
    assert groups.group_in("jit/Net/blocks/10/mlp/layers/2/dot") == "blocks/10/mlp"
    assert groups.group_in("vmap/other") == ""
    assert pattern_of(["blocks/10/mlp", "blocks/2/mlp"]) == "(blocks/(2|10))/mlp"
    assert pattern_of(["head", "a.b"]) == r"(a\.b|head)"
    policy = policy_of({"blocks/0": "keep", "blocks/0/mlp": "quantize:bits=4", "": "keep"}, False)
    paths = list(dict.fromkeys(rule.path for rule in policy.rules))
    assert paths == ["(blocks/(0))/mlp(/.*)?", "(blocks/(0))(?!(/mlp)(/|$))(/.*)?", "()", ""]


def test_what_is_kept_leaves_operations_of_other_groups():
    """An attention in a block that is kept, or beside what no module computes, is still coded."""
    inner = ["Net/blocks_0/attn", "Net/blocks_1/attn"]
    outer = ["", "Net", "Net/head", "Net/blocks_0", "Net/blocks_1"]
    policy = policy_of(
        dict.fromkeys(outer, "keep") | dict.fromkeys(inner, "quantize:bits=4"), False
    )

    def is_kept(path):
        found = (r for r in policy.rules if r.op and r.matches_layer(path, "attention"))
        return next((rule.action == "keep" for rule in found), False)

    assert not any(map(is_kept, [*inner, "Net/blocks_1/attn/scores", "other"]))
    assert all(map(is_kept, [*outer, "Net/blocks_1/mlp", "Net/blocks_1/attn_norm"]))


class _Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        for i in range(4):
            y = linen.LayerNorm(name=f"norm_{i}")(x)
            y = linen.Dense(4 * WIDTH, name=f"up_{i}")(y)
            x = x + linen.Dense(WIDTH, name=f"down_{i}")(jax.nn.gelu(y))
        return linen.Dense(8, name="head")(x)


def _of_linen(transform, batch):
    model = _Linen()
    x = jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32)
    apply = transform(model.apply)
    step = jax.grad(lambda variables, x: jnp.square(apply(variables, x)).mean())
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    return jax.jit(step, compiler_options=jc.memory.compiler_options()), (variables, x)


def test_groups_of_a_linen_model_are_its_scopes():
    step, arguments = _of_linen(jc.planning.Strategy.parse("plain"), BATCH)
    plain = jc.memory.analyze(step, *arguments, target="cpu").total_bytes
    given = {"batch": BATCH, "budget": int(0.7 * plain), "target": "cpu", "bits": (8,)}
    plan = fit(_of_linen, actions=("keep", "quantize"), **given)
    actions = {part.group: part.action for part in plan.parts}
    assert {"_Linen", "_Linen/up_0", "_Linen/norm_2"} <= actions.keys()
    assert set(actions.values()) == {"keep", "quantize:bits=8"}
    assert plan.verify(_of_linen).total_bytes == plan.total_bytes
    plan = fit(_of_linen, pin={"_Linen/up_.*": "quantize:bits=8"}, **given)
    assert {p.action for p in plan.parts if "up_" in p.group} == {"quantize:bits=8"}


def test_what_is_kept_is_estimated_where_the_plain_step_is_rejected():
    step, arguments = make_step(jc.planning.Strategy.parse("plain"), 8)
    report = jc.memory.analyze(step, *arguments, target="cpu")
    rejected = Probe(report, 2.0, {"a": 1000}, {}, {}, ())
    moments = (Moment("backward pass", 10.0, {"a": 1.0}),)
    coded = Probe(report, 1.0, {"a": 100}, {"a": 110}, {"a": 1.0}, moments)
    known = Known(rejected, coded, 4, {4: {"a": 100}, 2: {"a": 50}}, None, True)
    choices = make_problem(known, {}, resolve("cpu")).choices["a"]
    assert choices["keep"].bytes == pytest.approx(1100)
    assert choices["quantize:bits=2"].bytes == pytest.approx(55)
    assert choices["keep"].seconds == 1.0


def test_all_values_in_few_bits_are_the_last_resort(monkeypatch):
    monkeypatch.setattr(_plans, "improve", lambda *arguments: [])  # as if no plan fitted
    given = {"batch": BATCH, "target": "cpu", "actions": ("quantize",)}
    four = fit(make_step, **given, budget="1GiB", bits=(4,)).total_bytes
    plan = fit(make_step, **given, budget=four - 1)
    assert plan.name in ("quantize:bits=3", "quantize:bits=2")
    assert plan.total_bytes < four


def test_plans_keep_to_a_limit_of_noise():
    budget = int(0.6 * _total(jc.planning.Strategy.parse("plain")))
    given = {"batch": BATCH, "target": "cpu", "actions": ("keep", "quantize"), "data": DATA}
    given |= {"bits": (8, 4)}
    free = fit(make_step, budget=budget, **given)
    quiet = fit(make_step, budget=budget, noise=free.noise / 4, **given)
    assert quiet.noise <= free.noise / 4
    assert quiet.milliseconds >= free.milliseconds
    for plan in (free, quiet):
        model = jc.compress(nnx.clone(DATA[1]), plan.policy)
        report = jc.check_gradients(_loss, model, DATA[2], draws=6)
        assert report.noise_over_sgd == pytest.approx(plan.noise, rel=0.4)
        assert FittedPlan.from_json(plan.to_json()) == plan
        assert f"estimated noise of the gradient: {plan.noise:.3f} of SGD's" in str(plan)
    with pytest.raises(DoesNotFitError, match=r"nothing fits with so little noise; .* fits, with"):
        fit(make_step, budget=budget, noise=1e-4, **given)


def test_noise_is_measured_on_a_small_batch_too():
    """Values that are too small for a code in the small batch are not in the step's."""
    budget = int(0.6 * _total(jc.planning.Strategy.parse("plain")))
    given = {"batch": BATCH, "target": "cpu", "actions": ("keep", "quantize"), "budget": budget}
    small = (*DATA[:2], DATA[2][:32])
    assert fit(make_step, data=small, **given).noise > 0.01


def test_no_answer_is_told_of_what_does_not_keep_to_a_pin():
    pin = {"blocks/0": "quantize:bits=8"}
    with pytest.raises(DoesNotFitError, match="which does not keep to pin and actions, with"):
        fit(make_step, batch=BATCH, budget="20MiB", target="cpu", pin=pin, compiles=2)


def test_values_are_offloaded_where_nothing_else_fits(capsys):
    pytest.importorskip("jax_cuda13_plugin")
    make = functools.partial(make_step, depth=6)
    actions = ("quantize", "offload")
    plan = fit(make, batch=16384, target="h100", budget="90MiB", actions=actions, bits=(8,))
    with capsys.disabled():
        print(f"\n{plan}")
    actions = {part.action for part in plan.parts}
    assert "offload:quantize:bits=8" in actions | {plan.name}
    report = plan.verify(make)
    assert plan.total_bytes == report.total_bytes <= plan.budget_bytes
    link = report.host_traffic_bytes / resolve("h100").link_bandwidth
    assert 1e3 * link < plan.milliseconds


def test_the_fastest_of_what_was_run_is_chosen(monkeypatch):
    budget = int(0.6 * _total(jc.planning.Strategy.parse("plain")))
    given = {"batch": BATCH, "target": "cpu", "budget": budget, "actions": ("keep", "quantize")}
    plan = fit(make_step, calibrate=True, **given)
    timed = {c.name: c.measured_milliseconds for c in plan.frontier if c.measured_milliseconds}
    assert 2 <= len(timed) <= 3
    assert timed[plan.name] == min(timed.values()) > 0
    monkeypatch.setattr(
        "jaxcomp.planning._search.measured_seconds",
        lambda make_step, strategy, batch: 1.0 if _is_uniform(strategy) else 2.0,
    )
    assert fit(make_step, calibrate=True, **given).name == "quantize:bits=4"


def _is_uniform(strategy):
    return not any(rule.path for rule in strategy.policy.rules)


def test_steps_for_an_absent_target_are_compiled_at_once(monkeypatch):
    pytest.importorskip("jax_cuda13_plugin")
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    at_once = []

    class Pool(ThreadPoolExecutor):
        def submit(self, *args):
            at_once.append(args[0].__name__)
            return super().submit(*args)

    monkeypatch.setattr("jaxcomp.planning._search.ThreadPoolExecutor", Pool)
    make = functools.partial(make_step, depth=3)
    plan = fit(make, batch=8192, target="h100", budget="40MiB", bits=(4,), compiles=4)
    assert at_once == ["_probe", "_probe"]
    assert {"quantize:bits=4", "remat"} <= {c.name for c in plan.frontier}


def test_what_cannot_be_traced_at_once_is_told_in_its_turn(monkeypatch):
    """A function whose blocks are not recomputed has no `remat`."""
    pytest.importorskip("jax_cuda13_plugin")
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    with pytest.raises(DoesNotFitError, match="remat failed: ValueError: make_step is expected to"):
        fit(_of_linen, batch=BATCH, target="h100", budget="3MiB", bits=(4,), compiles=3)


def test_offloading_needs_a_known_link():
    with pytest.raises(DoesNotFitError, match="no offload: the bandwidth between cpu and its host"):
        fit(make_step, batch=BATCH, budget="1.2MiB", target="cpu", actions=("offload",))


def test_a_plan_prints_its_frontier():
    plan = FittedPlan(
        "h100", 8, 2**30, "plan 1", jc.Policy(()), "", 1, 2**29, 1.5, (), (), "the peak is here"
    )
    assert str(plan).startswith("plan 1: JAX")
    assert "512.0 MiB of 1.0 GiB on h100, batch 8" in str(plan)
    assert dataclasses.replace(plan, policy=None, spec="remat").strategy.remat
