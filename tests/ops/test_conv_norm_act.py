import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxcomp import Quantize, SignAware, nn, ops
from jaxcomp.codecs import noise
from tests.helpers import assert_close, normal, without_type_checks

OPTIONS = {"window_strides": (1, 1), "padding": "SAME", "codec": SignAware(4)}


def test_gradients_are_those_of_the_module():
    rngs = nnx.Rngs(0)
    conv, norm = nn.Conv(3, 4, (3, 3), use_bias=False, rngs=rngs), nn.BatchNorm(4, rngs=rngs)
    unit = nn.ConvNormAct(conv, norm, codec=SignAware(4))
    x = normal((4, 6, 5, 3))
    parameters = conv.kernel[...], norm.scale[...], norm.bias[...]

    def of_op(parameters):
        seed = noise.fingerprint(*parameters[1:])
        y, *_ = ops.conv_norm_act(x, *parameters, seed=seed, **OPTIONS)
        return jnp.sum(y.value**2), y.value

    def of_module(unit):
        y = unit(x).value
        return jnp.sum(y**2), y

    gradients, y = jax.grad(of_op, has_aux=True)(parameters)
    exact, expected = nnx.grad(of_module, has_aux=True)(unit)
    assert_close(y, expected)
    expected = exact["conv"]["kernel"], exact["norm"]["scale"], exact["norm"]["bias"]
    assert_close(gradients, tuple(gradient[...] for gradient in expected))


def test_a_chain_stores_a_code_for_each():
    x = normal((8, 6, 5, 4))
    kernel, ones, zeros = normal((3, 3, 4, 4), seed=1), jnp.ones(4), jnp.zeros(4)

    def chain(x, kernel):
        y = x
        for _ in range(3):
            y, *_ = ops.conv_norm_act(y, kernel, ones, zeros, input_codec=Quantize(4), **OPTIONS)
        return y.value

    pull = jax.eval_shape(lambda x, kernel: jax.vjp(chain, x, kernel)[1], x, kernel)
    stored = [leaf for leaf in jax.tree.leaves(pull) if leaf.ndim == 4]
    codes = [leaf for leaf in stored if leaf.shape == x.shape]
    assert {leaf.dtype for leaf in codes} == {jnp.dtype("uint4")}
    assert len(codes) == 1 + 3  # of the input and of each unit


def test_one_dimension():
    x, kernel = normal((4, 9, 3)), normal((3, 3, 5), seed=1)
    y, (mean,), _ = ops.conv_norm_act(
        x,
        kernel,
        jnp.ones(5),
        jnp.zeros(5),
        window_strides=(2,),
        padding="VALID",
        codec=SignAware(2),
    )
    assert (y.value.shape, mean.shape) == ((4, 4, 5), (5,))


def test_kernels_of_other_ranks_are_an_error():
    with without_type_checks(), pytest.raises(ValueError, match="expected 1 to 3 spatial"):
        ops.conv_norm_act(normal((2, 3)), normal((3, 4)), jnp.ones(4), jnp.zeros(4), **OPTIONS)
