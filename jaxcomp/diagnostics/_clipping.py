"""Diagnostic: which fraction of a model's values `SignAware` clips."""

from typing import Any, cast

import jax.numpy as jnp
from flax import nnx

from jaxcomp.codecs import SignAware
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.nn._coded import coded_modules
from jaxcomp.nn._norm_act import Clipped, NormAct


def clipped(model: nnx.Module, *inputs: Any) -> dict[str, float]:
    """Measures the fraction of values that `SignAware` clips to its last level.

    Only scales from the norm clip values: ranges (`scale_source="range"`) and other codecs cover
    all of them. With 2 bits, negative values have one level. Most clipped values are then those
    below it.

    Args:
        model: Model in training mode with `nn.NormAct` layers; it is not changed.
        *inputs: Arguments of the model. Only the forward pass runs.

    Returns:
        For each `NormAct` with a `SignAware` codec, by path, the fraction of its elements with a
        clipped code. NaN for a layer that is not called.

    Raises:
        ValueError: If no layer has a `SignAware` codec.

    Example:
        >>> import jax
        >>> from jaxcomp import nn
        >>> layer = nn.NormAct(nn.BatchNorm(4, rngs=nnx.Rngs(0)), codec=SignAware(bits=4))
        >>> model = nnx.Sequential(layer)
        >>> shares = clipped(model, jax.random.normal(jax.random.key(0), (64, 8, 8, 4)))
        >>> list(shares), shares["layers/0"] < 0.001
        (['layers/0'], True)
    """
    model = nnx.clone(model)
    layers = {
        path: module
        for path, module in coded_modules(model).items()
        if isinstance(module, NormAct)
        and module.codec is not None
        and isinstance(inner_codec(module.codec), SignAware)
    }
    if not layers:
        raise ValueError("model: expected nn.NormAct or nn.ConvNormAct that code by SignAware")
    for module in layers.values():
        module.clipped = Clipped(jnp.array(jnp.nan))
    nnx.jit(lambda model, *inputs: model(*inputs))(model, *inputs)
    shares = {path: cast(Clipped, module.clipped) for path, module in layers.items()}
    return {path: float(share[...]) for path, share in shares.items()}
