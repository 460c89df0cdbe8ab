"""Two processes with four devices each train together."""

import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from experiments.training.config import TrainConfig
from experiments.training.train import train

CONFIG = TrainConfig(model="resnet20", epochs=1, epoch_steps=20, batch=16, lr=0.001)
FLAGS = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}


def _start(out, rates=(CONFIG.lr, CONFIG.lr)):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = ["--model", CONFIG.model, "--epochs", "1", "--epoch-steps", "20", "--batch", "16"]
    options += ["--checkpoint-steps", "5", "--no-tensorboard", "--fsdp", "--out", str(out)]
    together = ["--coordinator", f"localhost:{port}", "--processes", "2", "--process-id"]
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "experiments.training.train",
                *options,
                "--lr",
                str(rate),
                *together,
                n,
            ],
            env=os.environ | FLAGS,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for n, rate in zip("01", rates, strict=True)
    ]


@pytest.mark.slow
def test_a_killed_process_ends_the_other_and_one_process_goes_on(tmp_path):
    first, second = _start(tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    while not (checkpoints / "5").exists():
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.05)
    second.send_signal(signal.SIGKILL)
    second.communicate()
    output, _ = first.communicate(timeout=60)
    assert first.returncode not in (0, None)
    assert "another task died" in output or "Connection" in output, output[-2000:]
    resumed = train(CONFIG, tmp_path / "run", resume=True)
    alone = train(CONFIG, tmp_path / "alone")
    assert resumed.finished and len(resumed.history.loss) == 20
    np.testing.assert_allclose(resumed.history.loss, alone.history.loss, rtol=1e-2)


def test_other_arguments_are_told_by_each_process(tmp_path):
    found = [process.communicate()[0] for process in _start(tmp_path / "run", (0.1, 0.2))]
    for number, output in enumerate(found):
        assert f"process {number} has lr=0.{number + 1}: expected the same" in " ".join(
            output.replace("│", " ").split()
        ), output
    assert not (tmp_path / "run").exists()
