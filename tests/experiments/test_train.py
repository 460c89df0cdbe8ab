import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from experiments.data.datasets import check_batch
from experiments.data.examples import InMemory
from experiments.training import train as module
from experiments.training.checkpoint import Checkpoints
from experiments.training.config import TrainConfig
from experiments.training.devices import shard
from experiments.training.lock import locked
from experiments.training.monitor import Monitor
from experiments.training.run import build, evaluate, learning_rate
from experiments.training.train import train
from jaxcomp.models import training
from tests.experiments.conftest import make_dataset
from tests.helpers import slow

CONFIG = TrainConfig(model="tiny", dataset="tiny", epochs=2, batch=16, lr=0.05)


def assert_identical(tree, expected):
    for value, other in zip(*map(jax.tree.leaves, (tree, expected)), strict=True):
        np.testing.assert_array_equal(value, other)


def interrupted_at(stop):
    """A data set that sends Ctrl-C while the step number `stop` gets its batch."""
    read = []

    class Interrupting(InMemory):
        def read(self, *arguments):
            for batch in super().read(*arguments):
                read.append(batch)
                if len(read) == stop:
                    signal.raise_signal(signal.SIGINT)
                yield batch

    return make_dataset(Interrupting)


def files(folder):
    return sorted(folder.rglob("*"))


def test_learns_and_writes_metrics(tiny, tmp_path):
    config = dataclasses.replace(CONFIG, epochs=12, augment=False)
    result = train(config, tmp_path)
    assert result.finished
    assert result.history.test_accuracy[-1] > 0.8  # chance is 0.25
    assert len(result.history.loss) == len(result.history.accuracy) == 12 * 4
    metrics = json.loads((tmp_path / module.METRICS).read_text())
    assert TrainConfig.from_json(metrics["config"]) == config
    assert metrics["loss"] == result.history.loss
    assert metrics["test_accuracy"] == result.history.test_accuracy
    assert metrics["seconds"] > 0
    assert metrics["versions"]["jax"] == jax.__version__


@functools.cache
def unbroken_run(config, folder):
    return train(config, folder)


# Steps 1 to 4 are the first epoch: within it, at its end before the evaluation, within the second.
@pytest.mark.parametrize(
    ("strategy", "stop"), [("plain", 4), ("plain", 6), slow("quantize:bits=2", 3)]
)
def test_resumed_run_equals_unbroken_one(
    tiny, tmp_path, tmp_path_factory, monkeypatch, strategy, stop
):
    config = dataclasses.replace(CONFIG, strategy=strategy)
    unbroken = unbroken_run(config, tmp_path_factory.getbasetemp() / f"unbroken-{strategy[:5]}")

    with monkeypatch.context() as patch:
        patch.setattr(module, "load", lambda name, data_dir: interrupted_at(stop))
        broken = train(config, tmp_path / "broken")
    assert not broken.finished
    assert int(broken.state.step) == len(broken.history.loss) == stop
    assert not (tmp_path / "broken" / module.METRICS).exists()

    resumed = train(config, tmp_path / "broken", resume=True)
    assert resumed.finished
    assert_identical(resumed.state, unbroken.state)
    assert resumed.history.loss == unbroken.history.loss
    assert resumed.history.accuracy == unbroken.history.accuracy
    assert resumed.history.test_accuracy == unbroken.history.test_accuracy


@pytest.mark.slow
def test_resumed_run_goes_on_with_its_plan(tiny, tmp_path, monkeypatch):
    """Bits are planned at steps 0 and 5; the run stops between them."""
    config = dataclasses.replace(CONFIG, strategy="actnn", plan_steps=5)
    unbroken = train(config, tmp_path / "unbroken")
    assert "0" in unbroken.history.plans
    with monkeypatch.context() as patch:
        patch.setattr(module, "load", lambda name, data_dir: interrupted_at(3))
        train(config, tmp_path / "broken")
    resumed = train(config, tmp_path / "broken", resume=True)
    assert_identical(resumed.state, unbroken.state)
    assert resumed.history.plans == unbroken.history.plans


