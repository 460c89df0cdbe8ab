"""Options that several commands share, and what they stand for."""

import importlib.util
import os
from pathlib import Path
from typing import Annotated, Literal, cast

import jax
import typer

from jaxcomp import memory
from jaxcomp.cli import _named as named
from jaxcomp.memory._gpus import GPUS
from jaxcomp.memory._live_bytes import format_bytes
from jaxcomp.memory._targets import TPUS, resolve
from jaxcomp.memory._words import did_you_mean
from jaxcomp.models import steps
from jaxcomp.planning import MakeStep


def _print_models(asked: bool) -> None:
    if asked:
        print("\n".join(steps.names()))
        raise typer.Exit


def _print_targets(asked: bool) -> None:
    if asked:
        for name in memory.targets()[: -len((*GPUS, *TPUS))]:
            print(f"{name:<18} attached")
        for device in (*GPUS, *TPUS):
            print(f"{device.name:<18} {format_bytes(device.memory_bytes)}")
        print("\nSeveral devices: h100:8, v5e:4x4")
        raise typer.Exit


MODEL = (
    "A built-in model (--list-models), or MODULE:FUNCTION, such as train:make_step for the step "
    "factory make_step in train.py. It takes (transform, batch) and returns the training step and "
    "its arguments."
)
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL)]
Batch = Annotated[int, typer.Option(help="Examples in a batch.")]
Image = Annotated[
    int | None,
    typer.Option(help="Height and width of the images, for a model by name. Default: 224."),
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(
        metavar="DTYPE",
        help="Dtype of the computation, for a model by name: float32, float16 or bfloat16, which "
        "is the default.",
    ),
]
Fsdp = Annotated[
    bool,
    typer.Option(
        "--fsdp",
        help="Shard parameters and optimizer over the devices of the target, such as h100:8, for a "
        "model by name. The batch is always split over them.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        help="Device to compile for (--list-targets), such as h100; or several, such as h100:8 or "
        "v5e:4x4. It need not be attached, but GPUs need the extra gpu-aot, and TPUs tpu-aot. "
        "Default: the attached device."
    ),
]
Allowance = Annotated[
    str | None,
    typer.Option(
        help="What of the memory is left for all but XLA's buffers, such as 200MiB. Default: 96MiB "
        "of a GPU, nothing elsewhere."
    ),
]
NoCache = Annotated[
    bool,
    typer.Option("--no-cache", help="Compile anew what an earlier command compiled."),
]
ListModels = Annotated[
    bool,
    typer.Option(
        "--list-models", callback=_print_models, is_eager=True, help="List the built-in models."
    ),
]
ListTargets = Annotated[
    bool,
    typer.Option(
        "--list-targets", callback=_print_targets, is_eager=True, help="List the devices."
    ),
]
Traceback = Annotated[
    bool, typer.Option("--traceback", help="Show the whole traceback of an error.")
]


def turn_off_the_cache() -> None:
    """Makes JAX and jaxcomp compile all anew."""
    jax.config.update("jax_enable_compilation_cache", False)


def use_the_cpu() -> None:
    """Makes JAX use the CPU only, unless JAX_PLATFORMS says otherwise.

    A step that is compiled for a named target needs no device. A factory's arrays then take no
    memory of a GPU, and JAX does not report plugins that find no device.
    """
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")


def make_step(
    model: str, image: int | None, dtype: str | None, target: str | None, fsdp: bool
) -> MakeStep:
    """Returns the step factory of a model by name, or the user's own.

    Raises:
        ValueError: If there is no such model, module or function, or an option is not for it.
    """
    if ":" in model:
        check_not_given("a model by name", image=image, dtype=dtype, fsdp=fsdp)
        found = named.function(model)
        if isinstance(found, jax.stages.Wrapped):
            raise ValueError(
                f"MODEL={model!r} is jitted: expected a step factory, or the step's arguments by "
                "--args MODULE:FUNCTION of jaxcomp memory"
            )
        return cast(MakeStep, found)
    if model not in steps.names():
        raise ValueError(
            f"MODEL={model!r}: expected a built-in model (--list-models) or MODULE:FUNCTION"
            f"{did_you_mean(model, steps.names())}"
        )
    count = 1 if target is None else resolve(target).devices
    mesh = None if count == 1 else memory.mesh(str(target), (count,), ("data",))
    return steps.by_name(model, image, dtype or "bfloat16", mesh, fsdp=fsdp)


def check_not_given(expected: str, **given: object) -> None:
    """Raises a ValueError for the first option that was given, which is for something else."""
    for name, value in given.items():
        if value not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')}: expected {expected}")


def check_writable(file: Path | None) -> None:
    """Raises a ValueError if a file cannot be written, before anything is compiled."""
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise ValueError(f"{file}: expected a file in a folder that exists")


def check_installed(package: str, option: str, extra: str) -> None:
    """Raises an ImportError if an option needs a package that is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ImportError(
            f"{option} needs {package}; install it with: pip install 'jaxcomp[{extra}]'"
        )
