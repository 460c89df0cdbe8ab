"""The command `jaxcomp`."""

import importlib.metadata
from typing import Annotated

import typer

from jaxcomp.cli._doctor import doctor
from jaxcomp.cli._fit import fit
from jaxcomp.cli._memory import memory

app = typer.Typer(no_args_is_help=True)
app.command("memory")(memory)
app.command("fit")(fit)
app.command("doctor")(doctor)


def _print_version(asked: bool) -> None:
    if asked:
        print(importlib.metadata.version("jaxcomp"))
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Training with compressed activations in JAX."""
