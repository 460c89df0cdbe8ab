"""`clipped`: which part of a model's values lies outside the levels of its codes."""

from typing import Any, cast

import jax.numpy as jnp
from flax import nnx

from jaxcomp.codecs import SignAware
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.nn._coded import coded_modules
from jaxcomp.nn._norm_act import Clipped, NormAct


def clipped(model: nnx.Module, *inputs: Any) -> dict[str, float]:
    """Counts values that the codes of `SignAware` do not reach, which come back as the last level.

    Other codecs' ranges are those of the values, and so are those of `scale_source="range"`. With 2
    bits negative values have one level, and in the norm's units most of what is counted are those
    below it: the price of a mask that needs no bit of its own.

    Args:
        model: A model in training mode, built of `nn.NormAct`; it is not changed.
        *inputs: What it is called with; nothing but the forward pass runs.

    Returns:
        For each unit that codes, by path, the part of its elements of which some code is clipped;
        NaN for a unit that is not called.

    Raises:
        ValueError: If no unit codes by `SignAware`.

    Example:
        >>> import jax
        >>> from jaxcomp import nn
        >>> unit = nn.NormAct(nn.BatchNorm(4, rngs=nnx.Rngs(0)), codec=SignAware(bits=4))
        >>> model = nnx.Sequential(unit)
        >>> shares = clipped(model, jax.random.normal(jax.random.key(0), (64, 8, 8, 4)))
        >>> list(shares), shares["layers/0"] < 0.001
        (['layers/0'], True)
    """
    model = nnx.clone(model)
    units = {
        path: module
        for path, module in coded_modules(model).items()
        if isinstance(module, NormAct)
        and module.codec is not None
        and isinstance(inner_codec(module.codec), SignAware)
    }
    if not units:
        raise ValueError("model: expected nn.NormAct or nn.ConvNormAct that code by SignAware")
    for module in units.values():
        module.clipped = Clipped(jnp.array(jnp.nan))
    nnx.jit(lambda model, *inputs: model(*inputs))(model, *inputs)
    shares = {path: cast(Clipped, module.clipped) for path, module in units.items()}
    return {path: float(share[...]) for path, share in shares.items()}
