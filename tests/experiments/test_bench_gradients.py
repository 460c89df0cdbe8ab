import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
import typer
from flax import nnx

import jaxcomp as jc
from experiments.bench import gradients as module
from experiments.reproduce.runs import Task
from jaxcomp._core.modules import split_model
from jaxcomp.models._lm import LM, Shape
from jaxcomp.models.training import TrainState
from jaxcomp.planning import Strategy
from tests.helpers import normal

FOUND = {"bias": 0.1, "bias_interval": [0.05, 0.15], "floor": 0.02, "noise": 0.3}
UNBIASED = FOUND | {"bias": 0.0, "bias_interval": [0.0, 0.01]}


def row(name, steps, errors):
    return {
        "row": name,
        "steps": steps,
        "bits": 2.5,
        "noise_over_sgd": 0.25,
        "coded": errors,
        "control": FOUND | {"noise": 2e-7},
        "parameters": [["head/kernel", errors], ["head/bias", errors]],
    }


def test_files_tell_bias_noise_and_bits(tmp_path):
    rows = [row("division:bits=2", 0, UNBIASED), row("division:bits=2", 60, FOUND)]
    content = {"command": "python", "model": "resnet20", "batch": 64, "draws": 8, "steps": [60]}
    text = module._write(tmp_path, content | {"rows": rows})
    assert (
        "| division:bits=2 | 2.50 | 60 | 0.250 | 0.100 (0.050 .. 0.150) | 0.020 | 2e-07 |" in text
    )
    layers = (tmp_path / "layers.md").read_text()
    assert "| head/kernel | 0.100 (0.050 .. 0.150) |" in layers
    assert "head/bias" not in layers
    assert (tmp_path / "gradients.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("strategy", "family"),
    [
        ("quantize:bits=2", "quantize"),
        ("division:bits=4", "division"),
        ("fused:bits=2,scale_source=range", "fused:scale_source=range"),
        ("pruning:density=0.25,rest_bits=2", "pruning"),
        ("pooling:window=2", "pooling"),
        ("planned:quantize:bits=3", "planned:quantize"),
    ],
)
def test_strategies_of_one_family_share_a_line(strategy, family):
    assert module.family(strategy) == family


@pytest.mark.slow
def test_a_transformer_is_looked_at_before_and_after_training(tmp_path, monkeypatch):
    shape = Shape(width=32, depth=1, heads=2)
    batch = np.arange(16 * 64).reshape(16, 64) % 7
    task = Task(
        lambda rngs: LM(7, 64, shape, dtype=jnp.float32, rngs=rngs),
        lambda seed: itertools.repeat((batch, batch)),
        lambda: iter(()),
        "nats",
        "numbers",
    )
    monkeypatch.setitem(module.TASKS, "lm", lambda batch: task)
    strategies = ["transformer:bits=2", "boundary:quantize:bits=8"]
    module.main(tmp_path, strategy=strategies, model="lm", steps=[2], batch=16, draws=3)
    rows = json.loads((tmp_path / "gradients.json").read_text())["rows"]
    expected = [(name, steps) for name in strategies for steps in (0, 2)]
    assert [(row["row"], row["steps"]) for row in rows] == expected
    assert all(0 < row["bits"] < 16 for row in rows)
    assert all(row["coded"]["noise"] > 100 * row["control"]["noise"] for row in rows)


@pytest.mark.slow
def test_plans_are_other_widths_of_the_same_bits(tmp_path, monkeypatch):
    def in_strategy(strategy):
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(*(jc.nn.Linear(32, 32, rngs=rngs) for _ in range(3)))
        return Strategy.parse(strategy)(model)

    def network(model, steps, batch):
        _, params, rest = split_model(in_strategy("plain"))
        state = TrainState(jnp.zeros((), int), params, rest, ())
        # Of samples that need bits and of others, side by side.
        scale = jnp.tile(jnp.linspace(0.1, 3, 8), batch // 8)[:, None]
        batches = [(scale * normal((batch, 32), seed=s), jnp.arange(batch)) for s in (1, 2)]
        return module.Subject(in_strategy, (state, state), *batches)

    monkeypatch.setattr(module, "network", network)
    strategies = ["quantize:bits=2", "planned:quantize:bits=2", "allocated:bits=4"]
    module.main(tmp_path, strategy=strategies, model="mlp", steps=[1], batch=32, draws=16)
    rows = json.loads((tmp_path / "gradients.json").read_text())["rows"]
    assert [row["row"] for row in rows] == [name for name in strategies for _ in range(2)]
    equal, planned, allocated = rows[0], rows[2], rows[4]
    assert 0 < allocated["noise_over_sgd"] < planned["noise_over_sgd"]
    assert planned["bits"] == pytest.approx(equal["bits"], rel=0.05)
    assert 0 < planned["noise_over_sgd"] < 0.9 * equal["noise_over_sgd"]


def test_a_model_without_strategies_of_its_own_is_refused(tmp_path):
    with pytest.raises(typer.BadParameter, match=r"model='resnet18': expected one of \['resnet20'"):
        module.main(tmp_path, model="resnet18")
