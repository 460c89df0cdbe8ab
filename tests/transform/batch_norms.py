"""A convolution before a batch norm, and how users write what surrounds them."""

import jax
import pytest
from jax import lax

import jaxcomp as jc

RANGE = jc.recipes.fused(bits=4, scale_source="range")


@pytest.fixture(autouse=True)
def as_users_write():
    """A mean of shape (features,) is subtracted as it is."""
    with jax.numpy_rank_promotion("allow"):
        yield


def conv(x, w, stride=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w.astype(x.dtype), (stride, stride), "SAME", dimension_numbers=numbers
    )
