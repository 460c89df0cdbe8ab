"""Writes the tables of README.md and docs/ from the records.

python -m experiments.tables          # writes them
python -m experiments.tables --check  # fails if one is stale
"""

from typing import Annotated

import typer

from experiments.tables.declared import TABLES
from experiments.tables.pages import ROOT, pages, written


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if stale.")] = False,
) -> None:
    """Write the tables of all pages, or name the pages whose tables are stale."""
    stale = {page: text for page in pages() if (text := written(page, TABLES)) != page.read_text()}
    for page, text in stale.items():
        typer.echo(f"{'stale' if check else 'written'}: {page.relative_to(ROOT)}")
        if not check:
            page.write_text(text)
    if check and stale:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
