"""Reads the files to which XLA dumps its buffer assignment."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxcomp.memory._hlo import in_hbm

Value = tuple[str, str]  # The instruction and the tuple index, for example ("while.3", "{2}").

DUMPED = ("buffer-assignment", "buffer-assignment-values", "live-range")

_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)(?:, color (\d+))?")
_VALUE = re.compile(
    r" value: <\d+ ([^\s{]+)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)"
)
_RANGE = re.compile(r"    ([^\s{]+)(\{[\d,]*\}):(\d+)-(\d+)$")
_POINT = re.compile(r"    (\d+):(\S+)$")
_HEADING = re.compile(r"<\d+ ([^\s{]+)(\{[\d,]*\})?(?: \(phi\))? @\d+>$")


def dump_options(directory: str | Path, platform: str) -> dict[str, str | bool]:
    """Returns compiler options that make XLA dump its buffer assignment to a directory.

    Args:
        directory: the directory.
        platform: JAX's name of the platform. For "cuda" the PTX of kernels is dumped, too; XLA of
            JAX 0.11 and later has to be asked for it.
    """
    options: dict[str, str | bool] = {"xla_dump_to": str(directory), "xla_dump_hlo_as_text": True}
    if platform == "cuda" and jax.__version_info__ >= (0, 11):
        options["xla_dump_emitter_re"] = ".*"
    return options


@contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Turns JAX's persistent compilation cache off within the context.

    XLA does not dump a program that comes from the cache.
    """
    enabled = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX reads the setting only once.
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def one_file(directory: str | Path, kind: str) -> str:
    """Reads the file `*-{kind}.txt` of a dump.

    If the dump holds several modules, the largest file belongs to the program itself.

    Raises:
        RuntimeError: if there is no such file.
    """
    found = sorted(Path(directory).glob(f"*-{kind}.txt"))
    if not found:
        raise RuntimeError(
            f"no *-{kind}.txt in {str(directory)!r}: this backend writes no buffer assignment, "
            "or the program came from JAX's compilation cache"
        )
    return max(found, key=lambda path: path.stat().st_size).read_text()


def read_dump(directory: str | Path) -> dict[str, str]:
    """Reads the files of a dump from which a timeline is made, by kind."""
    return {kind: one_file(directory, kind) for kind in DUMPED}


def write_dump(directory: str | Path, texts: Mapping[str, str]) -> None:
    """Writes what `read_dump` read."""
    for kind in DUMPED:
        (Path(directory) / f"program-{kind}.txt").write_text(texts[kind])


def read_ranges(text: str) -> tuple[list[str], dict[Value, tuple[int, int]]]:
    """Reads a `live-range` file.

    Returns:
        The instructions' names in program order, and the first and last point of each value.
    """
    head, _, tail = text.partition("  BufferLiveRange:\n")
    points = [_POINT.match(line) for line in head.splitlines()]
    ranges = {
        (r.group(1), r.group(2)): (int(r.group(3)), int(r.group(4)))
        for r in map(_RANGE.match, tail.splitlines())
        if r
    }
    return [p.group(2) for p in points if p], ranges


def read_values(text: str, tiled: bool) -> Iterator[tuple[str, str, int, tuple[int, int], str]]:
    """Reads the values in device memory from a `buffer-assignment` file.

    Yields:
        Name, tuple index, bytes, (allocation, offset) and shape of each value.
    """
    allocation, here = 0, True
    for line in text.splitlines():
        if opening := _ALLOCATION.match(line):
            allocation = int(opening.group(1))
            here = in_hbm(int(opening.group(3) or 0), tiled)
        elif here and (value := _VALUE.match(line)):
            name, index, size, offset, shape = value.groups()
            place = (allocation, int(offset))
            yield name, index or "{}", int(size), place, re.sub(r"\{[^{}]*\}", "", shape)


def read_places(text: str) -> tuple[dict[Value, list[Value]], dict[Value, list[str]]]:
    """Reads a `buffer-assignment-values` file.

    Returns:
        For each value, its positions (it may pass through tuples and loops) and the names of the
        instructions that use it.
    """
    positions: dict[Value, list[Value]] = defaultdict(list)
    uses: dict[Value, list[str]] = defaultdict(list)
    key, section = ("", ""), ""
    for line in text.splitlines():
        if value := _HEADING.match(line):
            key = (value.group(1), value.group(2) or "{}")
        elif not line.startswith("  "):
            section = line.strip()
        elif section == "positions:":
            name, _, index = line.strip().partition(" ")
            positions[key].append((name, index or "{}"))
        elif section == "uses:":
            uses[key].append(line.split(",")[0].strip())
    return positions, uses
