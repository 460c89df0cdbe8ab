"""Factors of axes tell where each element of a rearranged array comes from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.transform._program.builder import flat
from jaxcomp.transform._program.program import Program
from jaxcomp.transform._recognition.factors import (
    all_leaves,
    layout_of,
    leaves,
    rearranged,
    varies_with,
)

X = np.arange(2 * 6 * 4).reshape(2, 6, 4)


def layouts(function):
    """The layouts of the argument and the result of a function that rearranges."""
    program = flat(Program.trace(function, jax.ShapeDtypeStruct(X.shape, jnp.int32)))
    before = after = layout_of(X.shape)
    for equation in program.equations:
        after = rearranged(after, equation)
    return before, after


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.reshape(2, 3, 2, 4),
        lambda x: x.reshape(2, 3, 2, 4).reshape(2, 3, 8),
        lambda x: x[:, None].reshape(12, 2, 2),
        lambda x: jnp.broadcast_to(x[:, :, None], (2, 6, 5, 4)).reshape(2, 30, 4),
        lambda x: jnp.repeat(x, 3, axis=1),
    ],
)
def test_each_element_is_where_the_factors_say(function):
    before, after = layouts(function)
    strides, stride = {}, 1
    for factor in all_leaves(before)[::-1]:
        strides[factor] = stride
        stride *= factor.size
    expected = np.asarray(function(X))
    found = np.zeros(expected.shape, int)
    for axis, factors in enumerate(after):
        index = np.zeros(1, int)
        for factor in leaves(factors):
            steps = np.arange(factor.size) * (0 if factor.is_constant else strides[factor])
            index = (index[:, None] + steps).ravel()
        found += index.reshape([-1 if i == axis else 1 for i in range(found.ndim)])
    np.testing.assert_array_equal(found, expected)


def test_a_reshape_that_is_no_list_of_factors():
    assert layouts(lambda x: x.reshape(2, 4, 6))[1] is None


def test_an_operand_varies_with_the_factors_that_it_meets_in_their_place():
    array = layout_of((4, 6, 4))
    first, second, last = array
    assert varies_with([first, [], []], array) == first
    assert varies_with([[], second, last], array) == [*second, *last]
    assert varies_with([last, [], []], array) is None  # of the same size, in another place
    assert varies_with([layout_of((4,))[0], [], []], array) is None  # of another array
    groups = layout_of((3,))[0]
    assert varies_with([[], [*groups], []], array) is None  # of another size
