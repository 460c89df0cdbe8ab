"""Whether functions of JAX are replaced, as quantization libraries do during a user's call."""

import inspect
from types import CodeType, FunctionType, ModuleType

import jax

_MODULES = (jax.lax, jax.numpy, jax.nn)


def are_replaced() -> bool:
    """Returns whether a public function of JAX is another, or has other code, than at import."""
    return any(_codes(module) != _STOCK[module] for module in _MODULES)


def _codes(module: ModuleType) -> dict[str, CodeType]:
    functions = {name: inspect.unwrap(f) for name, f in vars(module).items() if callable(f)}
    return {name: f.__code__ for name, f in functions.items() if isinstance(f, FunctionType)}


_STOCK = {module: _codes(module) for module in _MODULES}
