"""What the call of a Flax NNX model gives besides arrays: attributes it sets, other results."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxcomp.transform._program.program import Static

Path = tuple[Any, ...]


def attributes(model: nnx.Module) -> dict[Path, dict[str, Any]]:
    """Returns the attributes of a model and of all that is in it, by path."""
    return {
        path: {name: v for name, v in vars(part).items() if not name.startswith("_pytree__")}
        for path, part in nnx.iter_graph(model)
        if isinstance(part, nnx.Pytree)
    }


def changes(before: dict[Path, dict[str, Any]], model: nnx.Module) -> dict[tuple[Path, str], Any]:
    """Returns the attributes without arrays that a model has set since `before`, by path and name.

    Variables are no part of it, since `nnx.update` updates and adds them.

    Raises:
        TypeError: If an attribute was deleted, or set to what would have to be an `nnx.Variable`.
    """
    changed = {}
    for path, now in attributes(model).items():
        old = before.get(path, now)
        for name in dict.fromkeys((*old, *now)):
            value = now.get(name)
            if name in old and value is old[name] and name in now:
                continue
            is_variable = isinstance(value, nnx.Variable)
            is_updated = _has_arrays(value) and _has_arrays(old.get(name))
            if name in now and (is_variable or is_updated):
                continue
            if name not in now or nnx.is_data(value) or _has_arrays(value):
                where = "/".join(map(str, (*path, name)))
                kind = "array" if _is_array(value) else type(value).__name__
                does = f"sets it to a new {kind}" if name in now else "deletes it"
                raise TypeError(
                    f"attribute {where}: the call of a compressed model {does}; expected a call "
                    "that sets values without arrays and nnx.Variables alone"
                )
            changed[path, name] = value
    return changed


def change(model: nnx.Module, changed: dict[tuple[Path, str], Any]) -> None:
    """Sets attributes that `changes` found on a copy of the model."""
    parts = dict(nnx.iter_graph(model)) if changed else {}
    for (path, name), value in changed.items():
        setattr(parts[path], name, value)


def without_others(result: Any) -> Any:
    """Returns a pytree that a traced function may return.

    Its leaves that are no arrays are `Static`.
    """
    return jax.tree.map(lambda leaf: leaf if _is_array(leaf) else Static(leaf), result)


def with_others(result: Any) -> Any:
    """Undoes `without_others`."""

    def is_static(node: Any) -> bool:
        return isinstance(node, Static)

    return jax.tree.map(lambda n: n.value if is_static(n) else n, result, is_leaf=is_static)


def _has_arrays(value: Any) -> bool:
    return any(map(_is_array, jax.tree.leaves(value)))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)
