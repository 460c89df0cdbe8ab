"""Options that several commands share, and what they stand for."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import jax
import typer

from jaxcomp import memory
from jaxcomp.memory._gpus import GPUS
from jaxcomp.memory._live_bytes import format_bytes
from jaxcomp.memory._targets import TPUS, resolve
from jaxcomp.models import catalog, steps
from jaxcomp.planning import MakeStep


def _print_models(asked: bool) -> None:
    if asked:
        print("\n".join(catalog.names()))
        raise typer.Exit


def _print_targets(asked: bool) -> None:
    if asked:
        for name in memory.targets()[: -len((*GPUS, *TPUS))]:
            print(f"{name:<18} attached")
        for device in (*GPUS, *TPUS):
            print(f"{device.name:<18} {format_bytes(device.memory_bytes)}")
        print("\nSeveral devices: h100:8, v5e:4x4")
        raise typer.Exit


Model = Annotated[
    str,
    typer.Argument(
        help="A built-in model (--list-models), or MODULE:FUNCTION, such as train:make_step for "
        "the function make_step in train.py. It takes (transform, batch) and returns the training "
        "step and its arguments."
    ),
]
Batch = Annotated[int, typer.Option(help="Examples in a batch.")]
Image = Annotated[int, typer.Option(help="Height and width of the images, for a model by name.")]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"],
    typer.Option(help="Dtype of the computation, for a model by name."),
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


def use_the_cpu() -> None:
    """Makes JAX use the CPU only, unless JAX_PLATFORMS says otherwise.

    A step that is compiled for a named target needs no device. A factory's arrays then take no
    memory of a GPU, and JAX does not report plugins that find no device.
    """
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")


def make_step(model: str, image: int, dtype: str, target: str | None, fsdp: bool) -> MakeStep:
    """Returns the step factory of a model by name, or the user's own.

    Raises:
        ValueError: If there is no such model, module or function.
    """
    module, colon, function = model.partition(":")
    if not colon:
        count = 1 if target is None else resolve(target).devices
        mesh = None if count == 1 else memory.mesh(str(target), (count,), ("data",))
        return steps.classifier(model, image, dtype, mesh, fsdp=fsdp)
    if fsdp:
        raise ValueError("--fsdp: expected a model by name; a step factory has its own shardings")
    if module.endswith(".py"):
        raise ValueError(f"MODEL={model!r}: expected a module's name, without .py")
    sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # of an import in the module
        file = Path(*module.split(".")).with_suffix(".py")
        raise ValueError(
            f"MODEL={model!r}: No module named {module!r}: there is no {file} in {Path.cwd()}, and "
            "no such package is installed"
        ) from None
    if not hasattr(found, function):
        raise ValueError(f"MODEL={model!r}: {module} has no function {function!r}")
    factory: Any = getattr(found, function)
    if not callable(factory):
        kind = type(factory).__name__
        raise ValueError(f"MODEL={model!r}: {function} is of type {kind}, expected a function")
    return cast(MakeStep, factory)


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
