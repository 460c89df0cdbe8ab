"""From a Python function and the shapes of its arguments to a traced program."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding

from ._targets import Target


@dataclass(frozen=True)
class TracedStep:
    """A function traced for its arguments' shapes.

    Attributes:
        traced: JAX's own object.
        arguments: leaves of the arguments.
    """

    traced: jax.stages.Traced
    arguments: tuple[Any, ...]

    @property
    def jaxpr(self) -> Jaxpr:
        """The program, without its constants."""
        return open_jaxpr(self.traced.jaxpr)

    @property
    def constant_bytes(self) -> int:
        """Bytes of the arrays that the function closes over."""
        return sum(int(constant.nbytes) for constant in _constants(self.traced.jaxpr).values())

    @property
    def compiler_options(self) -> dict[str, Any]:
        """What the function's own jit tells the compiler."""
        return dict(self.traced._params["compiler_options_kvs"])

    @property
    def donated(self) -> tuple[int, ...]:
        """Which of the program's flat arguments are donated."""
        infos = jax.tree.leaves(self.traced.args_info)
        return tuple(i for i, info in enumerate(infos) if info.donated)


def trace(
    fn: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    target: Target | None = None,
) -> TracedStep:
    """Traces a function; nothing is allocated or run.

    Args:
        fn: any function of arrays, plain or jitted by `jax.jit` or `nnx.jit`; of a
            `functools.partial` of a jitted one (a jitted method of an object, too), that.
        *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, Flax NNX objects (abstract ones
            from `nnx.eval_shape` too; what `fn` changes in them is part of the program), or
            pytrees of arrays.
        donate_argnums: which arguments the program may overwrite, as in `jax.jit`.
        static_argnums: which arguments are compile-time constants, as in `jax.jit`.
        target: what it is traced for, where that is known.

    Returns:
        The traced program.

    Raises:
        ValueError: if `fn` is jitted already and argument numbers are given here.
    """
    jitted: Any
    keywords: dict[str, Any] = {}
    if isinstance(fn, functools.partial) and isinstance(fn.func, jax.stages.Wrapped):
        args, keywords, fn = (*fn.args, *args), fn.keywords, fn.func
    if isinstance(fn, jax.stages.Wrapped):
        if donate_argnums != () or static_argnums != ():
            raise ValueError(
                f"donate_argnums={donate_argnums}, static_argnums={static_argnums}: fn is jitted "
                "already; give them to its own jit"
            )
        jitted = fn
    elif any(isinstance(leaf, nnx.Pytree) for leaf in jax.tree.leaves(args, is_leaf=_is_object)):
        jitted = nnx.jit(fn, donate_argnums=donate_argnums, static_argnums=static_argnums)
    else:
        jitted = jax.jit(fn, donate_argnums=donate_argnums, static_argnums=static_argnums)
    leaves = jax.tree.leaves((args, keywords))
    with _tracing_for(target, leaves):
        traced = jitted.trace(*args, **keywords)
    return TracedStep(getattr(traced, "traced", traced), tuple(leaves))


def _tracing_for(
    target: Target | None, leaves: list[Any]
) -> contextlib.AbstractContextManager[Any]:
    """Tells Pallas which absent GPU its kernels are for, which JAX asks from version 0.12 on."""
    meshes = any(isinstance(getattr(leaf, "sharding", None), NamedSharding) for leaf in leaves)
    if target is None or target.device_kind is None or meshes:
        return contextlib.nullcontext()
    device = AbstractDevice(device_kind=target.device_kind, num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def _is_object(value: Any) -> bool:
    return isinstance(value, nnx.Pytree)


def _constants(program: Any) -> dict[int, Any]:
    """Arrays that a program and those that it calls close over, each once."""
    found = {id(constant): constant for constant in getattr(program, "consts", ())}
    for equation in open_jaxpr(program).eqns:
        for inner in _inner_programs(equation):
            found |= _constants(inner)
    return found


def open_jaxpr(program: Any) -> Any:
    """A jaxpr without its constants, whichever way this JAX writes closed ones."""
    return getattr(program, "jaxpr", program)


def inner_jaxprs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """The programs that an equation's parameters hold, without their constants."""
    return map(open_jaxpr, _inner_programs(equation))


def _inner_programs(equation: JaxprEqn) -> Iterator[Any]:
    for parameter in equation.params.values():
        for value in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
            if isinstance(open_jaxpr(value), Jaxpr):
                yield value