def test_checkpoints_every_so_many_steps(tiny, tmp_path, monkeypatch):
    saved = []
    save = Checkpoints.save

    def recording_save(self, state, record):
        saved.append(int(state.step))
        save(self, state, record)

    monkeypatch.setattr(Checkpoints, "save", recording_save)
    train(CONFIG, tmp_path, checkpoint_steps=3)
    assert saved == [3, 4, 6, 8]


def test_last_checkpoint_has_every_test_accuracy(tiny, tmp_path):
    result = train(CONFIG, tmp_path, checkpoint_steps=2)  # half an epoch
    history = Checkpoints(tmp_path / "checkpoints").load_record()["history"]
    assert history["test_accuracy"] == result.history.test_accuracy
    assert len(history["loss"]) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 12}, "batch=12: expected a multiple of 8"),
        ({"batch": 80}, "batch_size=80: expected 1 to 70"),
        ({"epoch_steps": 5}, "epoch_steps=5: expected at most 4"),
        ({"strategy": "quantise"}, "strategy='quantise' is unknown; did you mean 'quantize'"),
        ({"strategy": "accumulate:4"}, "batch=16: expected a multiple of 32"),
        ({"model": "resnet21"}, "name='resnet21': expected one of"),
        ({"strategy": "pooling:window=8"}, r"window=8 .* the map of shape \(16, 4, 4, 8\)"),
    ],
)
def test_wrong_config_writes_nothing(tiny, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(dataclasses.replace(CONFIG, **changes), tmp_path / "run", tensorboard=True)
    assert files(tmp_path) == []


def test_out_that_is_a_file_is_refused_before_training(tiny, tmp_path, monkeypatch):
    out = tmp_path / "run"
    out.write_text("a file")
    monkeypatch.setattr(module, "Monitor", None)  # what the training starts with
    with pytest.raises(OSError, match=r"out='.*run': expected a folder"):
        train(CONFIG, out)
    assert out.read_text() == "a file"


def test_resume_needs_a_checkpoint(tiny, tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        train(CONFIG, tmp_path / "run", resume=True)
    assert files(tmp_path) == []


def test_checkpoint_of_another_run_is_refused(tiny, tmp_path):
    config = dataclasses.replace(CONFIG, epochs=1, epoch_steps=1)
    train(config, tmp_path)
    before = files(tmp_path)
    with pytest.raises(FileExistsError, match="has a run already; pass --resume"):
        train(config, tmp_path)
    other = dataclasses.replace(config, model="resnet20", seed=1)
    with pytest.raises(ValueError, match=r"same model='resnet20' \(there: 'tiny'\), seed=1 \("):
        train(other, tmp_path, resume=True)
    assert files(tmp_path) == before


def test_checkpoint_of_other_arrays_is_refused(tiny, tmp_path):
    state = build(CONFIG, tiny).state
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state, {})
    with pytest.raises(ValueError):
        checkpoints.load_state(build(dataclasses.replace(CONFIG, model="resnet8"), tiny).state)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("epoch_steps", 0),
        ("batch", 0),
        ("optimizer", "lamb"),
        ("lr", 0.0),
        ("lr", math.inf),
        ("lr", math.nan),
        ("warmup_epochs", 2.0),
        ("momentum", 1.0),
        ("weight_decay", -1e-4),
        ("weight_decay", math.inf),
        ("label_smoothing", 1.0),
        ("dtype", "float16"),
        ("seed", -1),
    ],
)
def test_config_checks_its_values(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r}: expected"):
        dataclasses.replace(CONFIG, **{name: value})


