"""What `norm_act` refuses."""

import jax
import jax.numpy as jnp
import pytest

from jaxcomp import ops
from tests.helpers import normal, without_type_checks
from tests.ops.norm_act_cases import SHAPE, arguments, norm_act


def test_layout_without_channels_last_is_an_error():
    activation = norm_act(*arguments(jnp.float32))[0]
    layout = ("NCHW", "HWIO", "NCHW")
    with pytest.raises(ValueError, match="lhs: expected a CodedArray with its channels last"):
        ops.conv_general_dilated(
            activation, jnp.ones((1, 1, 5, 2)), (1, 1), "SAME", dimension_numbers=layout
        )


def test_residual_without_relu_is_an_error():
    with pytest.raises(ValueError, match="residual: expected None with relu=False"):
        norm_act(*arguments(jnp.float32, residual=True), relu=False)


def test_ranges_need_axes_to_lie_along():
    x, scale, bias = normal((8, 6)), jnp.ones(6), jnp.zeros(6)
    with pytest.raises(ValueError, match=r"x of shape \(8, 6\): expected axes between batch and"):
        norm_act(x, scale, bias, scale_source="range")


def test_a_residual_of_another_shape_is_an_error():
    error = pytest.raises(ValueError, match=r"residual of shape \(1, 1, 1, 6\): expected")
    with error, without_type_checks():
        norm_act(*arguments(jnp.float32), jnp.ones((1, 1, 1, 6)))


def test_second_derivatives_are_refused():
    x, scale, bias = arguments(jnp.float32)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.hessian(lambda s: norm_act(x, s, bias)[0].value.sum())(scale)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"residual_norm": (jnp.ones(6), jnp.zeros(6))}, "residual_norm: expected None without a"),
        ({"pool": ((2, 2), None, "SAME"), "relu": False}, "expected None with a residual or with"),
        ({"pool": ((2, 2), None, "SAME"), "residual": normal(SHAPE)}, "expected None with a resid"),
        (
            {"residual": normal(SHAPE), "residual_norm": (jnp.ones(4), jnp.ones(4))},
            r"residual_norm of shapes \[\(4,\), \(4,\)\]: expected two of \(6,\)",
        ),
        ({"pool": ((2, 2), (2, 2))}, r"expected \(window_shape, strides, padding\)"),
        ({"pool": ((0, 2), None, "SAME")}, r"window_shape=\(0, 2\): expected positive numbers"),
        ({"pool": ((2,), None, "SAME")}, r"expected \(batch, 1 spatial axes, channels\)"),
        ({"pool": ((32, 9), None, "SAME")}, "a window of 288 values needs more bits"),
    ],
)
def test_what_does_not_go_together_is_an_error(options, message):
    with without_type_checks(), pytest.raises(ValueError, match=message):
        norm_act(*arguments(jnp.float32), **options)
