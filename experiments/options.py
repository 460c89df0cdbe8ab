"""Options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path, typer.Option(help="Directory of the results.")]
Ways = Annotated[
    list[str] | None, typer.Option(help="A row; repeat for more. Default: those of the table.")
]
TrainedWays = Annotated[
    list[str] | None,
    typer.Option(help="A row; repeat for more, plain first. Default: those of the table."),
]
Target = Annotated[
    str | None, typer.Option(help="As jaxcomp.memory.targets; default: the attached device.")
]
DataDir = Annotated[Path | None, typer.Option(help="Where the full data sets are.")]
Add = Annotated[bool, typer.Option("--add", help="Keep other rows that are there.")]
