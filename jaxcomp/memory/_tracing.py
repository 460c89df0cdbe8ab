"""Traces a Python function for the shapes of its arguments."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding

from jaxcomp.memory._argument_names import argument_names, is_object
from jaxcomp.memory._targets import Target

CHECKPOINT_PRIMITIVES = {"checkpoint", "remat", "remat2"}
"""Names of `jax.checkpoint` in a traced program."""


def has_regions(jaxpr: Jaxpr) -> bool:
    """Returns whether a part of a traced program is under `jax.checkpoint`."""
    return any(
        equation.primitive.name in CHECKPOINT_PRIMITIVES
        or any(map(has_regions, inner_jaxprs(equation)))
        for equation in jaxpr.eqns
    )


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A function that is traced for the shapes of its arguments.

    Attributes:
        traced: the traced function of JAX.
        arguments: the leaves of the arguments.
        argument_names: the path of each variable of an NNX object, by the name that JAX gives it.
    """

    traced: jax.stages.Traced
    arguments: tuple[Any, ...]
    argument_names: Mapping[str, str]

    @property
    def jaxpr(self) -> Jaxpr:
        """The jaxpr of the function, without its constants."""
        return open_jaxpr(self.traced.jaxpr)

    @property
    def constant_bytes(self) -> int:
        """Size of the arrays that the function closes over, in bytes."""
        return sum(int(constant.nbytes) for constant in _constants(self.traced.jaxpr).values())

    @property
    def compiler_options(self) -> dict[str, Any]:
        """The compiler options of the function's jit."""
        return dict(self.traced._params["compiler_options_kvs"])

    @property
    def donated(self) -> tuple[int, ...]:
        """The positions of the donated arguments among the flat arguments."""
        infos = jax.tree.leaves(self.traced.args_info)
        return tuple(i for i, info in enumerate(infos) if info.donated)


def trace(
    fn: Callable[..., object],
    *args: object,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    target: Target | None = None,
) -> TracedStep:
    """Traces a function. Nothing is run, and no device memory is allocated.

    Args:
        fn: a function of arrays, plain or jitted by `jax.jit` or `nnx.jit`. It may be a
            `functools.partial` of a jitted function, such as a jitted method.
        *args: the arguments of `fn`: arrays, `jax.ShapeDtypeStruct`s, Flax NNX objects, or
            pytrees of them. NNX objects may be abstract, from `nnx.eval_shape`. The updates of
            their state by `fn` are part of the program.
        donate_argnums: positions of the arguments that the program may overwrite, as in
            `jax.jit`.
        static_argnums: positions of the arguments that are compile-time constants, as in
            `jax.jit`.
        target: the target of the compilation, if it is known.

    Returns:
        The traced function.

    Raises:
        ValueError: if `fn` is already jitted and `donate_argnums` or `static_argnums` is given.
    """
    jitted: Any
    keywords: dict[str, Any] = {}
    if isinstance(fn, functools.partial) and isinstance(fn.func, jax.stages.Wrapped):
        args, keywords, fn = (*fn.args, *args), fn.keywords, fn.func
    if isinstance(fn, jax.stages.Wrapped):
        if donate_argnums != () or static_argnums != ():
            raise ValueError(
                f"donate_argnums={donate_argnums}, static_argnums={static_argnums}: expected () "
                "for both, because fn is jitted already; pass them to its own jit"
            )
        jitted = fn
    elif any(map(is_object, jax.tree.leaves(args, is_leaf=is_object))):
        jitted = nnx.jit(fn, donate_argnums=donate_argnums, static_argnums=static_argnums)
    else:
        jitted = jax.jit(fn, donate_argnums=donate_argnums, static_argnums=static_argnums)
    leaves = jax.tree.leaves((args, keywords))
    with _tracing_for(target, leaves):
        traced = jitted.trace(*args, **keywords)
    traced = getattr(traced, "traced", traced)
    names = argument_names(open_jaxpr(traced.jaxpr).debug_info.arg_names or (), (args, keywords))
    return TracedStep(traced, tuple(leaves), names)


def _tracing_for(
    target: Target | None, leaves: list[Any]
) -> contextlib.AbstractContextManager[Any]:
    """Tells Pallas the absent GPU that its kernels are for. JAX 0.11 and later require this."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    meshes = any(isinstance(getattr(leaf, "sharding", None), NamedSharding) for leaf in leaves)
    if target is None or target.device_kind is None or meshes:
        return contextlib.nullcontext()
    device = AbstractDevice(device_kind=target.device_kind, num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def _constants(program: Any) -> dict[int, Any]:
    """Returns the arrays that a program and its inner programs close over, by `id`."""
    found = {id(constant): constant for constant in getattr(program, "consts", ())}
    for equation in open_jaxpr(program).eqns:
        for inner in _inner_programs(equation):
            found |= _constants(inner)
    return found


def open_jaxpr(program: Any) -> Any:
    """Returns the jaxpr of a closed jaxpr. Any other value is returned unchanged.

    Some JAX versions have no separate class for closed jaxprs, so the class is not checked.
    """
    return getattr(program, "jaxpr", program)


def inner_jaxprs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """Returns the jaxprs that an equation evaluates, without their constants."""
    return map(open_jaxpr, _inner_programs(equation))


def _inner_programs(equation: JaxprEqn) -> Iterator[Any]:
    if equation.primitive.name == "custom_linear_solve":
        yield equation.params["jaxprs"].solve  # the others are for derivatives
        return
    for parameter in equation.params.values():
        for value in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
            if isinstance(open_jaxpr(value), Jaxpr):
                yield value
