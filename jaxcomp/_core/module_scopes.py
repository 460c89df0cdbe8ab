"""Name scopes that mark which module of a model computes a value in a traced program."""

import contextlib
import itertools
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from jaxcomp._core.modules import set_class


class ModuleScope(str):
    """The name of a scope in which a module is called, as profiles and XLA show it.

    JAX keeps the object itself in its name stack, so the text needs no mark.

    Attributes:
        path: Path of the module in the watched model.
        caller: Path of the module whose call it is in; "" for the model itself or none.
    """

    path: str
    caller: str

    def __new__(cls, path: str, caller: str = "") -> "ModuleScope":
        """Returns a scope with the path as text, from its caller on if that contains the module."""
        scope = super().__new__(cls, path.removeprefix(f"{caller}/" if caller else ""))
        scope.path, scope.caller = path, caller
        return scope


def with_module_scopes(model: nnx.Module, called: dict[str, int]) -> nnx.Module:
    """Returns a copy of a model whose modules run in name scopes of their paths.

    Modules that are watched as a part of another model get scopes of this one in place of these.

    Args:
        model: Any model.
        called: Dict that the calls fill: the path of each called module, in the order of the first
            calls, with the sum of its `saved_elements(args, result)` over all calls. The sum is 0
            for modules without that method.

    Returns:
        The copy.
    """
    model = nnx.clone(model)
    add_module_scopes(model, called)
    return model


def add_module_scopes(model: nnx.Module, called: dict[str, int]) -> None:
    """Changes a model so that its modules run in name scopes, as `with_module_scopes`."""
    callers: list[str] = []
    for path, module in list(nnx.iter_modules(model)):
        if callable(module):
            name = "/".join(map(str, path))
            kind = vars(type(module)).get("unscoped_class", type(module))
            set_class(module, _scoped(kind, name, callers, called))


def _scoped(
    kind: type[nnx.Module], path: str, callers: list[str], called: dict[str, int]
) -> type[nnx.Module]:
    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        called.setdefault(path, 0)
        with _scope(path, callers):
            result = kind.__call__(self, *args, **kwargs)
        count = getattr(self, "saved_elements", None)
        if count is not None:
            called[path] += count((*args, *kwargs.values()), result)
        return result

    own = {"__call__": call, "unscoped_class": kind}
    return types.new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(own))


@contextlib.contextmanager
def _scope(path: str, callers: list[str]) -> Iterator[None]:
    """Returns the scope of a module's call; the model's own call, whose path is empty, has none."""
    if not path:
        yield
        return
    with jax.named_scope(ModuleScope(path, callers[-1] if callers else "")):
        callers.append(path)
        try:
            yield
        finally:
            callers.pop()


def scope_path(names: Sequence[str]) -> str:
    """Returns the path of the innermost module in whose call a value was computed, or "".

    In a function without watched models it is that of the named scopes. Linen opens one for each
    module.

    Args:
        names: Names of scopes, outermost first. A watched model inside of another one has paths of
            its own, which start at the path of the module that calls it.

    Example:
        >>> names = [ModuleScope("encoder"), "attend", ModuleScope("encoder/norm", "encoder")]
        >>> names, scope_path(names)
        (['encoder', 'attend', 'norm'], 'encoder/norm')
        >>> scope_path(["Encoder", "norm", "jaxcomp/quantize"])
        'Encoder/norm'
    """
    if any(isinstance(name, ModuleScope) for name in names):
        return scope_paths(names)[-1]
    return "/".join(itertools.takewhile(lambda name: not name.startswith("jaxcomp/"), names))


def scope_paths(names: Iterable[str]) -> list[str]:
    """Returns the paths of the modules in whose calls a value was computed, outermost first."""
    model, paths = "", [""]
    for scope in names:
        if isinstance(scope, ModuleScope):
            model = model if scope.caller else paths[-1]
            paths.append(f"{model}/{scope.path}".removeprefix("/"))
    return paths[1:]
