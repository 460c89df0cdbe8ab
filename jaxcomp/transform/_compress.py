"""`compress`: a whole Flax model, with what waits for its backward pass as a policy says."""

import types
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxcomp._core.module_scopes import with_module_scopes
from jaxcomp._core.modules import split_model
from jaxcomp.codecs import Quantize, noise
from jaxcomp.codecs._codec import Seed
from jaxcomp.policies import _policies as policies
from jaxcomp.transform._checkpoint import Checkpointed, checkpoint
from jaxcomp.transform._decisions import Policy, check_policy
from jaxcomp.transform._plan import CheckpointPlan

M = TypeVar("M", bound=nnx.Module)

LARGE = policies.compress(Quantize(bits=4), min_size=policies.MIN_SIZE)
"""The policy of `compress` if none is given: values of 16,384 elements or more, in 4 bits."""


def compress(model: M, policy: Policy = LARGE) -> M:
    """Makes a Flax NNX model store what its backward pass reads as a policy says.

    The model needs no layers of `jaxcomp.nn`: its call is traced as a whole, functions between the
    layers too, and treated as `checkpoint` treats a function. Results are the same; parameters,
    other state, shared modules and `nnx.split` stay as they are, for the model is the same object,
    of a subclass of its class. Without a gradient nothing is stored. Rounding noise is redrawn
    whenever a parameter changes.

    A call traces the model anew, so make it inside of a `jax.jit` or `nnx.jit`.

    Args:
        model: The model, which is changed: from now on its own call is the compressed one. Other
            methods, and calls of its modules from outside, are not.
        policy: As `checkpoint` takes it; `policies.compress(..., path=...)` is for the modules
            whose path matches. By default `LARGE`.

    Returns:
        The same model.

    Raises:
        TypeError: If `model` is not a module that can be called, or `policy` is no policy.
        ValueError: If it is compressed already; on a call, as `checkpoint`.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jax.nn.gelu)
        >>> x = jnp.ones((512, 64))
        >>> y = compress(model)(x)
        >>> [value.decision for value in plan(model, x).values]
        ["Quantize(bits=4, group='channel', rounding='stochastic')"]
    """
    if not isinstance(model, nnx.Module) or not callable(model):
        raise TypeError(f"model={model!r}: expected a Flax NNX module that can be called")
    check_policy(policy)
    kind = type(model)
    if hasattr(kind, "compressed_call"):
        raise ValueError(f"model={kind.__name__}: is compressed already")

    def compressed_call(
        self: nnx.Module, args: Any, kwargs: Any, seed: Seed = None
    ) -> tuple[Checkpointed, Any]:
        """The call as a function of arrays, and these."""
        graphdef, params, rest = split_model(self)
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")}

        def run(params: Any, rest: Any, arrays: dict[int, Any]) -> Any:
            copy = nnx.merge(graphdef, params, rest, copy=True)
            copy.__class__ = kind
            copy = with_module_scopes(copy, {})
            given = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(tree, given)
            result = copy(*args, **kwargs)
            return result, jax.lax.stop_gradient(split_model(copy)[2])

        return checkpoint(run, policy, seed=seed), (params, rest, arrays)

    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        params = jax.tree.leaves(nnx.state(self, nnx.Param))
        floats = [p for p in params if jnp.issubdtype(p.dtype, jnp.inexact)]
        function, arguments = compressed_call(self, args, kwargs, noise.fingerprint(*floats))
        result, rest = function(*arguments)
        nnx.update(self, rest)
        return result

    body = {"__call__": call, "compressed_call": compressed_call, "exact_class": kind}
    model.__class__ = types.new_class(kind.__name__, (kind,), exec_body=lambda b: b.update(body))
    return model


def plan(model: nnx.Module, *args: Any, **kwargs: Any) -> CheckpointPlan:
    """What a call of a compressed model would store; nothing is computed.

    Args:
        model: What `compress` returned.
        *args: What it would be called with: arrays or `jax.ShapeDtypeStruct`s.
        **kwargs: Likewise.

    Returns:
        The plan, which prints as a table.

    Raises:
        ValueError: If the model is not compressed, or as `checkpoint`.
    """
    if not hasattr(model, "compressed_call"):
        raise ValueError(f"model={type(model).__name__}: expected what jaxcomp.compress returned")
    function, arguments = model.compressed_call(args, kwargs)
    return function.plan(*arguments)
