import json
import os
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from experiments.bench import device

SHAPES = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)


def small_step(strategy, *_):
    """A step of one product, or with "remat" of one more."""
    times = 1 + (strategy == "remat")

    @jax.jit
    def step(state, x):
        for _ in range(times):
            x = jnp.tanh(x.astype(jnp.float32) @ state)
        return state + 1e-3 * x.T @ x, x.sum()

    return step, SHAPES


class AtOnce(ThreadPoolExecutor):
    """Runs calls in this process, one after another."""

    def __init__(self, count):
        super().__init__(1)


def test_every_strategy_of_every_model_is_compiled_run_timed_and_profiled(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "make_step", small_step)
    monkeypatch.setattr(device, "new_processes", AtOnce)
    device.main(tmp_path, ["plain", "remat"], ["a", "b"], 8, 1, "float32", rounds=2, profile=True)
    for model in "ab":
        folder = tmp_path / f"{model}-cpu"
        content = json.loads((folder / "device.json").read_text())
        plain, remat = content["rows"]
        assert (plain["row"], remat["row"], content["model"]) == ("plain", "remat", model)
        assert plain["step_time_ratio"] == 1.0 and remat["step_time_ratio"] > 0
        assert plain["total_bytes"] > 2 * 64 * 64 * 4 and plain["compile_seconds"] > 0
        assert plain["in_use_bytes"] is None  # which a CPU does not tell
        assert all(len(row["turn_seconds"]) == 2 for row in content["rows"])
        assert "| remat |" in (folder / "device.md").read_text()
        profile = json.loads((tmp_path / f"kernels-{model}-cpu" / "kernels.json").read_text())
        assert profile["rows"] == {"plain": [], "remat": []}  # a CPU has no kernels


@pytest.mark.slow
def test_each_call_has_a_process_of_its_own():
    with device.new_processes(1) as processes:
        one, other = (processes.submit(os.getpid).result() for _ in range(2))
    assert len({one, other, os.getpid()}) == 3


def test_a_wrong_strategy_is_told_before_anything_is_compiled(tmp_path):
    with pytest.raises(device.typer.BadParameter, match="zip"):
        device.main(tmp_path / "out", ["plain", "zip"])
    assert not (tmp_path / "out").exists()


def test_what_a_transformer_would_ignore_is_an_error(tmp_path):
    with pytest.raises(device.typer.BadParameter, match="image=64"):
        device.main(tmp_path / "out", ["plain"], ["lm"], image=64)
    assert not (tmp_path / "out").exists()


def test_filled_is_random_and_small_but_for_scalar_integers():
    integers = jax.ShapeDtypeStruct((64,), jnp.int32)
    shapes = {"x": SHAPES[1], "n": jax.ShapeDtypeStruct((), jnp.int32), "tokens": integers}
    made = device.filled(shapes)
    assert made["x"].dtype == jnp.bfloat16 and made["n"] == 0
    assert made["x"].min() >= 0 and 0.07 < float(made["x"].astype(jnp.float32).mean()) < 0.09
    assert 0 <= made["tokens"].min() < made["tokens"].max() < 1000
