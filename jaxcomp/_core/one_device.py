"""Operations with one form for a single device and another form that XLA can partition."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

Form = Callable[..., Any]


def on_one(platform: str | None, form: Form, portable: Form) -> Form:
    """Selects `form` in a program for one device or inside of `jax.shard_map`, else `portable`.

    XLA cannot partition a Pallas kernel, nor a reshape that joins sharded axes: it would gather the
    array. A loop over parts of a sharded axis would gather it, too. The form is selected when the
    program is lowered, so ahead-of-time compilation for an absent device works. Without `jit`, and
    for derivatives, `portable` is used.

    Args:
        platform: "tpu", "cuda" or "rocm"; None for one device of any platform.
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
    def run(*args: Any) -> Any:
        traced = [jax.make_jaxpr(one, return_shape=True)(*args) for one in (form, portable)]
        forms = [program for program, _ in traced]
        names = None if platform is None else (platform,)
        # The names of `lax.platform_dependent`: code that counts operations treats both alike.
        results = _choice.bind(
            *jax.tree.leaves(args), branches=tuple(forms), branches_platforms=(names, None)
        )
        return jax.tree.unflatten(jax.tree.structure(traced[1][1]), results)

    @run.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(portable, primals, tangents)

    return run


_choice = Primitive("on_one")
_choice.multiple_results = True


@_choice.def_impl
def _(*args: Any, branches: Any, branches_platforms: Any) -> Any:
    return jaxpr_as_fun(branches[1])(*args)


@_choice.def_abstract_eval
def _(*args: Any, branches: Any, branches_platforms: Any) -> Any:
    return branches[1].out_avals


def _batched(args: Any, axes: Any, *, branches: Any, branches_platforms: Any) -> Any:
    forms = [jax.make_jaxpr(jax.vmap(jaxpr_as_fun(form), axes))(*args) for form in branches]
    made = _choice.bind(*args, branches=tuple(forms), branches_platforms=branches_platforms)
    return made, [0] * len(made)


def _lower_for(platform: str) -> Callable[..., Any]:
    def lower(context: Any, *args: Any, branches: Any, branches_platforms: Any) -> Any:
        # JAX internals: the devices for which the program is lowered.
        devices = context.module_context.axis_context
        mesh = getattr(devices, "mesh", None)
        alone = (
            devices.num_devices == 1 if mesh is None else devices.manual_axes == {*mesh.axis_names}
        )
        names, _ = branches_platforms
        form = branches[0] if alone and (names is None or platform in names) else branches[1]
        return mlir.lower_fun(jaxpr_as_fun(form))(context, *args)

    return lower


batching.primitive_batchers[_choice] = _batched
for _platform in ("cpu", "tpu", "cuda", "rocm"):
    mlir.register_lowering(_choice, _lower_for(_platform), platform=_platform)
