"""`plan`: what a function or model saves for its backward pass, before anything runs."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import linen, nnx
from jax.extend.core import ClosedJaxpr

from jaxcomp._core.module_scopes import scope_path, scope_paths, with_module_scopes
from jaxcomp._core.modules import split_model, stock_class
from jaxcomp.codecs import Exact
from jaxcomp.diagnostics._exact import encodes, exact_copy
from jaxcomp.memory import declared_residuals
from jaxcomp.memory._declared import Residual
from jaxcomp.nn._coded import Coded, coded_modules, covered
from jaxcomp.transform._checkpoint import Checkpointed
from jaxcomp.transform._compress import traced_call
from jaxcomp.transform._plan import Plan, SavedValue, without_indices
from jaxcomp.transform._program.program import Program
from jaxcomp.transform._program.without_codes import has_codes, without_codes

_MUCH = 0.1  # of all bytes


def plan(model_or_fn: nnx.Module | Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
    """Lists what a call would save for its backward pass; nothing is computed.

    The bytes are those that the program declares, for the gradient with respect to parameters and
    floating-point inputs. `jaxcomp.memory.analyze` tells what XLA makes of them.

    Args:
        model_or_fn: A Flax NNX model in training mode, compressed or not; what `checkpoint`
            returned; or any function of arrays. A model whose call is traced, and a function, are
            listed by value; other models by module, in the order of the calls. What a function
            outside of any module saves is listed with the module that calls it.
        *args: What it would be called with: arrays, `jax.ShapeDtypeStruct`s or pytrees of them.
        **kwargs: Its keyword arguments, likewise.

    Returns:
        The plan, which prints as a table.

    Raises:
        TypeError: If `model_or_fn` can not be called.
        ValueError: If it has no gradient, or as `checkpoint` raises for its policy.

    Example:
        >>> import jaxcomp as jc
        >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jax.numpy.sin)
        >>> x = jax.ShapeDtypeStruct((512, 64), jax.numpy.float32)
        >>> found = plan(jc.compress(model, "quantize:bits=4"), x)
        >>> found.exact_bytes, found.saved_bytes, found.bits_per_element
        (131072, 20480, 5.0)
    """
    _check_call(model_or_fn, args, kwargs)
    if isinstance(model_or_fn, Checkpointed):
        return model_or_fn.plan(*args, **kwargs)
    if not isinstance(model_or_fn, nnx.Module):
        return _of_function(model_or_fn, args, kwargs)
    traced = traced_call(model_or_fn, args, kwargs)
    if traced is not None:
        function, arguments = traced
        return function.plan(*arguments)
    parts = [part for _, part in nnx.iter_modules(model_or_fn)]
    if coded_modules(model_or_fn) or any(map(encodes, parts)):
        return _of_modules(model_or_fn, args, kwargs)
    program = _program(model_or_fn, args, kwargs, {})
    exact = _of_program(program, lambda scopes: ["", *scope_paths(scopes)][-1])
    return dataclasses.replace(exact, notes=("nothing is compressed: this is what JAX saves",))


def _check_call(fn: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises a TypeError if a model or function cannot be called like that."""
    if isinstance(fn, linen.Module):
        raise TypeError(
            f"model_or_fn of type {type(fn).__name__}: a Linen module is no function of arrays; "
            "expected plan(jaxcomp.checkpoint(module.apply, policy), variables, *inputs)"
        )
    if not callable(fn):
        raise TypeError(f"model_or_fn={fn!r}: expected a model or function to be called")
    for number, argument in enumerate(args):
        if isinstance(argument, tuple) and len(argument) > 1 and all(map(_is_size, argument)):
            raise TypeError(
                f"inputs[{number}]={argument!r}: a tuple of integers is no array; did you mean "
                f"jax.ShapeDtypeStruct({argument!r}, jnp.float32)?"
            )
    if isinstance(fn, nnx.Module):
        signature = inspect.signature(stock_class(fn).__call__)
        try:
            signature.bind(fn, *args, **kwargs)
            kinds = {parameter.kind for parameter in signature.parameters.values()}
            if not args and not kwargs and inspect.Parameter.VAR_POSITIONAL in kinds:
                raise TypeError("no input is given")  # as of nnx.Sequential
        except TypeError as error:
            raise TypeError(
                f"plan(model, *inputs): {error}; expected the inputs of {type(fn).__name__}: "
                "arrays or jax.ShapeDtypeStructs"
            ) from None


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _of_function(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Returns what a function declares to keep.

    What is encoded inside of it is listed as it is stored.
    """
    program = jax.make_jaxpr(lambda args, kwargs: fn(*args, **kwargs))(args, kwargs)
    return _of_program(program, scope_path)


def _of_program(program: ClosedJaxpr, path_of: Callable[[tuple[str, ...]], str]) -> Plan:
    values = tuple(
        SavedValue(
            path=path_of(residual.scopes),
            source=residual.source,
            op="",
            shape=residual.shape,
            dtype=residual.dtype,
            role="",
            decision="code" if _is_code(residual) else "exact",
            exact_bytes=residual.nbytes,
            saved_bytes=residual.nbytes,
        )
        for residual in declared_residuals(program)
    )
    saved_bytes = sum(value.saved_bytes for value in values)
    is_seen = has_codes(program)
    if not is_seen and all(value.decision == "exact" for value in values):
        return Plan(values, saved_bytes)
    exact_bytes = sum(
        residual.nbytes
        for residual in declared_residuals(without_codes(Program.of(program)).closed)
    )
    unknown = "the function takes a gradient itself: the bytes without compression are unknown"
    return Plan(values, exact_bytes, () if is_seen else (unknown,))


def _is_code(residual: Residual) -> bool:
    """Returns whether one of jaxcomp's codecs has made it."""
    return any(name.startswith("jaxcomp/") for name in residual.scopes)


def _of_modules(model: nnx.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Returns what each module keeps, now and with nothing encoded."""
    exact = exact_copy(model)
    inner = ["/".join(map(str, keys)) for keys, part in nnx.iter_modules(model) if encodes(part)]
    layers = coded_modules(model)
    hidden = covered(layers)
    elements: dict[str, int] = {}
    after, sources = _bytes(model, args, kwargs, elements, hidden)
    before, _ = _bytes(exact, args, kwargs, {}, hidden)
    kinds = {"/".join(map(str, path)): type(m).__name__ for path, m in nnx.iter_modules(model)}

    def is_inside(path: str) -> bool:
        return any(path == part or path.startswith(f"{part}/") for part in inner)

    values = []
    for path in sorted(before.keys() | after.keys(), key=[*elements, *before, *after].index):
        layer = layers.get(path)
        values.append(
            SavedValue(
                path=path,
                source=sources.get(path, ""),
                op=kinds[path] if layer is None else layer.kind,
                shape=(elements.get(path, 0),),
                dtype="",
                role="",
                decision="by the policy of a part" if is_inside(path) else _decision(layer),
                exact_bytes=before.get(path, 0),
                saved_bytes=after.get(path, 0),
            )
        )
    return Plan(tuple(values), sum(before.values()), _left_as_they_are(values, layers))


def _left_as_they_are(values: list[SavedValue], layers: dict[str, Coded]) -> tuple[str, ...]:
    """Returns a note if layers have codecs, but much is saved by modules that can have none."""
    left = [
        value
        for value in values
        if value.path not in layers and value.saved_bytes and value.decision == "exact"
    ]
    bytes_left = sum(value.saved_bytes for value in left)
    if all(layer.codec is None for layer in layers.values()):
        return ()
    if bytes_left <= _MUCH * sum(value.saved_bytes for value in values):
        return ()
    paths = ", ".join(
        dict.fromkeys(without_indices(value.path) or "the model itself" for value in left)
    )
    return (
        f"{bytes_left:,} bytes are saved as they are, outside of layers of jaxcomp.nn: {paths}; a "
        'rule with roles=("operand", "derivative"), for example, is for these values',
    )


def _decision(layer: Coded | None) -> str:
    codec = None if layer is None else layer.codec
    return "exact" if isinstance(codec, Exact | None) else str(codec)


def _bytes(
    model: nnx.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    elements: dict[str, int],
    hidden: set[str],
) -> tuple[dict[str, int], dict[str, str]]:
    """Returns bytes and a source line by the path of the innermost module that is not hidden."""
    program = _program(model, args, kwargs, elements)
    # Calls are noted once a program is traced; the gradient is taken of its jaxpr.
    found: dict[str, int] = {}
    sources: dict[str, str] = {}
    for residual in declared_residuals(program):
        path = next((p for p in reversed(scope_paths(residual.scopes)) if p not in hidden), "")
        found[path] = found.get(path, 0) + residual.nbytes
        sources.setdefault(path, residual.source)
    return found, sources


def _program(
    model: nnx.Module, args: tuple[Any, ...], kwargs: dict[str, Any], elements: dict[str, int]
) -> ClosedJaxpr:
    """Returns the traced call of a model, with a scope for each module; notes their elements."""
    graphdef, params, rest = split_model(with_module_scopes(model, elements))

    def run(params: Any, rest: Any, args: Any, kwargs: Any) -> Any:
        copy = nnx.merge(graphdef, params, jax.lax.stop_gradient(rest), copy=True)
        return copy(*args, **kwargs)

    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (params, rest))
    return jax.make_jaxpr(run)(*shapes, args, kwargs)
