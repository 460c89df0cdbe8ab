import json

import jax
import jax.numpy as jnp
import pytest
import typer

from experiments.bench import instructions
from experiments.common import machine_code
from jaxcomp.memory._targets import is_installed

needs_tools = pytest.mark.skipif(
    not all(map(is_installed, [*machine_code.WHEELS.values(), "jax-cuda13-pjrt"])),
    reason="needs the extras gpu-aot and machine-code",
)
ROWS, COLUMNS = 4096, 512


def small_step(strategy, batch):
    """A kernel without a loop, and a sum over rows."""
    model = strategy(lambda x: (x * 2 + 1, jax.lax.optimization_barrier(x).sum(0)))
    return jax.jit(model), (jax.ShapeDtypeStruct((batch, COLUMNS), jnp.float32),)


@needs_tools
def test_kernels_have_the_instructions_of_their_machine_code(tmp_path, monkeypatch):
    monkeypatch.setitem(instructions.NETWORKS, "small", (small_step, ROWS))
    instructions.main(tmp_path, "small", ["plain"], "h100")
    (row,) = json.loads((tmp_path / "instructions.json").read_text())["rows"]
    kernels = {k["name"].split("_")[0]: k for k in row["kernels"]}
    array = 4 * ROWS * COLUMNS
    loop, total = kernels["loop"], kernels["input"]
    assert loop["nbytes"] == 2 * array and loop["loads"] == {"16": 1}  # four elements at once
    assert loop["classes"]["float"] == 2  # a product and a sum
    assert loop["classes"]["load, store"] == pytest.approx(2 / 4)
    # Each element is read and added once; some more sums join those of the threads.
    assert total["nbytes"] == pytest.approx(array, rel=0.1)
    assert 1 <= total["classes"]["float"] < 1.5
    expected = sum(k["runs"] * (k["seconds"] + instructions.BETWEEN) for k in row["kernels"])
    assert row["seconds"] == pytest.approx(expected, rel=0.2)  # some kernels are too small to list
    assert "| loop_" in (tmp_path / "plain.md").read_text()


def test_a_missing_tool_is_named_before_anything_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setitem(machine_code.WHEELS, "ptxas", "no-such-wheel")
    with pytest.raises(typer.BadParameter, match=r"ptxas .* pip install 'jaxcomp\[machine-code\]'"):
        instructions.main(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", [{"network": "alexnet"}, {"target": "v5e"}])
def test_an_unknown_network_or_target_is_an_error(tmp_path, wrong):
    with pytest.raises(typer.BadParameter, match="expected one of"):
        instructions.main(tmp_path / "out", **wrong)
