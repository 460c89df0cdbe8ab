"""Parses the text of an optimized HLO module: computations, instructions, shapes, source lines.

The parser supports only what this package needs of the text that XLA prints for a compiled module
(`compiled.as_text()`) on CPU, GPU and TPU.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path

_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(
    r"(calls|to_apply|body|condition|true_computation|false_computation|branch_computations)"
    r"=(?:%([\w.\-]+)|\{([^{}]*)\})"
)
_SOURCE = re.compile(r'source_file="([^"]*)".*?source_line=(\d+)')
_INSTALLED = re.compile(r"[/\\](site-packages|dist-packages)[/\\]")
_PACKAGE = Path(__file__).parents[1]
_HOST_MEMORY = 5


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result.

    Attributes:
        dtype: XLA's name of the dtype, for example `f32`, `bf16`, `u4` or `pred`.
        dims: the logical dimensions.
        elements: the number of elements, without padding.
        bits: the size in memory in bits, with the padding of a tiled (TPU) layout.
        in_hbm: whether the array is in device memory. It is false for arrays in host memory, and
            in VMEM, SMEM or the semaphores of a TPU.
        on_host: whether the array is in host memory.
    """

    dtype: str
    dims: tuple[int, ...]
    elements: int
    bits: int
    in_hbm: bool
    on_host: bool

    @property
    def bytes(self) -> int:
        """The size in memory, rounded up to whole bytes."""
        return -(-self.bits // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One HLO instruction: `%name = type opcode(operands), attributes`.

    Attributes:
        name: the name, unique in a module.
        opcode: the operation, for example `fusion`.
        arrays: the arrays of the result.
        operands: the names of the operands.
        arguments: the text between the parentheses.
        attributes: the text after the parentheses.
        is_root: whether the computation returns the result.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool

    @cached_property
    def op_name(self) -> str:
        """Returns JAX's name stack and primitive, or "" if XLA created the instruction."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    @cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Returns names of called computations by attribute (`calls`, `body`, `condition`, ...)."""
        return {
            key: (one,) if one else tuple(re.findall(r"[\w.\-]+", many))
            for key, one, many in _CALLED.findall(self.attributes)
        }

    @cached_property
    def index(self) -> int:
        """Returns the `index=` of a get-tuple-element, or the number of a parameter."""
        if self.opcode == "parameter":
            return int(self.arguments)
        found = re.search(r"\bindex=(\d+)", self.attributes)
        if found is None:
            raise ValueError(f"HLO instruction {self.name!r} ({self.opcode}) has no index")
        return int(found.group(1))


@dataclasses.dataclass(frozen=True)
class Computation:
    """A named sequence of instructions, in program order if the module is scheduled."""

    name: str
    instructions: dict[str, Instruction]

    @cached_property
    def root(self) -> Instruction:
        """Returns the instruction whose result the computation returns."""
        return next(i for i in self.instructions.values() if i.is_root)

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Returns the parameters by number."""
        return {i.index: i for i in self.instructions.values() if i.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Returns the instructions that read each value."""
        users: dict[str, list[Instruction]] = defaultdict(list)
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return users


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed HLO module.

    Attributes:
        computations: all computations by name.
        entry: the entry computation.
        tiled: whether the layouts are tiled, as on a TPU.
        tables: the rows of the tables of files, functions, locations and stack frames.
    """

    computations: dict[str, Computation]
    entry: Computation
    tiled: bool
    tables: dict[str, dict[int, str]]

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """Returns all instructions by name."""
        return {n: i for c in self.computations.values() for n, i in c.instructions.items()}

    def source(self, instruction: Instruction) -> str:
        """Returns `file:line` of the innermost frame of user code, or "" if it is not known."""
        direct = _SOURCE.search(instruction.attributes)
        if direct:
            return f"{direct.group(1)}:{direct.group(2)}"
        frame = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        lines = list(self._stack(int(frame.group(1)))) if frame else []
        return next((line for line in lines if not _is_library(line)), (lines or [""])[0])

    def _stack(self, frame_id: int) -> Iterator[str]:
        """Returns `file:line` of a stack frame and its callers, innermost first."""
        while frame_id in self.tables["StackFrames"]:
            frame = self.tables["StackFrames"][frame_id]
            location = self.tables["FileLocations"][_field("file_location_id", frame)]
            file = self.tables["FileNames"][_field("file_name_id", location)].strip('"')
            yield f"{file}:{_field('line', location)}"
            frame_id = _field("parent_frame_id", frame) - 1  # XLA prints the parent plus one.


@lru_cache(maxsize=1)
def parse(text: str) -> Module:
    """Parses the text of a compiled HLO module. The last one is remembered for its other figures.

    Args:
        text: the text of the module, `compiled.as_text()`.

    Returns:
        The parsed module.

    Raises:
        ValueError: if `text` has no entry computation.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> compiled = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((8, 8))).compile()
        >>> parse(compiled.as_text()).entry.root.arrays[0].bytes
        256
    """
    tiled = re.search(r"\{[\d,]*:T\(", text) is not None
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = defaultdict(dict)
    entry, table, current = None, "", None
    for line in text.splitlines():
        if opening := _COMPUTATION.match(line):
            current = Computation(opening.group(2), {})
            computations[current.name] = current
            entry = current if opening.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _INSTRUCTION.match(line)):
            root, name, rest = found.groups()
            current.instructions[name] = _instruction(name, rest, root is not None, tiled)
        elif row := re.match(r"(\d+) (.*)", line):
            tables[table][int(row.group(1))] = row.group(2)
        else:
            table = line.strip()
    if entry is None:
        raise ValueError(f"text: expected a compiled HLO module, got {text[:80]!r}")
    return Module(computations, entry, tiled, tables)


def _is_library(file: str) -> bool:
    """Returns whether a file is library code. The models of this package count as user code."""
    if Path(file).is_relative_to(_PACKAGE):
        return not Path(file).is_relative_to(_PACKAGE / "models")
    return _INSTALLED.search(file) is not None


def in_hbm(memory_space: int, tiled: bool) -> bool:
    """Returns whether a memory space of XLA is device memory.

    On TPU (tiled layouts) only space 0 is.
    """
    return memory_space == 0 or (not tiled and memory_space != _HOST_MEMORY)


def _instruction(name: str, rest: str, is_root: bool, tiled: bool) -> Instruction:
    type_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode, _, _ = rest[type_end:].lstrip().partition("(")
    start = rest.index("(", type_end)
    end = _closing(rest, start)
    arguments = rest[start + 1 : end]
    arrays = tuple(_array(d, n, layout, tiled) for d, n, layout in _ARRAY.findall(rest[:type_end]))
    return Instruction(
        name=name,
        opcode=opcode,
        arrays=arrays,
        operands=tuple(re.findall(r"%([\w.\-]+)", arguments)),
        arguments=arguments,
        attributes=rest[end + 1 :],
        is_root=is_root,
    )


def _array(dtype: str, dims_text: str, layout: str, tiled: bool) -> Array:
    """Parses a shape: dtype, dimensions, layout, tiles and memory space.

    The shape `bf16[8,300]{1,0:T(8,128)(2,1)S(1)}` has all of them.
    """
    dims = tuple(int(d) for d in re.findall(r"\d+", dims_text))
    order, _, annotations = layout.partition(":")
    padded = [dims[int(axis)] for axis in order.split(",")[::-1] if axis] or list(dims)
    if found := re.search(r"T\(([\d,]+)\)", annotations):
        tile = [int(t) for t in found.group(1).split(",")]
        padded = [1] * (len(tile) - len(padded)) + padded
        whole = len(padded) - len(tile)
        rounded = [-(-d // t) * t for d, t in zip(padded[whole:], tile, strict=True)]
        padded = padded[:whole] + rounded
    space = re.search(r"S\((\d+)\)", annotations)
    number = int(space.group(1)) if space else 0
    return Array(
        dtype=dtype,
        dims=dims,
        elements=prod(dims),
        bits=prod(padded) * _bits(dtype),
        in_hbm=in_hbm(number, tiled),
        on_host=number == _HOST_MEMORY,
    )


def _bits(dtype: str) -> int:
    """Returns the bits per element: 8 for `pred`, else the number in the name, such as `u4`."""
    if dtype == "pred":
        return 8
    found = re.search(r"\d+", dtype)
    return int(found.group()) if found else 0  # Tokens and opaque values hold no data.


def _closing(text: str, start: int) -> int:
    """Returns the position of the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found.group() == "(" else -1
        if depth == 0:
            return found.start()
    raise ValueError(f"unbalanced parentheses in HLO text: {text[:80]!r}")


def _field(name: str, text: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", text)
    if found is None:
        raise ValueError(f"HLO stack frame table: no {name} in {text!r}")
    return int(found.group(1))
