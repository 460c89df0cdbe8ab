"""Every choice that depends on the platform that a program is compiled for, by name.

Each function takes the forms of one computation and emits the one for the platform. The forms stand
beside the operation that they belong to. JAX decides when it lowers a program, so an absent target
of an ahead-of-time compilation counts.
"""

import functools
import typing
from collections.abc import Callable

from jax import lax

T = typing.TypeVar("T")
Form = Callable[..., T]


def multiply_to_pack_on_tpu(codes: T, by_product: Form[T], by_shift: Form[T]) -> T:
    """Packs or unpacks codes by a matrix product on a TPU, where moves across lanes are slow."""
    return lax.platform_dependent(codes, tpu=by_product, default=by_shift)


def hold_until_copied_on_gpu(operands: tuple[T, list[T]], hold: Form[T]) -> T:
    """Holds a value back on a GPU until copies to the host are done; TPUs copy at once."""
    return lax.platform_dependent(*operands, cuda=hold, default=lambda value, _: value)


def no_barrier_on_tpu(operands: T) -> T:
    """An optimisation barrier, but none on a TPU, whose compiler fuses the decoding anyway."""
    return lax.platform_dependent(
        operands, tpu=lambda operands: operands, default=lax.optimization_barrier
    )


def remake_on_tpu(made: T, remake: Form[T]) -> T:
    """A value that a TPU computes again after its codes, as a part of the kernel that reads it."""
    return lax.platform_dependent(made, tpu=remake, default=lambda made: made)


def pool_over_map_on_tpu(
    operands: tuple[typing.Any, ...], over_map: Form[T], windows: Form[T]
) -> T:
    """A pool's backward sums over the whole map on a TPU, over the windows elsewhere."""
    return lax.platform_dependent(*operands, tpu=over_map, default=windows)


def multiply_integers_on_gpu(
    operands: tuple[typing.Any, ...], of_integers: Form[T], of_decoded: Form[T]
) -> T:
    """A product of the integers of a code on a GPU, of the decoded values elsewhere."""
    return lax.platform_dependent(*operands, cuda=of_integers, default=of_decoded)


def kernel_or_interpreter(
    platform: typing.Literal["cuda", "tpu"], operands: tuple[typing.Any, ...], run: Form[T]
) -> T:
    """A Pallas kernel, `run(interpret, *operands)`: compiled on its platform, else interpreted."""
    forms = {platform: functools.partial(run, False), "default": functools.partial(run, True)}
    return lax.platform_dependent(*operands, **forms)
