"""Name scopes that mark which module of a model computes a value in a traced program."""

import re
import types
from typing import Any

import jax
from flax import nnx

from jaxcomp._core.modules import set_class

_MARK = "module:"


def with_module_scopes(model: nnx.Module, called: dict[str, int]) -> nnx.Module:
    """Returns a copy of a model whose modules run in a name scope that contains their path.

    Args:
        model: Any model.
        called: Dict that the calls fill: the path of each called module, in the order of the first
            calls, with the sum of its `saved_elements(args, result)` over all calls. The sum is 0
            for modules without that method.

    Returns:
        The copy.
    """
    model = nnx.clone(model)
    for path, module in list(nnx.iter_modules(model)):
        if callable(module):
            name = "/".join(map(str, path))
            set_class(module, _scoped(type(module), name, called))
    return model


def _scoped(kind: type[nnx.Module], path: str, called: dict[str, int]) -> type[nnx.Module]:
    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(_MARK + path.encode().hex()):
            called.setdefault(path, 0)
            result = kind.__call__(self, *args, **kwargs)
        count = getattr(self, "saved_elements", None)
        if count is not None:
            called[path] += count((*args, *kwargs.values()), result)
        return result

    return types.new_class(
        kind.__name__, (kind,), exec_body=lambda body: body.update(__call__=call)
    )


def scope_paths(scope: str) -> list[str]:
    """Returns the paths of the modules in whose calls a value was computed, outermost first."""
    return [bytes.fromhex(path).decode() for path in re.findall(rf"{_MARK}([0-9a-f]*)", scope)]
