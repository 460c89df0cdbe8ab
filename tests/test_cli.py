import contextlib
import importlib.metadata
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import pytest
from typer.testing import CliRunner

import jaxcomp
from experiments.checks.failing_rows import LONG_STEP
from jaxcomp import planning
from jaxcomp.__main__ import main
from jaxcomp.cli import _doctor, app
from jaxcomp.memory import _answers as answers

FACTORY = """
import jax, jax.numpy as jnp
from flax import nnx

def make_step(transform, batch):
    def block():
        return nnx.Sequential(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), jnp.sin)
    model = transform(nnx.eval_shape(lambda: nnx.Sequential(block(), block())))
    step = nnx.jit(nnx.grad(lambda model, x: model(x).sum()))
    return step, (model, jax.ShapeDtypeStruct((batch, 32), jnp.float32))

def failing(transform, batch):
    if transform.spec == "remat":
        raise KeyError("of the user")
    return make_step(transform, batch)

def broken(transform, batch):
    raise KeyError("of the user")

number = 1
"""
OWN_STEPS = """
import functools
import jax, jax.numpy as jnp, optax
from flax import linen, nnx
from flax.training.train_state import TrainState

x = jnp.ones((64, 32))

@nnx.jit
def nnx_step(state, x):
    def loss(model):
        return jnp.square(model(x)).mean()

    state["optimizer"].update(state["model"], nnx.grad(loss)(state["model"]))

def nnx_arguments():
    linear, rngs = nnx.Linear, nnx.Rngs(0)
    model = nnx.Sequential(linear(32, 64, rngs=rngs), nnx.gelu, linear(64, 32, rngs=rngs))
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)}, x

@jax.jit
def linen_step(state, x):
    def loss(params):
        return jnp.square(state.apply_fn({"params": params}, x)).mean()

    return state.apply_gradients(grads=jax.grad(loss)(state.params))

def linen_arguments():
    net = linen.Sequential([linen.Dense(64), linen.gelu, linen.Dense(32)])
    params = net.init(jax.random.key(0), x)["params"]
    assert float(params["layers_0"]["kernel"].sum()) != 0  # which needs its value
    return TrainState.create(apply_fn=net.apply, params=params, tx=optax.sgd(0.1)), x

@functools.partial(jax.jit, static_argnums=2)
def tree_step(params, x, power):
    return jax.grad(lambda params: jnp.sum((x @ params["w"]) ** power))(params)

def tree_arguments():
    return {"w": jnp.ones((32, 32))}, x, 3

tree = tree_arguments()
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_factory.py").write_text(FACTORY)
    (tmp_path / "own.py").write_text(OWN_STEPS)
    return lambda *args, command="memory": CliRunner().invoke(app, [command, *args])


def test_a_factory_of_ones_own(run, tmp_path):
    options = ["--batch", "64", "--target", "cpu", "--capacity", "1MiB"]
    files = ["--json", "table.json", "--csv", "table.csv", "--html", "page.html"]
    result = run("my_factory:make_step", "plain", "remat", *options, *files)
    assert result.exit_code == 0, result.output
    assert "| plain " in result.output
    assert "Answer: plain. The step fits as it is" in result.output
    assert (tmp_path / "table.csv").read_text().startswith("row,batch,target,")
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [row["row"] for row in rows] == ["plain", "remat"]
    page = (tmp_path / "page.html").read_text()
    assert "plain" in page and "remat" in page


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("nnx_step --args own:nnx_arguments", ["plain", "quantize:bits=4"]),
        ("linen_step --args own:linen_arguments", ["plain", "quantize:bits=4"]),
        ("tree_step --args own:tree_arguments", ["plain"]),
        ("tree_step --args own:tree", ["plain"]),
    ],
)
def test_a_step_of_ones_own(run, tmp_path, kind, rows):
    step, *arguments = kind.split()
    result = run(f"own:{step}", *rows, *arguments, "--target", "cpu", "--json", "table.json")
    assert result.exit_code == 0, result.output
    plain, *others = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert plain["batch"] is None and plain["error"] is None
    for row in others:
        assert 3 * row["declared_residual_bytes"] < plain["declared_residual_bytes"]


def test_default_rows_of_a_factory_of_ones_own(run, tmp_path):
    result = run("my_factory:make_step", "--batch", "1024", "--target", "cpu", "--json", "t.json")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert [row["row"] for row in rows] == ["plain", "remat", "remat:dots", "quantize:bits=4"]
    assert rows[3]["error"] is None


@pytest.mark.parametrize(("options", "platforms"), [(["--target", "cpu"], "cpu"), ([], "cpu,cuda")])
def test_a_named_target_needs_no_device(run, monkeypatch, options, platforms):
    before = jax.config.jax_platforms
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    jax.config.update("jax_platforms", "cpu,cuda")
    try:
        result = run("my_factory:make_step", "plain", *options)
        assert (result.exit_code, jax.config.jax_platforms) == (0, platforms)
    finally:
        jax.config.update("jax_platforms", before)


def test_the_cache_can_be_turned_off(run):
    assert answers.folder() is not None
    try:
        assert run("my_factory:make_step", "plane", "--target", "cpu", "--no-cache").exit_code == 2
        assert answers.folder() is None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.parametrize("at", ["remat", "plain, dropped"])
def test_interrupt_keeps_finished_rows(run, tmp_path, monkeypatch, at):
    apply = planning.Strategy.__call__

    def interrupted(strategy, model):
        if strategy.spec == "plain" and at == "plain, dropped":
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        if strategy.spec == "remat":
            written = json.loads((tmp_path / "table.json").read_text())["rows"]
            assert [row["row"] for row in written] == ["plain"]
            signal.raise_signal(signal.SIGINT)
        return apply(strategy, model)

    monkeypatch.setattr(planning.Strategy, "__call__", interrupted)
    options = ["--batch", "64", "--target", "cpu", "--json", "table.json", "--html", "page.html"]
    result = run("my_factory:make_step", "plain", "remat", *options)
    assert result.exit_code == 130, result.output
    assert "plain: " in result.stderr and "of HBM traffic" in result.stderr
    assert "| plain " in result.stdout and "remat" not in result.stdout
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [row["row"] for row in rows] == ["plain"]
    assert "plain" in (tmp_path / "page.html").read_text()


def test_failed_rows_are_told(run):
    options = ["--batch", "64", "--target", "cpu", "--html", "page.html"]
    result = run("my_factory:make_step", "fused:bits=4", *options)  # has no such layers
    assert result.exit_code == 1
    assert "fused:bits=4: failed: " in result.stderr
    assert "| fused:bits=4 | failed " in result.stdout


def test_errors_of_a_factory_have_its_lines(run):
    options = ["--batch", "64", "--target", "cpu", "--capacity", "1MiB"]
    result = run("my_factory:failing", "plain", "remat", *options)
    assert result.exit_code == 0
    assert "remat failed: KeyError: 'of the user' (my_factory.py:14 in failing)" in result.stdout
    options = ["--batch", "64", "--target", "cpu", "--budget", "1MiB"]
    result = run("my_factory:broken", *options, command="fit")
    assert result.exit_code == 1
    assert 'my_factory.py", line 18, in broken' in result.stderr
    assert "jaxcomp/" not in result.stderr and "KeyError: 'of the user'" in result.stderr
    result = run("my_factory:broken", *options, "--traceback", command="fit")
    assert isinstance(result.exception, KeyError)


def test_a_missing_extra_is_told_before_anything_is_compiled(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(planning, "fit", None)
    options = ["--target", "cpu", "--budget", "1GiB", "--png", "plan.png"]
    result = run("my_factory:make_step", *options, command="fit")
    assert result.exit_code == 2
    assert "pip install 'jaxcomp[plot]'" in " ".join(result.output.replace("│", " ").split())


def test_lists_need_no_model(run):
    assert "resnet50\n" in run("--list-models").output
    targets = run("--list-targets", command="fit").output
    assert "h100               79.1 GiB" in targets and "v5e " in targets


def test_doctor_says_what_is_missing(monkeypatch):
    if not _doctor.is_installed("libtpu"):
        pytest.skip("needs jaxcomp[tpu-aot], whose version it shows")
    monkeypatch.setattr(_doctor, "is_installed", lambda wheel: wheel == "libtpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    output = CliRunner().invoke(app, ["doctor"]).output
    assert f"jax {jax.__version__}" in output
    assert "compiler for GPUs      not installed: pip install 'jaxcomp[gpu-aot]'" in output
    assert "compiler for TPUs      libtpu " in output
    words = " ".join(output.split())
    assert ("removes optimization barriers" in words) == (jax.__version_info__ < (0, 12))


def test_ctrl_c_while_a_cpu_step_compiles_ends_with_130(tmp_path):
    (tmp_path / "long.py").write_text(LONG_STEP)
    command = [sys.executable, "-m", "jaxcomp", "memory", "long:make_step", "plain"]
    path = str(pathlib.Path(__file__).parent.parent)
    with subprocess.Popen(
        [*command, "--target", "cpu"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "XLA_FLAGS": ""},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not children.read_text():
            assert process.poll() is None
            time.sleep(0.05)
        compiler = pathlib.Path(f"/proc/{children.read_text().split()[0]}/stat")
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == (None, "")
    assert process.returncode == 130
    deadline = time.monotonic() + 20
    with contextlib.suppress(FileNotFoundError):
        while compiler.read_text().split()[2] != "Z":  # ended, and not waited for
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == importlib.metadata.version("jaxcomp") + "\n"
    assert importlib.metadata.version("jaxcomp") == jaxcomp.__version__
    citation = (pathlib.Path(__file__).parent.parent / "CITATION.cff").read_text()
    assert f"\nversion: {jaxcomp.__version__}\n" in citation


def test_fit_writes_a_plan(run, tmp_path):
    options = ["--batch", "4096", "--target", "cpu", "--budget", "3MiB", "--json", "plan.json"]
    result = run("my_factory:make_step", *options, "--action", "recompute", command="fit")
    assert result.exit_code == 0, result.output
    plan = planning.FittedPlan.load(tmp_path / "plan.json")
    assert f": JAX {jax.__version__} lays the step out in" in result.output
    assert plan.text("plan.json") in result.output
    assert "plain: " in result.stderr and "MiB, fits, estimated " in result.stderr
    assert plan.made["command"]
    assert plan.name != "plain" and plan.strategy.is_exact


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--budget", "3"], "--budget='3': expected a number with a unit"),
        ([], "--budget=None: the memory of target='cpu' is not known; expected a budget"),
        (["--budget", "1GiB", "--pin", "head"], "expected PATH=CHOICE"),
        (["--budget", "1GiB", "--pin", "head=keep"], "--pin['head'] matches no module"),
        (["--budget", "1GiB", "--action", "quantise"], "did you mean 'quantize'?"),
    ],
)
def test_bad_input_of_fit(run, options, error):
    result = run("my_factory:make_step", "--target", "cpu", *options, command="fit")
    assert result.exit_code == 2
    words = " ".join(result.output.replace("│", " ").split())
    assert error in words


def test_a_model_by_name(run):
    options = ["--batch", "8", "--image", "8", "--dtype", "float32", "--target", "cpu"]
    result = run("resnet20", "plain", *options)
    assert result.exit_code == 0, result.output
    assert "| plain " in result.output


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["resnet5"], "expected a built-in model (--list-models) or MODULE:FUNCTION; did you mean"),
        (["my_factory:number"], "number is of type int, expected a function"),
        (["my_factory:nothing"], "has no function 'nothing'"),
        (
            ["no_such_module:f"],
            "No module named 'no_such_module': there is no no_such_module.py in",
        ),
        (["my_factory:make_step", "plane"], "ROW='plane' is unknown; did you mean 'plain'?"),
        (["my_factory:make_step", "remat:bot"], "did you mean 'remat:dots'?"),
        (["my_factory:make_step", "quantize:4"], "did you mean 'quantize:bits=4'?"),
        (["my_factory:make_step", "plain", "--target", "h10"], "did you mean 'h100'?"),
        (["my_factory:make_step", "plain", "--capacity", "11"], "did you mean '11GiB'?"),
        (["my_factory:make_step", "plain", "--open"], "--open: expected --html FILE"),
        (["my_factory:make_step", "plain", "--json", "no/t.json"], "expected a file in a folder"),
        (["resnet20", "plain", "--image", "0"], "image=0"),
        (["resnet20", "plain", "--batch", "0"], "batch=0"),
        (["resnet20", "plain", "--fsdp"], "fsdp=True: expected a mesh"),
        (["my_factory:make_step", "plain", "--fsdp"], "expected a model by name"),
        (["own:tree_step"], "is jitted: expected a step factory, or the step's arguments by"),
        (["own:tree_step", "--args", "own:tree", "--batch", "8"], "--batch: expected a step fact"),
        (["own:tree_step", "--args", "own:x"], "x is a value of type ArrayImpl, expected the"),
        (["own:tree_step", "--args", "own"], "--args='own': expected MODULE:NAME"),
    ],
)
def test_bad_input(run, arguments, error):
    result = run(*arguments)
    assert result.exit_code == 2
    words = " ".join(result.output.replace("│", " ").split())
    assert error in words


def test_a_missing_extra_is_named(monkeypatch):
    for module in [name for name in sys.modules if name.startswith("jaxcomp.cli")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"needs typer: pip install 'jaxcomp\[cli\]'"):
        main()
