"""Diagnostic: which fraction of a model's values `SignAware` clips."""

import warnings
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxcomp.codecs import SignAware
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.diagnostics._counting import count_clipped
from jaxcomp.nn._coded import coded_modules
from jaxcomp.nn._norm_act import Clipped, NormAct

THRESHOLD = 1e-4  # fraction of a layer's values


def clipped(model: nnx.Module, *inputs: Any) -> dict[str, float]:
    """Measures the fraction of values that `SignAware` clips to its last level.

    Only scales from the norm clip values: ranges (`scale_source="range"`) and other codecs cover
    all of them. With 3 and 4 bits the fraction is usually 0. Above 1e-4 a `UserWarning` names the
    layer: its gradient may be biased. With 2 bits, negative values have one level. Most clipped
    values are then those below it.

    Args:
        model: Model in training mode, with `nn.NormAct` layers or with stock batch norms that
            `compress` recognizes; it is not changed.
        *inputs: Arguments of the model. Only the forward pass runs.

    Returns:
        For each `NormAct` with a `SignAware` codec and each recognized batch norm, by path, the
        fraction of its elements with a clipped code; the largest one if a stock batch norm is
        called several times. NaN for a `NormAct` that is not called. Stock batch norms in the
        bodies of loops and those with a smooth activation, which clip nothing, are left out.

    Raises:
        ValueError: If there is no such layer.

    Example:
        >>> import jax
        >>> from jaxcomp import compress
        >>> model = nnx.Sequential(nnx.BatchNorm(4, rngs=nnx.Rngs(0)), nnx.relu)
        >>> model = compress(model, "fused:bits=4")
        >>> shares = clipped(model, jax.random.normal(jax.random.key(0), (64, 8, 8, 4)))
        >>> list(shares), shares["layers/0"] < 0.001
        (['layers/0'], True)
    """
    shares = clipped_during(lambda model, *inputs: model(*inputs), model, *inputs)
    if not shares:
        raise ValueError(
            "model: expected nn.NormAct or nn.ConvNormAct that code by SignAware, or a compressed "
            "model with stock batch norms"
        )
    return shares


def clipped_during(run: Callable[..., Any], model: nnx.Module, *arguments: Any) -> dict[str, float]:
    """Does what `clipped` does, for any function of the model.

    It is empty if no layer has a `SignAware` codec.
    """
    model = nnx.clone(model)
    coded = coded_modules(model)
    bits = {path: bits for path, layer in coded.items() if (bits := _bits_of(layer)) is not None}
    layers = {path: cast(NormAct, coded[path]) for path in bits}
    shares: dict[str, float] = {}

    def record(path: str, bits_of_path: int, share: Any) -> None:
        bits[path] = bits_of_path
        shares[path] = float(np.maximum(shares.get(path, 0.0), share))

    for module in layers.values():
        module.clipped = Clipped(jnp.array(jnp.nan))
    count_clipped(model, record)
    nnx.jit(run)(model, *arguments)
    jax.effects_barrier()
    shares |= {path: float(cast(Clipped, module.clipped)[...]) for path, module in layers.items()}
    clipping = [path for path in shares if bits[path] > 2 and shares[path] > THRESHOLD]
    if clipping:
        worst = max(clipping, key=shares.__getitem__)
        warnings.warn(
            f"{shares[worst]:.2%} of the values of {worst} are beyond the last level of SignAware "
            'and clipped, so the gradient may be biased; scale_source="range" clips nothing',
            stacklevel=3,
        )
    return shares


def _bits_of(module: Any) -> int | None:
    """Returns the bits of a `NormAct`'s `SignAware` codec; None if it has another, or none."""
    if not isinstance(module, NormAct) or module.codec is None:
        return None
    codec = inner_codec(module.codec)
    return codec.bits if isinstance(codec, SignAware) else None
