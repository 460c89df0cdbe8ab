"""Kills a training run at random moments and compares what is resumed with an unbroken run.

The run saves a checkpoint after every step, so some kills hit an unfinished checkpoint. After each
SIGKILL the same command resumes from the last complete one. The history of losses and accuracies
must be bit-equal to that of the unbroken run.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.progress import track

from experiments.training.checkpoint import Checkpoints
from experiments.training.train import METRICS

OPTIONS = (
    *("--model", "resnet8", "--strategy", "automatic", "--batch", "8", "--no-tensorboard"),
    *("--epochs", "2", "--epoch-steps", "20", "--checkpoint-steps", "1"),
)
COMPARED = ("loss", "accuracy", "test_accuracy")
LONGEST_DELAY = 3.0  # seconds between the first sign of progress and the kill


def start(out: Path, cache: Path) -> subprocess.Popen[bytes]:
    """Starts the run in a folder, or resumes it."""
    command = [sys.executable, "-m", "experiments.training.train", "--out", str(out), *OPTIONS]
    if Checkpoints(out / "checkpoints").latest_step() is not None:
        command.append("--resume")
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)


def finish(out: Path, cache: Path) -> dict[str, Any]:
    """Runs to the end and returns the compared parts of the history.

    Raises:
        RuntimeError: If the run fails.
    """
    if start(out, cache).wait() != 0:
        raise RuntimeError(f"out={str(out)!r}: the run failed")
    metrics = json.loads((out / METRICS).read_text())
    return {name: metrics[name] for name in COMPARED}


def kill(out: Path, cache: Path, delay: float) -> dict[str, Any] | None:
    """Kills the run some seconds after it has begun to write; None if it ended before."""
    folder = out / "checkpoints"
    before = _entries(folder)
    process = start(out, cache)
    while _entries(folder) == before and process.poll() is None:
        time.sleep(0.02)
    time.sleep(delay)
    if process.poll() is not None:
        return None
    process.send_signal(signal.SIGKILL)
    process.wait()
    step = Checkpoints(folder).latest_step()
    unfinished = sum("unfinished" in name for name in _entries(folder))
    return {"seconds": round(delay, 2), "complete step": step, "unfinished": unfinished}


def _entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def run(kills: int, seed: int) -> tuple[list[dict[str, Any]], int]:
    """Kills, resumes and compares.

    Args:
        kills: Number of kills.
        seed: Seed of their moments.

    Returns:
        A row for each kill, and the number of runs that differ from the unbroken one.
    """
    delays = random.Random(seed)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        unbroken = finish(Path(folder) / "unbroken", cache)
        runs = 0
        for _ in track(range(kills), "killing"):
            killed = None
            while killed is None:
                killed = kill(Path(folder) / str(runs), cache, delays.uniform(0, LONGEST_DELAY))
                runs += killed is None
            rows.append({"run": runs} | killed)
        found = [finish(Path(folder) / str(run), cache) for run in range(runs + 1)]
    return rows, sum(history != unbroken for history in found)
