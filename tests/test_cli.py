import contextlib
import importlib.metadata
import json
import pathlib
import signal

import jax
import pytest
from typer.testing import CliRunner

import jaxcomp
from jaxcomp import planning
from jaxcomp.cli import app

FACTORY = """
import jax, jax.numpy as jnp
from flax import nnx

def make_step(transform, batch):
    def block():
        return nnx.Sequential(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), jnp.sin)
    model = transform(nnx.eval_shape(lambda: nnx.Sequential(block(), block())))
    step = nnx.jit(nnx.grad(lambda model, x: model(x).sum()))
    return step, (model, jax.ShapeDtypeStruct((batch, 32), jnp.float32))

number = 1
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_factory.py").write_text(FACTORY)
    return lambda *args, command="memory": CliRunner().invoke(app, [command, *args])


def test_a_factory_of_ones_own(run, tmp_path):
    options = ["--batch", "64", "--target", "cpu", "--capacity", "0.001"]
    files = ["--json", "table.json", "--html", "page.html"]
    result = run("my_factory:make_step", "plain", "remat", *options, *files)
    assert result.exit_code == 0, result.output
    assert "| plain " in result.output
    assert "Cheapest row that fits the 1.0 MiB of cpu, by HBM traffic: plain" in result.output
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [row["row"] for row in rows] == ["plain", "remat"]
    page = (tmp_path / "page.html").read_text()
    assert "plain" in page and "remat" in page


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
    assert str(plan) in result.output
    if jax.__version_info__ < (0, 12):  # whose plain step keeps an array more
        assert plan.spec == "remat"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--budget", "3"], "a number with a unit"),
        (["--budget", "1GiB", "--pin", "head"], "expected PATH=CHOICE"),
        (["--budget", "1GiB", "--action", "guess"], "expected some of"),
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
        (["resnet51"], "name='resnet51': expected one of"),
        (["my_factory:number"], "has no function 'number'"),
        (["no_such_module:f"], "No module named 'no_such_module'"),
        (["my_factory:make_step", "plane"], "strategy='plane'"),
        (["my_factory:make_step", "plain", "--target", "h101"], "target='h101' is unknown"),
        (["my_factory:make_step", "plain", "--json", "no/t.json"], "expected a file in a folder"),
        (["resnet20", "plain", "--image", "0"], "image=0"),
        (["resnet20", "plain", "--batch", "0"], "batch=0"),
        (["resnet20", "plain", "--fsdp"], "fsdp=True: expected a mesh"),
        (["my_factory:make_step", "plain", "--fsdp"], "expected a model by name"),
    ],
)
def test_bad_input(run, arguments, error):
    result = run(*arguments)
    assert result.exit_code == 2
    words = " ".join(result.output.replace("│", " ").split())
    assert error in words
