"""Options that several commands take, and what they say of wrong ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

Out = Annotated[Path, typer.Option(help="Directory of the results.")]
Strategies = Annotated[
    list[str] | None, typer.Option(help="A row; repeat for more. Default: those of the table.")
]
TrainedStrategies = Annotated[
    list[str] | None,
    typer.Option(help="A row; repeat for more, plain first. Default: those of the table."),
]
Target = Annotated[
    str | None, typer.Option(help="As jaxcomp.memory._targets; default: the attached device.")
]
DataDir = Annotated[Path | None, typer.Option(help="Where the full data sets are.")]
Image = Annotated[int, typer.Option(help="Height and width of the images.")]
Dtype = Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the computation.")]
Add = Annotated[bool, typer.Option("--add", help="Keep other rows that are there.")]


@contextmanager
def usage_errors() -> Iterator[None]:
    """Decorates a command: a wrong argument is shown by its message, without a traceback.

    Raises:
        typer.BadParameter: For a ValueError, an OSError or an ImportError, with its message.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error
