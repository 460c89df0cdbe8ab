import csv
import io
import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from rich.console import Console

import jaxcomp as jc
from jaxcomp.memory import CompileError
from jaxcomp.planning import _comparison as comparison
from jaxcomp.planning import compare
from jaxcomp.planning._users_frames import place


def block():
    return nnx.Sequential(jc.nn.Linear(32, 32, rngs=nnx.Rngs(0)), jnp.sin)


def make_step(transform, batch):
    model = transform(nnx.eval_shape(lambda: nnx.Sequential(block(), block(), block())))
    part = batch // transform.micro_batches

    def step(model, x):
        def gradient(x):
            return nnx.grad(lambda model, x: model(x).sum())(model, x)

        parts = (x[i : i + part] for i in range(0, batch, part))
        return jax.tree.map(lambda *grads: sum(grads), *map(gradient, parts))

    jitted = jax.jit(step, compiler_options=jc.memory.compiler_options())
    return jitted, (model, jax.ShapeDtypeStruct((batch, 32), jnp.float32))


def test_rows_are_the_reports_of_their_steps():
    names = ["plain", "remat", "accumulate:2", "quantize:bits=2"]
    table = compare(make_step, names, batch=64, target="cpu", capacity=2**20)
    assert [row.name for row in table.rows] == names
    plain, remat, accumulate, quantize = (row.report for row in table.rows)
    for row in table.rows:
        step, arguments = make_step(jc.planning.Strategy.parse(row.name), 64)
        alone = jc.memory.analyze(step, *arguments, target="cpu", capacity=2**20)
        same = alone.to_dict() | {"compile_seconds": row.report.compile_seconds}
        assert row.report.to_dict() == same
    assert remat.flops > plain.flops
    assert remat.declared_residual_bytes < plain.declared_residual_bytes
    assert quantize.declared_residual_bytes < plain.declared_residual_bytes
    assert accumulate.flops == plain.flops


def test_table_json_and_verdict():
    table = compare(make_step, ["plain", "remat"], batch=64, target="cpu", capacity=2**20)
    text = table._repr_markdown_().splitlines()
    assert text[0].startswith("| row ")
    assert text[2].split("|")[6].strip() == "1.00"
    assert text[-1].startswith("Answer: plain. The step fits as it is: it needs ")
    assert text[-1].endswith(" of the 1.0 MiB of cpu. Nothing needs to be changed.")
    content = json.loads(table.to_json())
    assert content["verdict"] == text[-1]
    assert content["made"]["jax"] == jax.__version__
    rows = content["rows"]
    header, first, _ = csv.reader(table.to_csv().splitlines())
    assert dict(zip(header, first, strict=True))["total_bytes"] == str(rows[0]["total_bytes"])
    wanted = (
        "row target batch declared_residual_bytes argument_bytes temp_bytes peak_bytes total_bytes "
        "hbm_traffic_bytes compile_seconds"
    )
    assert set(wanted.split()) <= set(rows[0])
    assert (rows[1]["row"], rows[1]["batch"], rows[1]["target"]) == ("remat", 64, "cpu")


def test_a_terminal_has_five_columns_of_80():
    table = compare(make_step, ["plain", "remat"], batch=64, target="cpu", capacity="1MiB")
    console = Console(width=80, force_terminal=False, file=io.StringIO())
    console.print(table)
    lines = console.file.getvalue().splitlines()
    assert lines[1].split("  ")[0].strip() == "row"
    assert all(name in lines[1] for name in ("needs", "/ plain", "traffic / plain", "fits"))
    assert lines[3].strip().startswith("plain ") and lines[3].strip().endswith(" free")
    assert max(map(len, lines)) <= 80
    assert "Answer: plain." in console.file.getvalue()


def test_no_row_fits_or_nobody_knows():
    table = compare(make_step, ["plain"], batch=64, target="cpu", capacity=10)
    assert table.answer() is None
    assert str(table).splitlines()[-1].startswith("Nothing fits the 10 B of cpu; plain needs the")
    table = compare(make_step, ["plain"], batch=64, target="cpu")
    assert str(table).endswith("is not known: give a capacity, such as 11GiB.")


def test_rows_that_need_a_flag_have_a_line(monkeypatch):
    def flagged(*args, **kwargs):
        found = analyze_step(*args, **kwargs)
        return found._replace(report=replace(found.report, xla_flag="--xla_flag=1"))

    analyze_step = comparison.analyze_step
    monkeypatch.setattr(comparison, "analyze_step", flagged)
    table = compare(make_step, ["plain", "remat"], batch=8, target="cpu", capacity=2**30)
    assert "plain, remat: compiled with --xla_flag=1" in str(table).splitlines()


