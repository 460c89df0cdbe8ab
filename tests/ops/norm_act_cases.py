"""What `norm_act` does, case by case, and the stock operations that it stands for."""

import typing

import jax
import jax.numpy as jnp
from flax import nnx

from jaxcomp import Offload, SignAware, ops
from jaxcomp.codecs._sign_aware import ScaleSource
from tests.helpers import normal

EPSILON = 1e-3
SHAPE = (8, 5, 4, 6)
POOLED = (8, 3, 4, 6)
NHWC = ("NHWC", "HWIO", "NHWC")


def norm_act(
    x,
    scale,
    bias,
    residual=None,
    bits=4,
    scale_source="norm",
    signed=False,
    offload=False,
    **kwargs,
):
    codec = SignAware(bits, signed=signed, scale_source=scale_source)
    codec = Offload(codec) if offload else codec
    return ops.norm_act(x, scale, bias, residual, epsilon=EPSILON, codec=codec, **kwargs)


def stock(x, scale, bias, residual=None, *, residual_norm=None, relu=True, pool=None):
    y, mean, var = ops.batch_norm(x, scale, bias, epsilon=EPSILON)
    means, variances = (mean,), (var,)
    if residual_norm is not None:
        residual, mean, var = ops.batch_norm(residual, *residual_norm, epsilon=EPSILON)
        means, variances = (*means, mean), (*variances, var)
    y = y if residual is None else y + residual
    y = jax.nn.relu(y) if relu else y
    return y if pool is None else nnx.max_pool(y, *pool), means, variances


SCALE_SOURCES = typing.get_args(ScaleSource)
CASES = {
    "relu": {},
    "added": {},
    "normed": {},
    "linear": {"relu": False},
    "pooled": {"pool": ((3, 2), (2, 1), "SAME")},
}


def arguments(dtype, residual=False):
    """x, scale (of both signs, one tiny, one zero), bias (one beyond the threshold), residual."""
    x = 2 * normal(SHAPE, dtype) + 1
    scale = jnp.array([1.5, -0.7, 1.0, 1e-6, 0.0, -2.0], dtype)
    bias = jnp.array([0.3, -0.2, 9.0, 0.1, 0.2, 0.0], dtype)
    return (x, scale, bias) + ((normal(SHAPE, dtype, 4),) if residual else ())


def of_case(fn, case):
    """`fn` as a function of the case's arguments alone, and these for a dtype."""

    def call(*args, **kwargs):
        if case == "normed":
            *args, scale, bias = args
            kwargs["residual_norm"] = scale, bias
        return fn(*args, **CASES[case], **kwargs)

    def given(dtype):
        args = arguments(dtype, case in ("added", "normed"))
        return args + ((args[1][::-1], args[2][::-1]) if case == "normed" else ())

    return call, given
