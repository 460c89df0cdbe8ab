"""Operations with one form for a single device and another form that XLA can partition."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jaxtyping import Array

Form = Callable[..., Array]


def on_one(platform: str, form: Form, portable: Form) -> Form:
    """Selects `form` in a program for one device or inside of `jax.shard_map`, else `portable`.

    XLA cannot partition a Pallas kernel, nor a reshape that joins sharded axes: it would gather the
    array. The form is selected when the program is lowered, so ahead-of-time compilation for an
    absent device works. Without `jit`, and for derivatives, `portable` is used.

    Args:
        platform: "tpu", "cuda" or "rocm".
        form: Function of pytrees of arrays, for one device of that platform.
        portable: Function with the same result.

    Returns:
        A function with the arguments of `form`.

    Example:
        >>> import jax.numpy as jnp
        >>> on_one("tpu", jnp.sin, jnp.sin)(jnp.zeros(2)).tolist()
        [0.0, 0.0]
    """

    @jax.custom_jvp
    def run(*args: Any) -> Array:
        leaves, tree = jax.tree.flatten(args)
        forms = [
            jax.make_jaxpr(lambda *leaves, one=one: one(*jax.tree.unflatten(tree, leaves)))(*leaves)
            for one in (form, portable)
        ]
        return _bind(leaves, forms, platform)

    @run.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(portable, primals, tangents)

    return run


_choice = Primitive("on_one")


def _bind(args: Sequence[Any], forms: Sequence[Any], platform: str) -> Array:
    """Binds the primitive with the parameter names of `lax.platform_dependent`.

    Code that counts what a program computes then treats both alike.
    """
    return _choice.bind(*args, branches=tuple(forms), branches_platforms=((platform,), None))


def _run(form: Any) -> Form:
    return lambda *args: jaxpr_as_fun(form)(*args)[0]


@_choice.def_impl
def _(*args: Any, branches: Any, branches_platforms: Any) -> Any:
    return _run(branches[1])(*args)


@_choice.def_abstract_eval
def _(*args: Any, branches: Any, branches_platforms: Any) -> Any:
    return branches[1].out_avals[0]


def _batched(args: Any, axes: Any, *, branches: Any, branches_platforms: Any) -> Any:
    forms = [jax.make_jaxpr(jax.vmap(_run(form), axes))(*args) for form in branches]
    return _bind(args, forms, branches_platforms[0][0]), 0


def _lower(context: Any, *args: Any, branches: Any, branches_platforms: Any) -> Any:
    return mlir.lower_fun(_run(branches[1]), multiple_results=False)(context, *args)


def _lower_for(platform: str) -> Callable[..., Any]:
    def lower(context: Any, *args: Any, branches: Any, branches_platforms: Any) -> Any:
        # JAX internals: the devices for which the program is lowered.
        devices = context.module_context.axis_context
        mesh = getattr(devices, "mesh", None)
        alone = (
            devices.num_devices == 1 if mesh is None else devices.manual_axes == {*mesh.axis_names}
        )
        form = branches[0] if alone and branches_platforms[0] == (platform,) else branches[1]
        return mlir.lower_fun(_run(form), multiple_results=False)(context, *args)

    return lower


batching.primitive_batchers[_choice] = _batched
mlir.register_lowering(_choice, _lower)
for _platform in ("tpu", "cuda", "rocm"):
    mlir.register_lowering(_choice, _lower_for(_platform), platform=_platform)