def test_a_row_fits_whose_traffic_is_not_known(monkeypatch):
    def unknown(*args, **kwargs):
        found = analyze_step(*args, **kwargs)
        return found._replace(report=replace(found.report, hbm_traffic_bytes=None))

    analyze_step = comparison.analyze_step
    monkeypatch.setattr(comparison, "analyze_step", unknown)
    text = str(compare(make_step, ["plain"], batch=8, target="cpu", capacity=2**30))
    assert "Answer: plain. The step fits as it is" in text


def test_a_step_that_does_not_trace_is_an_error_of_its_row():
    def broken(transform, batch):
        step, arguments = make_step(transform, batch)
        return step, arguments if transform.is_plain else (*arguments, jnp.ones(3))

    plain, remat = compare(broken, ["plain", "remat"], batch=8, target="cpu").rows
    assert plain.report and "argument" in remat.error
    table = compare(broken, ["remat"], batch=8, target="cpu", capacity=2**30)
    assert str(table).endswith("No row could be compiled.")


def test_largest_batch():
    table = compare(
        make_step, ["plain", "remat"], batch=8, target="cpu", capacity=2**18, largest_batch=True
    )
    plain, remat = (row.max_batch for row in table.rows)
    assert 8 < plain < remat
    step, arguments = make_step(jc.planning.Strategy.parse("plain"), plain)
    assert jc.memory.analyze(step, *arguments, target="cpu", capacity=2**18).fits


def test_a_compiler_that_fails_is_an_error_of_its_row(monkeypatch):
    def fail(step, *args, **kwargs):
        raise CompileError("no such instruction")

    monkeypatch.setattr(comparison, "analyze_step", fail)
    table = compare(make_step, ["plain"], batch=8, target="cpu")
    assert table.rows[0].report is None
    assert "plain failed: no such instruction" in str(table)
    assert table.to_dict()["rows"][0]["error"] == "no such instruction"


ERRORS = (
    ZeroDivisionError("0"),
    KeyError("k"),
    AssertionError(),
    MemoryError("m"),
    StopIteration(),
)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_any_error_of_the_users_code_costs_one_row(error):
    def failing(transform, batch):
        if transform.spec == "remat":
            raise error
        return make_step(transform, batch)

    plain, remat = compare(failing, ["plain", "remat"], batch=8, target="cpu").rows
    assert plain.report is not None
    assert remat.exception is error
    assert remat.error.startswith(type(error).__name__)
    assert "remat failed: " in str(compare(failing, ["remat"], batch=8, target="cpu"))
    assert place(remat.exception).startswith("test_comparison.py:")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda b: None, r"a function of \(transform, batch\), this one takes \(b\)"),
        (lambda transform, batch: None, "make_step returned NoneType, expected"),
        (lambda transform, batch: (jnp.sin, 1, 2), "returned 3 values, .* into one tuple"),
        (lambda transform, batch: (jnp.sin, jnp.ones(3)), "returned 2 values"),
    ],
)
def test_factories_of_another_kind_are_told(factory, message):
    (row,) = compare(factory, ["plain"], batch=8, target="cpu").rows
    assert re.search(message, row.error), row.error


def test_progress_sees_each_row():
    seen = []

    class Progress:
        def __init__(self, name):
            seen.append(name)

        __enter__ = __exit__ = lambda self, *args: None

    compare(make_step, ["plain", "remat"], batch=8, target="cpu", progress=Progress)
    assert seen == ["plain", "remat"]


def test_a_factory_that_ignores_the_way_is_found_out():
    def ignore(transform, batch):
        return make_step(jc.planning.Strategy.parse("plain"), batch)

    def transform_only(transform, batch):
        transform(nnx.Sequential(nnx.Linear(1, 1, rngs=nnx.Rngs(0))))
        return ignore(transform, batch)

    plain, accumulate = compare(
        transform_only, ["plain", "accumulate:2"], batch=8, target="cpu"
    ).rows
    assert plain.report is not None
    assert accumulate.report is None
    assert "split the batch" in accumulate.error
    _, dots = compare(transform_only, ["plain", "remat:dots"], batch=8, target="cpu").rows
    assert dots.error.startswith("made no difference to the step: of the model's modules in lists")
    rows = ["accumulate:2", "accumulate:2:remat"]
    for row in compare(transform_only, rows, batch=8, target="cpu").rows:
        assert row.error.startswith("make_step is expected to split the batch into")
    (row,) = compare(ignore, ["remat"], batch=8, target="cpu").rows
    assert row.error == "make_step is expected to call transform(model)"


def test_a_factory_may_recompute_its_own_way():
    """As for layers under `nnx.scan`, which are in no list."""

    def own(transform, batch):
        recomputes = transform.remat
        linear = nnx.eval_shape(lambda: nnx.Linear(32, 32, rngs=nnx.Rngs(0)))
        model = replace(transform, remat=False)(linear)

        def layer(model, x):
            return jnp.sin(jnp.sin(model(x)))

        def loss(model, x):
            return jnp.square((nnx.remat(layer) if recomputes else layer)(model, x)).sum()

        return nnx.grad(loss), (model, jax.ShapeDtypeStruct((batch, 32), jnp.float32))

    plain, remat = compare(own, ["plain", "remat"], batch=64, target="cpu").rows
    assert remat.report.declared_residual_bytes < plain.report.declared_residual_bytes


