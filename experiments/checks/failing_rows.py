"""Rows of `jaxcomp.compare` that fail: each costs itself alone, and is told."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxcomp as jc
from jaxcomp.memory._compiling import apart

ROWS = ("plain", "remat", "quantize:bits=4")
FAILING = "remat"


def make_step(transform: Any, batch: int) -> Any:
    """Makes a step of two layers."""

    def block() -> nnx.Module:
        return nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.sin)

    model = transform(nnx.eval_shape(lambda: nnx.Sequential(block(), block())))
    step = nnx.jit(nnx.grad(lambda model, x: jnp.square(model(x)).sum()))
    return step, (model, jax.ShapeDtypeStruct((batch, 64), jnp.float32))


def _forever(depth: int = 0) -> int:
    return _forever(depth + 1)


def _kill_the_compiler() -> None:
    """Kills the next child of this process, as the kernel does if memory is short."""

    def wait_and_kill() -> None:
        children = [Path(f"/proc/self/task/{os.getpid()}/children")]
        while not (found := "".join(path.read_text() for path in children).split()):
            time.sleep(0.01)
        os.kill(int(found[0]), signal.SIGKILL)

    threading.Thread(target=wait_and_kill).start()


@contextlib.contextmanager
def _flags(text: str) -> Iterator[None]:
    before = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = text
    try:
        yield
    finally:
        os.environ["XLA_FLAGS"] = before


def _raises(error: BaseException) -> Callable[..., Any]:
    def make(transform: Any, batch: int) -> Any:
        raise error

    return make


def _changed(**options: Any) -> Callable[..., Any]:
    def make(transform: Any, batch: int) -> Any:
        _, arguments = make_step(transform, batch)
        return jax.jit(lambda model, x: x, **options), (arguments[1], arguments[1])

    return make


def _without_transform(transform: Any, batch: int) -> Any:
    return make_step(lambda model: model, batch)


def _other_shapes(transform: Any, batch: int) -> Any:
    step, (model, _) = make_step(transform, batch)
    return step, (model, jax.ShapeDtypeStruct((batch, 63), jnp.float32))


def _killed(transform: Any, batch: int) -> Any:
    made = make_step(transform, batch)
    _kill_the_compiler()
    return made


_ERRORS: tuple[Exception, ...] = (
    *(ValueError("v"), TypeError("t"), KeyError("k"), IndexError("i"), ZeroDivisionError("z")),
    *(AssertionError("a"), MemoryError("m"), RuntimeError("r"), StopIteration(), OSError(28, "o")),
    *(NotImplementedError("n"), UnicodeDecodeError("utf-8", b"", 0, 1, "u")),
)
FACTORIES: dict[str, Callable[..., Any]] = {
    **{f"raises {type(error).__name__}": _raises(error) for error in _ERRORS},
    "recurses for ever": lambda transform, batch: _forever(),
    "returns None": lambda transform, batch: None,
    "returns three values": lambda transform, batch: (jnp.sin, 1, 2),
    "takes other shapes": _other_shapes,
    "does not call transform": _without_transform,
    "unknown compiler option": _changed(compiler_options={"xla_no_such_option": "1"}),
    "the compiler is killed": _killed,
    "the compiler aborts": make_step,
}


def _row(name: str) -> dict[str, str]:
    def factory(transform: Any, batch: int) -> Any:
        os.environ.pop("XLA_FLAGS", None)
        if transform.spec != FAILING:
            return make_step(transform, batch)
        if name == "the compiler aborts":
            os.environ["XLA_FLAGS"] = "--xla_no_such_flag=1"
        return FACTORIES[name](transform, batch)

    where = apart() if name.startswith("the compiler") else contextlib.nullcontext()
    with where, _flags(""):
        table = jc.compare(factory, ROWS, batch=1024, target="cpu", capacity="1GiB")
    plain, failed, last = table.rows
    is_told = failed.report is None and plain.report and last.report
    return {"factory": name, "told": (failed.error or "") if is_told else ""}


def run() -> list[dict[str, str]]:
    """Compares three rows, of which the second fails.

    Returns:
        A row for each way to fail: what happens, and what is told; "" if another row is lost.
    """
    return [_row(name) for name in FACTORIES]


LONG_STEP = """
import jax, jax.numpy as jnp

def make_step(transform, batch):
    def total(w, x):
        for i in range(400):
            x = jnp.sin(x @ w) + jnp.cos(x @ w.T) * i
        return x.sum()
    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return jax.jit(jax.grad(transform(total))), (square, square)
"""


def killed_commands(count: int) -> list[dict[str, str]]:
    """Ends `jaxcomp memory` by signals while its compiler works.

    Args:
        count: Number of commands.

    Returns:
        A row for each: the signal, the command's status, and whether its compiler has ended, too.
    """
    signals = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    return [_ended(signals[number % len(signals)]) for number in range(count)]


def _ended(number: signal.Signals) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "long.py").write_text(LONG_STEP)
        command = [sys.executable, "-m", "jaxcomp", "memory", "long:make_step", "plain"]
        path = os.pathsep.join([str(Path(jc.__file__).parents[1]), *sys.path])
        process = subprocess.Popen(
            [*command, "--target", "cpu"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (found := children.read_text().split()):
            time.sleep(0.05)
        compiler = Path(f"/proc/{found[0]}/stat")
        time.sleep(3)  # until it compiles
        process.send_signal(number)
        status = process.wait()
        time.sleep(0.5)
        try:
            has_ended = compiler.read_text().split()[2] == "Z"  # nobody has waited for it
        except OSError:
            has_ended = True
    told = f"status {status}, and the compiler has ended" if has_ended else ""
    return {"signal": number.name, "told": told}
