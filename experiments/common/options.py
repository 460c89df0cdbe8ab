"""Command-line options that several commands share, and their error messages."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

TARGET_HELP = "Device to compile for: cpu, h100, rtx3090, v5e, ... It need not be attached."

Out = Annotated[Path, typer.Option(help="Folder for the results.")]
Strategies = Annotated[
    list[str] | None,
    typer.Option(
        help="A strategy, such as remat or quantize:bits=2; repeatable. Default: STRATEGIES of the "
        "module."
    ),
]
TrainedStrategies = Annotated[
    list[str] | None,
    typer.Option(
        help="A strategy, such as remat or quantize:bits=2; repeatable, plain first. Default: "
        "STRATEGIES of the module."
    ),
]
Target = Annotated[str | None, typer.Option(help=f"{TARGET_HELP} Default: the attached device.")]
Model = Annotated[str, typer.Option(help="Name of a model, as jaxcomp.models.catalog.create.")]
DatasetName = Annotated[str, typer.Option(help="Name of a data set.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder of the full data sets.")]
Epochs = Annotated[int, typer.Option(help="Passes over the training split.")]
Batch = Annotated[int, typer.Option(help="Examples in a batch.")]
Image = Annotated[int, typer.Option(help="Height and width of the images.")]
Dtype = Annotated[Literal["float32", "bfloat16"], typer.Option(help="Dtype of the computation.")]
Add = Annotated[
    bool, typer.Option("--add", help="Keep the other rows of an earlier run in the same folder.")
]


@contextmanager
def usage_errors() -> Iterator[None]:
    """Decorates a command: errors of its arguments are shown without a traceback.

    Raises:
        typer.BadParameter: With the message of a ValueError, an OSError or an ImportError.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error
