"""All choices that depend on the platform for which a program is compiled.

Each function takes several forms of one computation and emits the form for the platform. The forms
are defined beside the operation they belong to. JAX selects the platform when it lowers a program,
so ahead-of-time compilation for an absent device works.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from jax import lax

T = TypeVar("T")
Form = Callable[..., T]


def pack_by_platform(operand: Any, *, tpu: Form[T], other: Form[T]) -> T:
    """Packs or unpacks codes by the operations that are fast on the platform."""
    return lax.platform_dependent(operand, tpu=tpu, default=other)


def convert_to_round_on_tpu(
    operands: tuple[Any, ...], by_conversion: Form[T], by_bits: Form[T]
) -> T:
    """Rounds to integers by a conversion on a TPU, and by the bits of floats elsewhere."""
    return lax.platform_dependent(*operands, tpu=by_conversion, default=by_bits)


def index_by_axes_on_tpu(salt: Any, by_axes: Form[T], by_count: Form[T]) -> T:
    """Computes the indices of an array axis by axis on a TPU, elsewhere by one count."""
    return lax.platform_dependent(salt, tpu=by_axes, default=by_count)


def hold_until_copied_on_gpu(operands: tuple[T, list[T]], hold: Form[T]) -> T:
    """Delays a value on a GPU until copies to the host are done; TPUs copy at once."""
    return lax.platform_dependent(*operands, cuda=hold, default=lambda value, _: value)


def no_barrier_on_tpu(operands: T) -> T:
    """Places an optimisation barrier, except on a TPU, whose compiler fuses the decoding."""
    return lax.platform_dependent(
        operands, tpu=lambda operands: operands, default=lax.optimization_barrier
    )


def hold_operands_on_tpu(operands: tuple[Any, ...], before: Form[T], after: Form[T]) -> T:
    """Places a barrier before a cheap function on a TPU, and after it elsewhere."""
    return lax.platform_dependent(*operands, tpu=before, default=after)


def constrain_on_tpu(value: T, constrain: Form[T]) -> T:
    """Constrains a sharding on a TPU; elsewhere the compiler chooses one."""
    return lax.platform_dependent(value, tpu=constrain, default=lambda value: value)


def remake_on_tpu(made: T, remake: Form[T]) -> T:
    """Computes a value again on a TPU after its codes, fused into the kernel that reads it."""
    return lax.platform_dependent(made, tpu=remake, default=lambda made: made)


def pool_over_map_on_tpu(operands: tuple[Any, ...], over_map: Form[T], windows: Form[T]) -> T:
    """Sums a pool's backward pass over the map on a TPU, over windows elsewhere."""
    return lax.platform_dependent(*operands, tpu=over_map, default=windows)


def multiply_integers_on_gpu(
    operands: tuple[Any, ...], of_integers: Form[T], of_decoded: Form[T]
) -> T:
    """Multiplies the integers of a code on a GPU, the decoded values elsewhere."""
    return lax.platform_dependent(*operands, cuda=of_integers, default=of_decoded)


def cast_to_multiply_on_cpu(operands: list[T], by_cast: Form[T], directly: Form[T]) -> T:
    """Casts operands before some products on a CPU, which lacks those with a wider result."""
    return lax.platform_dependent(operands, cpu=by_cast, default=directly)


def mark_nans_on_cpu(operands: tuple[Any, ...], mark: Form[T], unmarked: Form[T]) -> T:
    """Makes a maximum NaN on a CPU if a value is; on other platforms it is so by itself."""
    return lax.platform_dependent(*operands, cpu=mark, default=unmarked)


def sum_as_one_on_gpu(operands: tuple[Any, ...], as_one: Form[T], apart: Form[T]) -> T:
    """Takes two sums of a GPU by one reduction of one operand, and apart elsewhere."""
    return lax.platform_dependent(*operands, cuda=as_one, default=apart)


def interpret_but_on_tpu(operands: tuple[Any, ...], run: Form[T]) -> T:
    """Runs the kernel `run(interpret, *operands)` on a TPU, and interprets it elsewhere."""
    kernel, interpreted = functools.partial(run, False), functools.partial(run, True)
    return lax.platform_dependent(*operands, tpu=kernel, default=interpreted)
