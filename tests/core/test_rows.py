"""What kernels of rows of channels read of a function, and which functions they refuse."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxcomp._core.rows import Axes, NotOfRows, Rows
from jaxcomp.codecs.packing import pack, unpack
from tests.helpers import normal

SHAPE = (4, 6, 5, 8)
X, OF_CHANNELS = normal(SHAPE), normal((1, 1, 1, 8), seed=1)


def read(function, *arguments, exact=True):
    program = jax.make_jaxpr(function)(*arguments)
    return Rows.of(program.jaxpr, [*program.consts, *arguments], exact=exact)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((), (False, False, False)),
        ((1, 1, 1, 8), (False, False, True)),
        ((4, 1, 1, 8), (True, False, True)),
        ((4, 1, 1, 1), (True, False, False)),
        ((4, 6, 5, 1), (True, True, False)),
        ((1, 6, 5, 1), (False, True, False)),
    ],
)
def test_small_arrays_are_read_along_their_axes(shape, axes):
    small = normal(shape)
    rows = read(lambda x, small: x * small, X, small)
    assert [v.axes for v in rows.read if v.array is not None] == [Axes(*axes)]
    assert rows.by_sample == (axes[0] or axes[1])


@pytest.mark.parametrize(
    ("function", "small"),
    [
        (lambda x, small: x * small, normal((1, 6, 1, 1))),  # along one of the axes of a sample
        (lambda x, small: x * small, normal((1, 6, 5, 8))),
        (lambda x, small: x.transpose(0, 2, 1, 3).reshape(SHAPE) * small, OF_CHANNELS),
        (
            lambda x, small: x * x.sum((0, 1, 2))[None, None, None] + small,
            OF_CHANNELS,
        ),  # uses a sum
        (lambda x, small: x.sum((1, 2), keepdims=True) + small, OF_CHANNELS),  # of each sample
        (lambda x, small: (x * small).reshape(4, 8, 6, 5).sum((0, 1, 2)), OF_CHANNELS),
        (lambda x, small: jnp.cumsum(x, 1) + small, OF_CHANNELS),
        (lambda x, small: jnp.exp(x) + small, OF_CHANNELS),  # not to the bit
        (lambda x, small: small * 2, OF_CHANNELS),  # nothing of rows
        (lambda x, small: (x > small).astype(jnp.uint4), OF_CHANNELS),  # packed otherwise
        (lambda x, small: unpack(pack((x > small) * 3, 2), SHAPE, 2), OF_CHANNELS),  # not arguments
    ],
)
def test_other_functions_are_refused(function, small):
    with pytest.raises(NotOfRows):
        read(function, X, small)


def test_what_the_bits_of_a_result_follow_from_is_computed_by_xla():
    """A quotient, but not the sums and products of channels, and neither if bits do not matter."""

    def scaled(x, a, b):
        return x * (a / b + a)

    of_each = OF_CHANNELS, OF_CHANNELS + 9
    (quotient,) = [v for v in read(scaled, X, *of_each).read if v.name]
    assert quotient.name == "add"  # of the quotient: the kernel reads it
    assert not [v for v in read(scaled, X, *of_each, exact=False).read if v.name]


def test_broadcasts_of_channels_to_samples_are_not_mixed_up():
    """As many channels as samples."""
    x, small = normal((8, 6, 8)), normal((8,), seed=1)

    def by_sample(x, small):
        return x * lax.broadcast_in_dim(small, (8, 1, 1), (0,))

    axes = [v.axes for v in read(by_sample, x, small).read if v.array is not None]
    assert axes == [Axes(True, False, False)]

    def by_channel(x, small):
        return x * lax.broadcast_in_dim(small, (1, 1, 8), (2,))

    axes = [v.axes for v in read(by_channel, x, small).read if v.array is not None]
    assert axes == [Axes(False, False, True)]


@pytest.mark.parametrize(("channels", "bits"), [(8, 3), (16, 2), (4, 1), (6, 2)])
def test_codes_are_of_rows_if_they_need_no_padding(channels, bits):
    x = normal((4, 6, channels))
    codes = pack((x > 0).astype(jnp.int32), bits)

    def function(x, *codes):
        return pack(unpack(codes, x.shape, bits) + (x > 1), bits)

    if channels % 8:
        with pytest.raises(NotOfRows, match="codes of"):
            read(function, x, *codes)
        return
    rows = read(function, x, *codes)
    assert {v.part for v in rows.made} == {v.part for v in rows.read if v.part}
    assert sum(v.part.bits for v in rows.made) == bits
