"""Writes tables and single figures between the markers of a page.

A page has `<!-- table: NAME -->` and `<!-- end of table -->`, and in a sentence
`<!-- figure: NAME | ROW | COLUMN -->` and `<!-- end -->`. What is between them is generated. ROW is
the name of a row, after the network and a comma if the table has several networks.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import experiments
from experiments.tables.columns import Cell
from experiments.tables.rows import Reader, Row, as_they_are, load, named, read

ROOT = Path(experiments.__file__).parents[1]
_FIGURE = re.compile(r"(<!-- figure: (.+?) \| (.+?) \| (.+?) -->).*?<!-- end -->", re.DOTALL)
_MARKED = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- end of table -->", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Source:
    """Rows of one record.

    Attributes:
        record: The record, such as "zoo/zoo.json".
        rows: Names of the rows, in their order. By default all rows, in the record's order.
        without: Names of rows that are left out.
        where: Figures that the rows have, such as `{"target": "h100"}`.
        step: What the rows are of, for a column that says so.
        reader: Returns rows of figures that lie side by side.
    """

    record: str
    rows: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    where: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    step: str = ""
    reader: Reader = as_they_are

    def read(self) -> list[Row]:
        """Returns the rows.

        Raises:
            ValueError: If one of `rows` or `without` is not in the record, or no row is left.
        """
        rows = read(self.record, self.reader, self.where)
        named(rows, self.without)
        chosen = named(rows, self.rows) if self.rows else rows
        left = [row for row in chosen if row.name not in self.without]
        if not left:
            raise ValueError(f"{self.record}: expected a row of {dict(self.where)}")
        return [dataclasses.replace(row, values={**row.values, "step": self.step}) for row in left]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        columns: The headings, with what is in a cell.
        sources: Where the rows are from.
        others: Sources of figures that cells look up for a row.
    """

    columns: Mapping[str, Cell]
    sources: tuple[Source, ...]
    others: tuple[Source, ...] = ()


def how(content: Mapping[str, Any], rows: list[Row]) -> str:
    """Whether a record was compiled for a device or measured on one."""
    devices = sorted(set(content["devices"]))
    targets = {str(row.values.get("target", content.get("target", ""))) for row in rows}
    if devices == ["cpu"] and targets != {""}:
        return f"compiled for {', '.join(sorted(targets))}"
    return f"measured on {', '.join(devices)}".replace("cpu", "CPU")


def origin(sources: tuple[Source, ...]) -> str:
    """Sentences that say how the figures were taken, and name the records and their days."""
    records: dict[str, list[str]] = {}
    for source in sources:
        content = load(source.record)
        taken = how(content, read(source.record, source.reader, source.where))
        found = records.setdefault(taken, [])
        day = f"{content['date']}, earlier code" if content["earlier"] else content["date"]
        record = f"`{source.record}` ({day})"
        found += [] if record in found else [record]
    return " ".join(
        f"{taken[0].upper()}{taken[1:]}{', not run' if taken.startswith('compiled') else ''}: "
        f"{', '.join(found)}."
        for taken, found in records.items()
    )


def render(table: Table) -> str:
    """Returns a table as Markdown, and below it the origin of its figures."""
    cells = [
        [cell(row) for cell in table.columns.values()]
        for source in table.sources
        for row in source.read()
    ]
    lines = [[*table.columns], ["---"] * len(table.columns), *cells]
    text = "\n".join(
        f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in line)}|" for line in lines
    )
    return f"{text}\n\n*{origin(table.sources + table.others)}*"


def figure(table: Table, name: str, column: str) -> str:
    """Returns the cell of one row.

    Raises:
        ValueError: If there is no such row, or several.
    """
    rows = [
        row
        for source in table.sources
        for row in source.read()
        if name in (row.name, f"{row.values.get('network')}, {row.name}")
    ]
    if len(rows) != 1:
        raise ValueError(f"{name!r}: expected the name of one row, found {len(rows)}")
    return table.columns[column](rows[0])


def pages() -> Iterator[Path]:
    """Yields the pages that may have tables."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def names(page: Path) -> list[str]:
    """Returns the names of a page's tables."""
    return [match.group(1) for match in _MARKED.finditer(page.read_text())]


def written(page: Path, tables: Mapping[str, Table]) -> str:
    """Returns the text of a page with its tables and figures as they are to be.

    Raises:
        KeyError: If a table is not declared.
    """

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"<!-- table: {name} -->\n\n{render(tables[name])}\n\n<!-- end of table -->"

    def replace_figure(match: re.Match[str]) -> str:
        marker, name, row, column = match.groups()
        return f"{marker}{figure(tables[name], row, column)}<!-- end -->"

    return _FIGURE.sub(replace_figure, _MARKED.sub(replace, page.read_text()))
