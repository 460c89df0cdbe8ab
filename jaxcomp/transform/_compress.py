"""`compress`: a Flax NNX model that saves what its backward pass needs as a policy says."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from flax import nnx
from jaxtyping import PyTree

from jaxcomp._core.module_scopes import with_module_scopes
from jaxcomp._core.modules import derived, set_class, split_model, stock_class
from jaxcomp.nn._coded import coded_modules
from jaxcomp.policies._policy import JaxPolicy, Policy
from jaxcomp.policies._specs import PolicyLike, describe, policy_for_model
from jaxcomp.transform._checkpoint import Checkpointed, checkpoint
from jaxcomp.transform._layer_codecs import LayerCodecs, check_required
from jaxcomp.transform._model_attributes import (
    attributes,
    change,
    changes,
    with_others,
    without_others,
)
from jaxcomp.transform._program.program import Static

M = TypeVar("M", bound=nnx.Module)


def compress(model: M, policy: PolicyLike = "automatic") -> M:
    """Compresses the activations that a Flax NNX model saves for its backward pass.

    The model is changed and returned.

    Layers of `jaxcomp.nn` that a rule matches save by its codec. If the model has no such layer, or
    convolutions or linear layers of Flax beside these, or if a required rule is for other values
    (by `names`, `primitives`, `roles` or `dtypes`), the call of the model is traced as a whole and
    treated as `checkpoint` treats a function; layers of Flax and plain functions need no change.

    Results of the forward pass are bit-identical. The model is the same object, of a subclass of
    its class: parameters, other state, shared modules and `nnx.split` stay as they are. It can be
    copied, pickled, cloned by `nnx.clone`, and its state restored into the stock model. Without a
    gradient nothing is encoded. The rounding noise is redrawn whenever a parameter changes.

    A call of a traced model traces it anew, so call it inside of `jax.jit` or `nnx.jit`.

    Args:
        model: The model, which is changed. A traced model is compressed in its own call, not in
            other methods or in calls of its modules from outside. A transformation such as
            `nnx.jit` takes a compressed model; it does not let its arguments change their class, so
            that inside of it only a model that was made there can be compressed.
        policy: A `Policy`; a codec, which is used everywhere (`recipes.everywhere`); the spec of a
            recipe or codec, such as "fused:bits=4"; or one of `jax.checkpoint_policies`. By
            default, `recipes.automatic()`.

    Returns:
        The same model. `jaxcomp.plan(model, *inputs)` shows what it saves.

    Raises:
        TypeError: If `model` is no Flax NNX module, or cannot be called where its call has to be
            traced, or `policy` is none of these.
        ValueError: If the model or a module of it is compressed already, a spec is unknown, a rule
            gives a layer a codec that cannot serve it, or a required rule matches nothing. Values
            are only known on the first gradient or `plan`; until then the model is unchanged by an
            error.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jax.nn.gelu)
        >>> model = compress(model, "quantize:bits=4")
        >>> jax.grad(lambda x: model(x).sum())(jax.numpy.ones((512, 64))).shape
        (512, 64)
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"model of type {type(model).__name__}: expected a Flax NNX module; Linen, Equinox and "
            "functions are for jaxcomp.checkpoint(fn, policy)"
        )
    for path, module in nnx.iter_modules(model):
        if is_compressed(module):
            which = f"its module {'/'.join(map(str, path))}" if path else "it"
            raise ValueError(
                f"model={type(model).__name__}: {which} is compressed already; jaxcomp.uncompress "
                "undoes it, and a policy has other codecs for other modules by their paths"
            )
    chosen = policy_for_model(policy)
    layers = LayerCodecs({}, ())
    of_values: Policy | JaxPolicy | None = chosen
    if isinstance(chosen, Policy):
        layers = LayerCodecs.of(model, chosen)
        rules = layers.rules_for_call()
        of_values = None if rules is None else Policy(rules, chosen.lossy_recomputation)
        check_required(model, [rule for rule in layers.unmatched if rule not in (rules or ())])
    if of_values is not None and not callable(model):
        raise TypeError(
            f"model of type {type(model).__name__}: expected one that can be called, since its "
            "call has to be traced"
        )
    layers.set(model)
    set_class(model, derived(type(model), compressed_methods, of_values, checkpoint, chosen))
    return model