def test_optimizer_is_the_named_one(tiny):
    """Of its first step only the sign of the gradient is in AdamW's."""
    config = dataclasses.replace(CONFIG, optimizer="adamw", warmup_epochs=0, weight_decay=0.0)
    run = build(config, tiny)
    before = jax.tree.map(np.asarray, run.state.params)
    batches = tiny.batches("train", 16, seed=0, epoch=0, augment=False, drop_remainder=True)
    state, _ = run.train_step(run.state, *shard(*next(batches)))
    steps = jax.tree.map(lambda a, b: np.abs(a - b), state.params, before)
    largest = [step.max() for step in jax.tree.leaves(steps)]
    np.testing.assert_allclose(largest, config.lr, rtol=1e-2)


def test_config_survives_json():
    config = dataclasses.replace(CONFIG, data_dir=Path("somewhere"), nesterov=True)
    assert TrainConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_bfloat16_keeps_state_in_float32(tiny):
    run = build(dataclasses.replace(CONFIG, dtype="bfloat16"), tiny)
    batch = next(tiny.batches("train", 16, seed=0, epoch=0, augment=False, drop_remainder=True))
    program = str(run.train_step.trace(run.state, *batch).jaxpr)
    assert "bf16[16,8,8,4]" in program
    state, metrics = run.train_step(run.state, *batch)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(state)}
    assert dtypes == {jnp.dtype("float32"), jnp.dtype("int32")}
    assert jnp.isfinite(metrics.loss)


@pytest.mark.parametrize("strategy", [slow("plain"), "accumulate:2"])
def test_step_is_traced_once(tiny, monkeypatch, strategy):
    traced = []
    make_loss = training.make_loss

    def recording_make_loss(*arguments):
        loss_fn = make_loss(*arguments)

        def recording_loss(*batch):
            traced.append(batch)
            return loss_fn(*batch)

        return recording_loss

    monkeypatch.setattr(training, "make_loss", recording_make_loss)
    run = build(dataclasses.replace(CONFIG, strategy=strategy), tiny)
    before = len(traced)
    assert before > 0
    batch = next(tiny.batches("train", 16, seed=0, epoch=0, augment=False, drop_remainder=True))
    run.train_step(run.state, *shard(*batch))
    assert len(traced) == before


@pytest.mark.parametrize(
    ("warmup_epochs", "expected"),
    [
        (0.5, {0: 0, 1: 0.025, 2: 0.05, 7: 0.025, 12: 0}),
        (0, {0: 0.05, 6: 0.025, 12: 0}),
        (2.9, {0: 0, 11: 0.05, 12: 0}),  # rounded, the warm-up would leave the cosine no step
    ],
)
def test_learning_rate(warmup_epochs, expected):
    config = dataclasses.replace(CONFIG, epochs=3, warmup_epochs=warmup_epochs)
    schedule = learning_rate(config, epoch_steps=4)
    rates = [schedule(step) for step in expected]
    np.testing.assert_allclose(rates, list(expected.values()), atol=1e-8)


@pytest.mark.parametrize("batch", [16, 24])  # the test split has 21
def test_evaluation_counts_every_example_once(tiny, batch):
    run = build(CONFIG, tiny)
    whole = next(tiny.batches("test", 21, seed=0, epoch=0, augment=False, drop_remainder=False))
    expected = int(run.eval_step(run.state, whole.images, whole.labels)) / 21
    assert 0 < expected < 1
    assert evaluate(run, run.state, tiny, batch) == expected


def test_monitor_writes_scalars_at_their_steps():
    written = []

    class Writer:
        def add_scalar(self, tag, value, step):
            written.append((tag, value, step))

        def close(self):
            written.append("closed")

    with Monitor("plain", step=2, num_steps=4, batch=16, writer=Writer()) as monitor:
        monitor.report_steps([1.5, 1.25], [0.5, 0.75])
        monitor.report_epoch(1, 0.625)
    assert [entry for entry in written if entry[0] != "images_per_second"] == [
        ("train/loss", 1.5, 3),
        ("train/accuracy", 0.5, 3),
        ("train/loss", 1.25, 4),
        ("train/accuracy", 0.75, 4),
        ("test/accuracy", 0.625, 4),
        "closed",
    ]


