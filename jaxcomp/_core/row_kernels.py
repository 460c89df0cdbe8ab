"""Kernels of NVIDIA GPUs for elementwise functions of rows of channels.

XLA compiles an elementwise function to a kernel in which each thread computes four elements, and
loads all parameters of its channels for them. Kernels with codes are bound by such instructions. In
the kernels here a thread goes through many rows, keeps the parameters of its channels, moves 16
bytes at once, and multiplies and adds by one instruction where no bit depends on it.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jaxtyping import Array

from jaxcomp._core.one_device import on_one
from jaxcomp._core.rows import (
    ALL,
    NONE,
    SHAPING,
    NotOfRows,
    Part,
    Rows,
    Sum,
    Value,
    with_operands,
)
from jaxcomp._core.shard_map import match_varying, struct_like

THREADS = 128  # of a program
ELEMENTS = 8  # of a thread, in one step: 16 bytes of 16-bit numbers
PROGRAMS = 132 * 12  # a multiprocessor of an H100 runs about so many of them at a time
# Kernels that differ in source lines alone would be compiled for each of them.
_SOURCE = source_info_util.current().traceback
_NO_SCOPE = source_info_util.NameStack()
INTERPRET = False  # whether Pallas interprets kernels, on any platform; for tests
LEAST_WIDTH = 16  # channels of a tile; with fewer, memory is read in short pieces
LEAST_ELEMENTS = 8  # of a thread in one step; with fewer, XLA's kernels are as good


def by_row_kernel(
    function: Callable[..., Any], *, exact: bool, wanted: bool = True
) -> Callable[..., Any]:
    """Computes a function of rows of channels by one kernel, in a program for one NVIDIA GPU.

    The function is left to XLA in other programs, if it is not of rows, or if threads cannot share
    its elements evenly.

    Args:
        function: Function of pytrees of arrays; elementwise, but for sums over all axes but the
            last.
        exact: Whether results in floating point have to have the bits of XLA.
        wanted: Whether there is to be a kernel; else the function is returned as it is.

    Returns:
        A function with the same results. Without `exact`, and in sums, they differ by rounding.

    Example:
        >>> scaled = by_row_kernel(lambda x, scale: x * scale, exact=True)
        >>> scaled(jnp.ones((2, 4)), jnp.arange(4.0)[None])[1].tolist()
        [0.0, 1.0, 2.0, 3.0]
    """
    if not wanted:
        return function

    def run(*arguments: Any) -> Any:
        arguments = match_varying(arguments)
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        # What the function closes over is an argument, too: the program may be evaluated again.
        inputs = [*map(jnp.asarray, program.consts), *jax.tree.leaves(arguments)]
        constants = len(program.consts)

        def by_xla(*inputs: Array) -> list[Array]:
            closed = ClosedJaxpr(program.jaxpr, inputs[:constants])
            return list(jaxpr_as_fun(closed)(*inputs[constants:]))

        def by_kernel(*inputs: Array) -> list[Array]:
            return _kernel(program.jaxpr, inputs, exact).results(inputs, jax.tree.leaves(shapes))

        form = by_xla
        with contextlib.suppress(NotOfRows):
            jax.eval_shape(lambda *inputs: _kernel(program.jaxpr, inputs, exact) and None, *inputs)
            form = on_one("cuda", by_kernel, by_xla)
        return jax.tree.unflatten(jax.tree.structure(shapes), form(*inputs))

    return run


def _kernel(program: Jaxpr, inputs: Sequence[Array], exact: bool) -> "Kernel":
    """Returns the kernel of a function.

    Raises:
        NotOfRows: If there is no kernel for it.
    """
    rows = Rows.of(program, inputs, exact=exact)
    kernel = Kernel(rows)
    if kernel.width < LEAST_WIDTH or kernel.width * kernel.height < LEAST_ELEMENTS * THREADS:
        raise NotOfRows(f"{rows.shape}: few rows or channels")
    if math.prod(rows.shape) >= 2**31:
        raise NotOfRows(f"{rows.shape}: 32-bit indices are too short")
    return kernel


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel of a function of rows.

    Attributes:
        rows: The function.
    """

    rows: Rows

    @property
    def parts(self) -> tuple[int, int, int]:
        """Number of groups of rows, rows of a group, and channels: no tile is of two groups."""
        samples, rows, channels = self.rows.shape
        return (samples, rows, channels) if self.rows.by_sample else (1, samples * rows, channels)

    @property
    def width(self) -> int:
        """Channels of a tile: a power of two that divides their number."""
        channels = self.rows.shape[-1]
        return min(channels & -channels, THREADS)

    @property
    def height(self) -> int:
        """Rows of a tile: a power of two."""
        _, count, _ = self.parts
        return min(1 << count.bit_length() - 1, ELEMENTS * THREADS // self.width)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Programs of a group one below the other, beside each other, and number of groups."""
        groups, _, channels = self.parts
        return -(-self.tiles // self.steps), channels // self.width, groups

    @property
    def tiles(self) -> int:
        """Number of tiles of a group one below the other."""
        _, count, _ = self.parts
        return -(-count // self.height)

    @property
    def steps(self) -> int:
        """Number of tiles one below the other that a program computes."""
        groups, _, channels = self.parts
        wanted = max(1, self.tiles * (channels // self.width) * groups // PROGRAMS)
        divisors = [n for n in range(wanted // 2 + 1, wanted + 1) if self.tiles % n == 0]
        return max(divisors, default=min(self.tiles, wanted))

    @property
    def overlaps(self) -> bool:
        """Whether the last tiles begin earlier, and compute some rows once more."""
        return self.grid[0] * self.steps * self.height != self.parts[1]

    def results(
        self, inputs: Sequence[Array], shapes: Sequence[jax.ShapeDtypeStruct]
    ) -> list[Array]:
        """Runs the kernel.

        Args:
            inputs: The arguments of the function.
            shapes: Shapes of its results.
        """
        rows = self.rows
        made = self._launch(dict(zip(rows.arguments, inputs, strict=True)))
        small = (r for r in rows.results if isinstance(r, Value) and r not in made)
        made |= {r: jnp.asarray(r.array) for r in small}
        results = zip(rows.results, shapes, strict=True)
        return [_as_stored(made[r], like.dtype).reshape(like.shape) for r, like in results]

    def _launch(self, given: dict[Value, Array]) -> dict[Value | Sum, Array]:
        """Returns the results of rows, in two dimensions, and the sums."""
        rows, channels = self.rows, self.rows.shape[-1]
        count = math.prod(rows.shape[:-1])
        arrays = [self._small(v) if v.axes != ALL else self._large(v, given) for v in rows.read]
        first = next(a for a, v in zip(arrays, rows.read, strict=True) if v.axes == ALL)
        like = functools.partial(struct_like, first)
        results = [like((count, _bytes_of(v.part, channels)), v.dtype) for v in rows.made]
        if rows.sums:
            below, _, groups = self.grid
            sums = (groups * below, len(rows.sums), channels)
            results.append(like(sums, jnp.float32))
        made = pl.pallas_call(
            self._run,
            grid=self.grid,
            in_specs=[_whole(a.shape) for a in arrays],
            out_specs=[_whole(r.shape) for r in results],
            out_shape=results,
            compiler_params=_triton().CompilerParams(num_warps=THREADS // 32, num_stages=1),
            interpret=INTERPRET,
            name="rows",
        )(*arrays)
        found: dict[Value | Sum, Array] = dict(zip(rows.made, made, strict=False))
        if rows.sums:
            found |= dict(zip(rows.sums, made[-1].sum(0), strict=True))
        return found

    def _large(self, value: Value, given: dict[Value, Array]) -> Array:
        """Returns an argument of rows in two dimensions: rows, and channels or bytes of codes."""
        array = given[value.argument].reshape(math.prod(self.rows.shape[:-1]), -1)
        if array.dtype == jnp.uint4:
            array = lax.bitcast_convert_type(array.reshape(len(array), -1, 2), jnp.uint8)
        return array

    def _small(self, value: Value) -> Array:
        """Returns a small array in two dimensions: samples or rows, and channels or one."""
        array, axes = jnp.asarray(value.array), value.axes or NONE
        return array.reshape(-1, self.rows.shape[-1] if axes.channel else 1)

    def _run(self, *refs: Any) -> None:
        """Computes one program of the kernel."""
        with source_info_util.user_context(_SOURCE, name_stack=_NO_SCOPE):
            self._program(*refs)

    def _program(self, *refs: Any) -> None:
        rows, height, width = self.rows, self.height, self.width
        _, count, channels = self.parts
        reads = dict(zip(rows.read, refs, strict=False))
        writes = refs[len(rows.read) :]
        program, column, group = (pl.program_id(axis) for axis in range(3))
        columns = pl.ds(column * width, width)

        def places(value: Value) -> Any:
            size = _bytes_of(value.part, width)
            return pl.ds(column * size, size)

        fixed: dict[Value, Array] = {}
        for value, ref in reads.items():
            if not value.changes:
                by_sample, _, by_channel = value.axes or NONE
                sample = group if by_sample else 0
                fixed[value] = ref[pl.ds(sample, 1), columns] if by_channel else ref[sample, 0]
        needed = with_operands(rows.made_in_kernel, until=reads.__contains__)
        for value in needed:
            if not value.changes:
                self._value(value, fixed)

        changing = [value for value in reads if value.changes]

        def first_row(number: Array | int) -> tuple[Array, Array]:
            """Returns where a tile begins, and how many of its rows another tile has, too."""
            begin = (program * self.steps + number) * height
            first = jnp.minimum(begin, count - height) if self.overlaps else begin
            return first, begin - first

        def load(number: Array | int) -> tuple[Array, ...]:
            first, _ = first_row(number)
            below = pl.ds(group * count + first, height)
            tiles = []
            for value in changing:
                if value.axes == ALL:
                    tiles.append(reads[value][below, places(value)])
                else:
                    of_sample = below if value.axes and value.axes.sample else pl.ds(first, height)
                    tiles.append(reads[value][of_sample, :])
            return tuple(tiles)

        def compute(
            number: Array | int, tiles: tuple[Array, ...], totals: tuple[Array, ...]
        ) -> tuple[Array, ...]:
            first, overlap = first_row(number)
            below = pl.ds(group * count + first, height)
            known = fixed | dict(zip(changing, tiles, strict=True))
            pair = (group * count + first) * (channels // 2) + column * (width // 2)
            known |= {v: self._index(pair) for v in needed if v.name == "index"}
            for value, ref in zip(rows.made, writes, strict=False):
                ref[below, places(value)] = self._value(value, known)
            return tuple(
                self._plus(total, s.of, known, overlap)
                for total, s in zip(totals, rows.sums, strict=True)
            )

        def step(number: Array, carried: tuple[Any, ...]) -> tuple[Any, ...]:
            # The next tile is on its way from memory while this one is computed.
            tiles, totals = carried
            ahead = load(jnp.minimum(number + 1, self.steps - 1))
            return ahead, compute(number, tiles, totals)

        zeros = tuple(jnp.zeros((height, width), jnp.float32) for _ in rows.sums)
        if self.steps == 1:
            totals = compute(0, load(0), zeros)
        else:
            _, totals = lax.fori_loop(0, self.steps, step, (load(0), zeros))
        for number, total in enumerate(totals):
            writes[-1][group * self.grid[0] + program, number, columns] = total.sum(0)

    def _index(self, first: Array) -> Array:
        """Returns the index of each element of a tile, as twice that of its pair, and a half.

        The compiler then sees that two neighbours share what follows from their pair.

        Args:
            first: Index of the first pair.
        """
        pairs = self.height, self.width // 2
        row, column = (lax.broadcasted_iota(jnp.int32, pairs, i) for i in range(2))
        pair = (first + row * (self.rows.shape[-1] // 2) + column).astype(jnp.uint32)
        both = jnp.broadcast_to(pair[:, :, None], (*pairs, 2))
        index = (both << 1) | lax.broadcasted_iota(jnp.uint32, both.shape, 2)
        return index.reshape(self.height, self.width)

    def _value(self, value: Value, known: dict[Value, Array]) -> Array:
        """Computes a value from those that are known, and adds it to them."""
        if value in known:
            return known[value]
        if value.is_constant:
            made = jnp.asarray(value.array)
        elif value.name in ("add", "sub") and self._may_fuse(value):
            made = self._fused(value, known)
        else:
            made = self._operation(value, [self._value(o, known) for o in value.operands])
        known[value] = made
        return made

    def _may_fuse(self, value: Value) -> bool:
        return (
            value.changes
            and value.dtype == jnp.float32
            and value not in self.rows.exact
            and any(o.name == "mul" and o.changes for o in value.operands)
        )

    def _fused(self, value: Value, known: dict[Value, Array]) -> Array:
        """Computes a sum or difference with a product by one instruction."""
        first, second = value.operands
        is_first = first.name == "mul" and first.changes
        product, other = (first, second) if is_first else (second, first)
        one, factor = (self._value(o, known) for o in product.operands)
        added = self._value(other, known)
        if value.name == "sub":
            one, added = (one, _minus(added)) if is_first else (_minus(one), added)
        return self._multiply_add(one, factor, added)

    def _plus(self, total: Array, value: Value, known: dict[Value, Array], overlap: Array) -> Array:
        """Adds the rows of a tile to a sum, but the first ones that another tile has, too."""
        if self.overlaps:
            is_own = lax.broadcasted_iota(jnp.int32, total.shape, 0) >= overlap
            return total + jnp.where(is_own, self._value(value, known), 0.0)
        if value.name == "mul":
            one, factor = (self._value(o, known) for o in value.operands)
            return self._multiply_add(one, factor, total)
        return total + self._value(value, known)

    def _multiply_add(self, one: Array, factor: Array, added: Array) -> Array:
        operands = jnp.broadcast_arrays(one, factor, added)
        if INTERPRET:
            return operands[0] * operands[1] + operands[2]
        return _assembly("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", operands)

    def _operation(self, value: Value, operands: list[Array]) -> Array:
        if value.name == "pack":
            return _join(operands[0], cast(Part, value.part))
        if value.name == "unpack":
            parts = (cast(Part, stored.part) for stored in value.operands)
            return functools.reduce(jnp.bitwise_or, map(_split, operands, parts))
        if value.equation is None or value.name in SHAPING:  # a broadcast
            return operands[0]
        params = value.equation.params
        if value.name == "convert_element_type":
            return operands[0].astype(params["new_dtype"])
        operands = jnp.broadcast_arrays(*operands)
        is_float = jnp.issubdtype(value.dtype, jnp.floating)
        if value.name in ("max", "min") and value in self.rows.exact and is_float:
            return _extreme(value.name, operands)
        result: Array = value.equation.primitive.bind(*operands, **params)
        return result


def _extreme(name: str, operands: list[Array]) -> Array:
    """Returns the maximum or minimum of two arrays; NaN where one is. Triton's drops NaNs."""
    if INTERPRET:
        return (jnp.maximum if name == "max" else jnp.minimum)(*operands)
    dtype = jnp.dtype(operands[0].dtype)
    if dtype == jnp.float32:
        return _assembly(f"{name}.NaN.f32 $0, $1, $2;", "=f,f,f", operands)
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype.name]
    return _assembly(f"{name}.NaN.{kind} $0, $1, $2;", "=r,r,r", operands, pack=2)


def _assembly(code: str, constraints: str, operands: list[Array], pack: int = 1) -> Array:
    """Applies an instruction to the elements of arrays of one shape and dtype."""
    result = jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype)
    (made,) = _triton().elementwise_inline_asm(
        code,
        args=operands,
        constraints=constraints,
        pack=pack,
        result_shape_dtypes=[result],
    )
    return made


def _triton() -> Any:
    """Returns the backend of Pallas, which a later version of JAX will not have."""
    from jax.experimental.pallas import triton  # not with `import jaxcomp`

    return triton


def _whole(shape: tuple[int, ...]) -> pl.BlockSpec:
    """Gives each program the whole array."""
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def _bytes_of(part: Part | None, codes: int) -> int:
    """Returns the bytes of a part of some codes, or the number of values that are no codes."""
    return codes if part is None else codes * part.bits // 8


def _join(codes: Array, part: Part) -> Array:
    """Packs a part of codes to bytes, in a kernel."""
    height, width = codes.shape
    sharing = 8 // part.bits
    of_byte = codes.astype(jnp.uint32) >> part.first & jnp.uint32(2**part.bits - 1)
    of_byte = of_byte.reshape(height, width // sharing, sharing)
    return jnp.sum(of_byte << _places(of_byte, part), 2, dtype=jnp.uint32).astype(jnp.uint8)


def _split(joined: Array, part: Part) -> Array:
    """Returns a part of the codes of bytes, in a kernel, as int32."""
    height, width = joined.shape
    sharing = 8 // part.bits
    each = jnp.broadcast_to(joined.astype(jnp.int32)[:, :, None], (height, width, sharing))
    codes = (each >> _places(each, part) & (2**part.bits - 1)) << part.first
    return codes.reshape(height, width * sharing)


def _places(of_byte: Array, part: Part) -> Array:
    """Returns the first bit of each code in its byte."""
    return lax.broadcasted_iota(of_byte.dtype, of_byte.shape, 2) * of_byte.dtype.type(part.bits)


def _minus(x: Array) -> Array:
    """Returns `-x`. Pallas' Triton backend cannot negate a constant, as JAX traces one."""
    return 0.0 - x


def _as_stored(array: Array, dtype: Any) -> Array:
    """Returns bytes as the 4-bit numbers that store codes, and any other array as it is."""
    return lax.bitcast_convert_type(array, dtype) if dtype == jnp.uint4 else array