def uncompress(model: M) -> M:
    """Gives a model its stock behaviour back: what `compress` did is undone.

    Args:
        model: What `compress` returned, or a model whose layers of `jaxcomp.nn` have codecs. It is
            changed: its class is what it was, and all layers of `jaxcomp.nn` have `codec=None`.

    Returns:
        The same model.

    Raises:
        TypeError: If `model` is no Flax NNX module.
        ValueError: If nothing in it is compressed.

    Example:
        >>> model = compress(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
        >>> type(uncompress(model)) is nnx.Linear
        True
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model of type {type(model).__name__}: expected a Flax NNX module")
    compressed = [module for _, module in nnx.iter_modules(model) if is_compressed(module)]
    coded = [module for module in coded_modules(model).values() if module.codec is not None]
    if not compressed and not coded:
        raise ValueError(f"model={type(model).__name__}: expected a compressed model")
    for module in compressed:
        set_class(module, stock_class(module))
    for layer in coded:
        layer.codec = None
    return model


def policy_of(model_or_fn: nnx.Module | Callable[..., Any]) -> Policy | JaxPolicy | None:
    """Returns the policy of a compressed model or function.

    Args:
        model_or_fn: A Flax NNX model, or a function.

    Returns:
        What `compress` or `checkpoint` was given, as a policy; None if it is what neither returned.

    Example:
        >>> model = compress(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), "quantize:bits=4")
        >>> policy_of(model).rules[0].action.bits
        4
        >>> policy_of(uncompress(model))
    """
    if isinstance(model_or_fn, Checkpointed):
        return model_or_fn.policy
    found: Policy | JaxPolicy | None = getattr(type(model_or_fn), "given_policy", None)
    return found


def is_compressed(model: nnx.Module) -> bool:
    """Returns whether `compress` returned this model."""
    return hasattr(type(model), "compressed_call")


def traced_call(
    model: nnx.Module, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[Checkpointed, Any] | None:
    """Returns the call of a compressed model as a function of arrays, and these.

    It is None if not traced.
    """
    call: Callable[..., Any] | None = getattr(type(model), "compressed_call", None)
    return None if call is None else call(model, args, kwargs)


def compressed_methods(
    kind: type[nnx.Module],
    policy: Policy | JaxPolicy | None,
    transform: Callable[..., Checkpointed] = checkpoint,
    given: Policy | JaxPolicy | None = None,
) -> dict[str, Any]:
    """Returns methods of a compressed model of class `kind`; without a policy calls are stock.

    Args:
        kind: The class.
        policy: What the call is traced with.
        transform: Makes a function that saves by the policy.
        given: The policy of the whole model, which is shown; None shows none.
    """
    shown = {} if given is None else {"given_policy": given, "__nnx_repr__": _shown(kind, given)}
    if policy is None:
        return {"compressed_call": None} | shown

    def compressed_call(self: nnx.Module, args: PyTree, kwargs: PyTree) -> tuple[Checkpointed, Any]:
        graphdef, params, rest = split_model(self)
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_has_state)
        arrays = {i: leaf for i, leaf in enumerate(leaves) if _is_array(leaf)}
        objects = {i: nnx.split(leaf) for i, leaf in enumerate(leaves) if _has_state(leaf)}
        arrays |= {i: state for i, (_, state) in objects.items()}

        def run(params: PyTree, rest: PyTree, arrays: dict[int, Any]) -> Any:
            copy = nnx.merge(graphdef, params, rest, copy=True)
            set_class(copy, kind)
            copy = with_module_scopes(copy, {})
            given = {i: nnx.merge(of, arrays[i], copy=True) for i, (of, _) in objects.items()}
            traced_leaves = [(arrays | given).get(i, leaf) for i, leaf in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(tree, traced_leaves)
            before = attributes(copy)
            result = without_others(copy(*args, **kwargs))
            changed = Static(changes(before, copy))
            _, *states = nnx.split(copy, nnx.Param, nnx.BatchStat, ...)
            after, statistics, others = states
            # No loss is a function of running averages; their derivatives would be saved for it.
            statistics = jax.lax.stop_gradient(statistics)
            of_objects = {i: _state_after(given[i], of) for i, (of, _) in objects.items()}
            return result, changed, _changed(params, after), of_objects, statistics, others

        return transform(run, policy), (params, rest, arrays)

    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        function, arguments = compressed_call(self, args, kwargs)
        result, set_by_call, changed, of_objects, *rest = function(*arguments)
        nnx.update(self, *rest)
        leaves = jax.tree.leaves((args, kwargs), is_leaf=_has_state)
        for i, state in of_objects.items():
            nnx.update(leaves[i], state)
        change(self, set_by_call.value)
        if changed:
            leaves, tree = jax.tree.flatten(nnx.state(self, nnx.Param))
            written = [changed.get(i, leaf) for i, leaf in enumerate(leaves)]
            nnx.update(self, jax.tree.unflatten(tree, written))
        return with_others(result)

    return {
        "__call__": call,
        "compressed_call": compressed_call,
        "encodes": True,
        "policy_of_values": policy,
    } | shown


def _shown(kind: type[nnx.Module], policy: Policy | JaxPolicy) -> Callable[..., Iterator[Any]]:
    """Returns what Flax prints a module by, with the policy behind the name of the class."""

    def parts(self: nnx.Module) -> Iterator[Any]:
        first, *rest = kind.__nnx_repr__(self)
        text = f" # compressed by {describe(policy)}{first.comment.replace(' #', ',', 1)}"
        yield first if first.empty_repr else dataclasses.replace(first, comment=text)
        yield from rest

    return parts


def _is_array(leaf: object) -> bool:
    """Returns whether it is an array or the shape of one; a dtype's class has a `dtype`, too."""
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape") and not isinstance(leaf, type)


def _has_state(leaf: object) -> bool:
    """Returns whether an argument is an object of Flax NNX, such as a cache or `nnx.Rngs`."""
    return isinstance(leaf, nnx.Pytree | nnx.Variable)


def _state_after(leaf: Any, graphdef: Any) -> PyTree:
    """Returns the state of an argument after the call.

    Raises:
        ValueError: If the call has changed more than values.
    """
    after, state = nnx.split(leaf)
    if after != graphdef:
        raise ValueError(
            f"argument of type {type(leaf).__name__}: the call of a compressed model adds or "
            "removes variables of it; expected new values alone"
        )
    return state


def _changed(before: PyTree, after: PyTree) -> dict[int, Any]:
    """Returns the parameters that a call has written, by position."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return {i: new for i, (old, new) in enumerate(pairs) if new is not old}