def test_a_row_that_does_not_fit_the_model_leaves_the_others():
    table = compare(make_step, ["plain", "pooling:window=2"], batch=8, target="cpu")
    assert table.rows[0].report is not None
    assert "pooling:window=2 failed: " in str(table)
    assert "matches nothing" in table.rows[1].error


def test_without_plain_there_are_no_ratios():
    assert "no plain row" in str(compare(make_step, ["remat"], batch=8, target="cpu"))


@pytest.mark.parametrize(
    ("rows", "batch", "error"),
    [
        ([], 8, r"rows=\[\]: expected a list of at least one"),
        (["plain", "plain"], 8, "expected each once"),
        (["plane"], 8, "strategy='plane' is unknown; did you mean 'plain'"),
        (["accumulate:3"], 8, "batch=8: expected a multiple of 3"),
        ("plain", 8, "rows='plain': expected a list"),
    ],
)
def test_bad_input(rows, batch, error):
    with pytest.raises(ValueError, match=error):
        compare(make_step, rows, batch=batch, target="cpu")


def test_largest_batch_of_unknown_memory_is_an_error_at_once():
    with pytest.raises(ValueError, match="its memory is not known; give a capacity"):
        compare(make_step, ["plain"], batch=8, target="cpu", largest_batch=True)


def test_unknown_target():
    with pytest.raises(ValueError, match="target='h101' is unknown"):
        compare(make_step, ["plain"], batch=8, target="h101")


@pytest.mark.aot
def test_ratios_are_to_the_plain_step_without_recomputation_by_xla():
    pytest.importorskip("jax_cuda13_plugin")

    def at_the_limit(transform, batch):
        def layer():
            return nnx.Sequential(nnx.Linear(256, 256, rngs=nnx.Rngs(0)), jnp.sin)

        model = transform(nnx.eval_shape(lambda: nnx.Sequential(*(layer() for _ in range(4)))))
        gradient = nnx.grad(lambda model, x: model(x).sum())
        return gradient, (model, jax.ShapeDtypeStruct((batch, 256), jnp.float32))

    table = compare(at_the_limit, ["plain", "remat"], batch=2**21, target="rtx3060-12gb")
    plain, remat = table.rows
    assert plain.report.xla_recomputes
    assert not (plain.undisturbed.xla_recomputes or remat.report.xla_recomputes)
    assert plain.report.total_bytes < 0.9 * plain.undisturbed.total_bytes
    lines = str(table).splitlines()
    assert lines[2].startswith("| plain * ")
    ratios = [float(line.split("|")[6]) for line in lines[2:4]]
    expected = [row.report.total_bytes / plain.undisturbed.total_bytes for row in table.rows]
    assert ratios == pytest.approx(expected, abs=0.005)
    assert any("* XLA recomputes values" in line for line in lines)


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + jnp.sin(linen.Dense(32)(jnp.sin(linen.Dense(32)(x))))


def test_a_factory_of_a_linen_model_passes_the_function():
    x = jax.ShapeDtypeStruct((1024, 32), jnp.float32)

    def make_linen_step(transform, batch, recompute=None):
        block = LinenBlock
        if transform.remat if recompute is None else recompute:
            block = linen.remat(LinenBlock, policy=transform.remat_policy)
        model = linen.Sequential([block() for _ in range(3)])
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        forward = transform(model.apply)
        return jax.jit(jax.grad(lambda v, x: forward(v, x).sum())), (variables, x)

    rows = ["plain", "remat", "quantize:bits=4"]
    table = compare(make_linen_step, rows, batch=1024, target="cpu")
    plain, remat, quantize = (row.report.declared_residual_bytes for row in table.rows)
    assert remat == 2 * 1024 * 32 * 4 < quantize < plain / 4

    def forgets(transform, batch):
        return make_linen_step(transform, batch, recompute=False)

    def misuses(transform, batch):
        return transform(LinenBlock()), (x,)

    plain, remat = compare(forgets, ["plain", "remat"], batch=1024, target="cpu").rows
    assert plain.report is not None
    assert "apply jax.checkpoint to its blocks where transform.remat is true" in remat.error
    (row,) = compare(misuses, ["quantize:bits=4"], batch=1024, target="cpu").rows
    assert row.error.startswith("model of type LinenBlock: expected a function of its variables")
    (row,) = compare(make_linen_step, ["boundary:quantize:bits=4"], batch=8, target="cpu").rows
    assert "expected a Flax NNX model, not a function" in row.error
