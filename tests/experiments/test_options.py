import importlib

import pytest
import typer
from typer.testing import CliRunner

from experiments.common.options import usage_errors

RUNNER = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("comparison.compare", ["--model", "vgg"], "name='vgg'"),
        ("training.train", ["--strategy", "zip"], "zip"),
        ("bench.block_sparse", ["--target", "h1000"], "target='h1000'"),
        ("bench.checkpoint", ["--target", "h1000"], "target='h1000'"),
        ("bench.fits", ["--part", "h1000"], "target='h1000'"),
        ("bench.gates", ["--target", "h1000"], "target='h1000'"),
        ("bench.gradients", ["--strategy", "zip"], "zip"),
        ("bench.memory", ["--strategy", "zip"], "zip"),
        ("bench.stage", ["--target", "h1000"], "target='h1000'"),
        ("bench.transformers", ["--target", "h1000"], "target='h1000'"),
        ("reproduce.block_sparse", ["--seed", "1", "--seed", "1"], "each once"),
        ("reproduce.pooling", ["--model", "vgg"], "name='vgg'"),
        ("reproduce.quantization", ["--strategy", "plain", "--plan-steps", "1"], "plan_steps=1"),
        ("reproduce.transformers", ["--strategy", "zip"], "zip"),
    ],
)
def test_wrong_arguments_are_told_without_a_traceback(command, arguments, message, tmp_path):
    app = typer.Typer(add_completion=False)
    app.command()(importlib.import_module(f"experiments.{command}").main)
    result = RUNNER.invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_other_errors_keep_theirs():
    @usage_errors()
    def command():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        command()
