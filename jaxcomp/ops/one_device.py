"""A computation in two forms: a kernel for a TPU of its own, and one that XLA can part."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jaxtyping import Array

Form = Callable[..., Array]


def on_one_tpu(kernel: Form, portable: Form) -> Form:
    """Computes by `kernel` in a program for one TPU, or inside of `jax.shard_map`; else `portable`.

    XLA cannot look into a Pallas kernel: where `jit` has spread a batch over devices, it would
    gather it. Which form it is shows when the program is lowered, and an absent TPU counts. Without
    `jit`, and for derivatives, it is the portable one.

    Args:
        kernel: A function of pytrees of arrays that only a TPU can run.
        portable: An equal function.

    Returns:
        The function.
    """

    @jax.custom_jvp
    def run(*args: Any) -> Array:
        leaves, tree = jax.tree.flatten(args)
        forms = [
            jax.make_jaxpr(lambda *leaves, form=form: form(*jax.tree.unflatten(tree, leaves)))(
                *leaves
            )
            for form in (kernel, portable)
        ]
        return _bind(leaves, forms)

    @run.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(portable, primals, tangents)

    return run


_choice = Primitive("on_one_tpu")


def _bind(args: Sequence[Any], forms: Sequence[Any]) -> Array:
    """Named as in a `lax.platform_dependent`, for who counts what a program does."""
    return _choice.bind(*args, branches=tuple(forms), branches_platforms=(("tpu",), None))


def _run(form: Any) -> Form:
    return lambda *args: jaxpr_as_fun(form)(*args)[0]


@_choice.def_impl
def _(*args: Any, branches: Any, branches_platforms: Any) -> Any:
    return _run(branches[1])(*args)


@_choice.def_abstract_eval
def _(*args: Any, branches: Any, branches_platforms: Any) -> Any:
    return branches[1].out_avals[0]


def _batched(args: Any, axes: Any, *, branches: Any, branches_platforms: Any) -> Any:
    return _bind(args, [jax.make_jaxpr(jax.vmap(_run(form), axes))(*args) for form in branches]), 0


def _lower(context: Any, *args: Any, branches: Any, branches_platforms: Any) -> Any:
    return mlir.lower_fun(_run(branches[1]), multiple_results=False)(context, *args)


def _lower_for_tpu(context: Any, *args: Any, branches: Any, branches_platforms: Any) -> Any:
    # Of JAX's internals: what is known of the devices of the program that is lowered.
    devices = context.module_context.axis_context
    mesh = getattr(devices, "mesh", None)
    alone = devices.num_devices == 1 if mesh is None else devices.manual_axes == {*mesh.axis_names}
    form = branches[0] if alone else branches[1]
    return mlir.lower_fun(_run(form), multiple_results=False)(context, *args)


batching.primitive_batchers[_choice] = _batched
mlir.register_lowering(_choice, _lower)
mlir.register_lowering(_choice, _lower_for_tpu, platform="tpu")