def test_tensorboard_files(tiny, tmp_path):
    train(dataclasses.replace(CONFIG, epochs=1, epoch_steps=1), tmp_path, tensorboard=True)
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()


def test_tensorboard_missing_writes_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ModuleNotFoundError, match=r"tensorboardX, .* --no-tensorboard"):
        train(CONFIG, tmp_path / "run", tensorboard=True)
    assert files(tmp_path) == []


def test_command_line_names_what_is_wrong(tmp_path):
    app = module.typer.Typer()
    app.command()(module.main)
    arguments = ["--out", str(tmp_path / "run"), "--strategy", "accumulate:0"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "strategy='accumulate:0'" in result.output
    assert files(tmp_path) == []


@pytest.mark.slow
def test_sigterm_saves_and_exits(tmp_path):
    train = "experiments.training.train"
    command = [sys.executable, "-m", train, "--out", str(tmp_path), "--batch", "8"]
    flags = "--xla_backend_optimization_level=0"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    process = subprocess.Popen(
        [*command, "--model", "resnet8", "--no-tensorboard", "--checkpoint-steps", "1"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    deadline = time.monotonic() + 240
    while not list((tmp_path / "checkpoints").glob("[0-9]")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    step = checkpoints.latest_step()
    assert f"stopped at step {step}; --resume continues" in output
    assert len(checkpoints.load_record()["history"]["loss"]) == step


def test_two_runs_cannot_write_into_one_folder(tiny, tmp_path):
    with locked(tmp_path), pytest.raises(FileExistsError, match="another run is writing there"):
        train(CONFIG, tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    (tmp_path / "checkpoints").mkdir()  # of the other run, before its first checkpoint
    with locked(tmp_path), pytest.raises(FileExistsError, match="another run is writing there"):
        train(CONFIG, tmp_path, resume=True)


def test_a_loss_that_is_not_finite_stops_the_run(tiny, tmp_path):
    config = dataclasses.replace(CONFIG, epochs=1, lr=1e38, warmup_epochs=0)
    with pytest.raises(FloatingPointError, match=r"step [234]: the loss is (nan|inf)\. The last"):
        train(config, tmp_path)
    assert Checkpoints(tmp_path / "checkpoints").latest_step() is None
    assert train(config, tmp_path, allow_non_finite=True).finished


def test_a_parameter_that_is_not_finite_is_named():
    state = training.TrainState(3, {"w": jnp.ones(2), "b": jnp.array([1.0, jnp.nan])}, {}, ())
    with pytest.raises(FloatingPointError, match=r"step 3: the parameter \['b'\] is not finite"):
        module._check_parameters(state, 3)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((2, 8, 8, 1), np.uint8), [0, 1], "images of dtype uint8"),
        (
            np.zeros((2, 8, 9, 1), np.float32),
            [0, 1],
            r"images of .* shape \(8, 9, 1\), expected float32",
        ),
        (np.zeros((2, 8, 8, 1), np.float32), [0, 4], "labels from 0 to 4, expected 0 to 3"),
        (np.zeros((2, 8, 8, 1), np.float32), [-1, 3], "labels from -1 to 3"),
        (np.zeros((2, 8, 8, 1), np.float32), [0.5, 1], "labels of dtype float64"),
        (np.zeros((2, 8, 8, 1), np.float32), [0], r"labels of .* shape \(1,\)"),
    ],
)
def test_a_batch_of_another_kind_is_refused(images, labels, message):
    with pytest.raises(ValueError, match=f"tiny: {message}"):
        check_batch(images, np.asarray(labels), make_dataset())


def test_a_record_of_another_version_says_what_to_do(tmp_path):
    record = {"config": CONFIG.to_json(), "history": {"losses": []}}
    with pytest.raises(ValueError, match=r"unknown or missing: accuracy, .* train it on with that"):
        module._resumed(record, CONFIG, tmp_path)
