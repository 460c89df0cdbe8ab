"""Meshes with explicit axes, over which types of arrays carry their sharding."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec


def explicit_axes() -> tuple[str, ...]:
    """Returns the names of the explicit axes of the mesh in whose context the caller is."""
    return explicit_axes_of(jax.sharding.get_abstract_mesh())


def explicit_axes_of(mesh: AbstractMesh) -> tuple[str, ...]:
    """Returns the names of the explicit axes of a mesh."""
    if mesh.empty:
        return ()
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in pairs if kind == AxisType.Explicit)


def automatic_mesh() -> AbstractMesh:
    """Returns the mesh of the present context, with automatic axes in place of explicit ones."""
    kinds = dict.fromkeys(explicit_axes(), AxisType.Auto)
    return jax.sharding.get_abstract_mesh().update_axis_types(kinds)


def spec_of(kind: Any) -> PartitionSpec:
    """Returns the explicit sharding of an array, by its type."""
    spec: PartitionSpec = kind.sharding.spec
    return spec


def over_automatic_axes(fn: Callable[..., Any], arrays: tuple[Any, ...], like: jax.Array) -> Any:
    """Calls a function over automatic axes; its results are sharded as one of its arguments.

    Where no axis is explicit, it only calls the function.

    An axis of a result is sharded as the axis of `like` at the same position, if it divides. A
    result of another rank is sharded along axis 0 alone.

    Args:
        fn: The function.
        arrays: Its arguments, any pytrees.
        like: The array that gives the shardings.
    """
    if not explicit_axes():
        return fn(*arrays)
    with jax.sharding.use_abstract_mesh(automatic_mesh()):
        plain = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays)
        shapes = jax.eval_shape(fn, *plain)
    sizes = jax.sharding.get_abstract_mesh().shape
    spec = [*spec_of(jax.typeof(like)), *[None] * like.ndim][: like.ndim]

    def placed(result: Any) -> PartitionSpec:
        known = spec if len(result.shape) == like.ndim else spec[:1]
        entries = []
        for size, entry in zip(result.shape, known, strict=False):
            names = entry if isinstance(entry, tuple) else (entry,) if entry else ()
            parts = math.prod(sizes[name] for name in names)
            entries.append(entry if size % parts == 0 else None)
        return PartitionSpec(*entries)

    automatic = jax.sharding.auto_axes(
        fn, axes=explicit_axes(), out_sharding=jax.tree.map(placed, shapes)
    )
    return automatic(*arrays)
