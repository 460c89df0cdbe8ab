import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcomp as jc
from tests.helpers import kept, slow

CODEC = jc.Quantize(bits=2)
MASK = np.arange(4 * 6 * 5).reshape(4, 6, 5) % 3 > 0

NORMS: dict[str, dict[str, typing.Any]] = {
    "plain": {},
    "first axis": {"axis": 0},
    "momentum, epsilon": {"momentum": 0.7, "epsilon": 1e-2},
    "slow variance": {"use_fast_variance": False},
    "no scale": {"use_scale": False},
    "no bias": {"use_bias": False},
    "neither": {"use_bias": False, "use_scale": False},
    "bfloat16": {"dtype": jnp.bfloat16},
    "bfloat16 parameters": {"param_dtype": jnp.bfloat16},
}


def _inputs(dtype: typing.Any, steps: int = 3) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(i, 1 + i, (4, 6, 5)), dtype) for i in range(steps)]


def _pair(codec: jc.Codec | None, **kwargs: typing.Any) -> tuple[nnx.BatchNorm, jc.nn.BatchNorm]:
    features = 4 if kwargs.get("axis") == 0 else 5
    stock = nnx.BatchNorm(features, **kwargs, rngs=nnx.Rngs(0))
    ours = jc.nn.BatchNorm(features, **kwargs, codec=codec, rngs=nnx.Rngs(0))
    for layer in (stock, ours):
        if layer.scale is not None:
            layer.scale[...] = jnp.linspace(0.5, 2.0, features).astype(layer.param_dtype)
        if layer.bias is not None:
            layer.bias[...] = jnp.linspace(-1.0, 1.0, features).astype(layer.param_dtype)
    return stock, ours


def _train(layer: nnx.BatchNorm, inputs: list[jax.Array], **kwargs: typing.Any) -> typing.Any:
    """The outputs of the steps and the state after them."""
    graphdef, state = nnx.split(layer)

    @jax.jit
    def step(state: nnx.State, x: jax.Array) -> tuple[jax.Array, nnx.State]:
        merged = nnx.merge(graphdef, state)
        return merged(x, **kwargs), nnx.state(merged)

    outputs = []
    for x in inputs:
        y, state = step(state, x)
        outputs.append(y)
    return outputs, state


@pytest.mark.parametrize("kwargs", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("dtype", [jnp.float32, slow(jnp.bfloat16)])
def test_training_is_flax_own(
    kwargs: dict[str, typing.Any], dtype: typing.Any, assert_same: typing.Any
) -> None:
    stock, ours = _pair(CODEC, **kwargs)
    assert_same(nnx.state(ours), nnx.state(stock))
    inputs = _inputs(dtype)
    got, expected = _train(ours, inputs), _train(stock, inputs)
    assert_same(got, expected)
    assert not np.array_equal(got[1]["mean"][...], nnx.state(stock)["mean"][...])


def test_masked_training_is_flax_own(assert_same: typing.Any) -> None:
    stock, ours = _pair(CODEC)
    inputs = _inputs(jnp.float32)
    got = _train(ours, inputs, mask=jnp.asarray(MASK))
    assert_same(got, _train(stock, inputs, mask=jnp.asarray(MASK)))
    unmasked, _ = _train(ours, inputs)
    assert not np.array_equal(got[0][0], unmasked[0])


def test_statistics_over_a_named_axis_are_flax_own() -> None:
    (x,) = _inputs(jnp.float32, steps=1)
    outputs, states = [], []
    for layer in _pair(CODEC, axis_name="lanes"):
        graphdef, state = nnx.split(layer)

        def lane(state: nnx.State, x: jax.Array, graphdef: typing.Any = graphdef) -> typing.Any:
            merged = nnx.merge(graphdef, state)
            return merged(x), nnx.state(merged)

        y, state = jax.jit(jax.vmap(lane, axis_name="lanes", in_axes=(None, 0)))(state, x[:, None])
        outputs.append(y), states.append(state)
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *states[::-1])
    whole, _ = _train(_pair(CODEC)[0], [x])
    np.testing.assert_allclose(outputs[1].reshape(x.shape), whole[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["constructor", "call", "eval"])
def test_evaluation_is_flax_own(way: str, assert_same: typing.Any) -> None:
    kwargs = {"use_running_average": True} if way == "constructor" else {}
    stock, ours = _pair(CODEC, **kwargs)
    call = {"use_running_average": True} if way == "call" else {}
    for layer in (stock, ours):
        layer.mean[...] += 0.5
        if way == "eval":
            layer.eval()
    before = nnx.state(ours)
    got, state = _train(ours, _inputs(jnp.bfloat16), **call)
    assert_same(got, _train(stock, _inputs(jnp.bfloat16), **call)[0])
    assert_same(state, before)


def test_no_choice_of_statistics_is_an_error() -> None:
    _, ours = _pair(CODEC, use_running_average=None)
    with pytest.raises(ValueError, match="use_running_average"):
        ours(jnp.ones((4, 5)))


@pytest.mark.parametrize("kwargs", kept(NORMS.values(), [*NORMS.values()][::2]), ids=NORMS)
def test_gradient_of_an_exact_code_is_flax_own(kwargs: dict[str, typing.Any]) -> None:
    (x,) = _inputs(jnp.float32, steps=1)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=x.shape), jnp.float32)

    def gradient(layer: nnx.BatchNorm) -> typing.Any:
        graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

        def loss(params: nnx.State, x: jax.Array) -> jax.Array:
            y = nnx.merge(graphdef, params, rest, copy=True)(x)
            return (weights * y.astype(jnp.float32) ** 2).sum()

        return jax.jit(jax.grad(loss, (0, 1)))(params, x)

    stock, ours = _pair(jc.Exact(), **kwargs)
    low = jnp.bfloat16 in kwargs.values()
    for got, expected in zip(*map(jax.tree.leaves, map(gradient, (ours, stock))), strict=True):
        scale = np.abs(expected).max().astype(np.float32)
        np.testing.assert_allclose(
            got.astype(jnp.float32),
            expected.astype(jnp.float32),
            atol=(2e-2 if low else 1e-5) * scale,
        )


def test_codec_is_static() -> None:
    (_, a), (_, b) = _pair(CODEC), _pair(jc.Quantize(bits=2))
    assert nnx.graphdef(a) == nnx.graphdef(b)
    assert hash(nnx.graphdef(a)) == hash(nnx.graphdef(b))
    b.codec = jc.Quantize(bits=4)
    assert nnx.graphdef(a) != nnx.graphdef(b)


def test_running_statistics_survive_remat_and_grad() -> None:
    (x,) = _inputs(jnp.float32, steps=1)
    results = []
    for forward in (lambda layer, x: layer(x), nnx.remat(lambda layer, x: layer(x))):
        _, layer = _pair(CODEC)
        loss = nnx.value_and_grad(lambda layer, x, f=forward: (f(layer, x) ** 3).sum())
        results.append((nnx.jit(loss)(layer, x), nnx.state(layer)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max()),
        *results,
    )
    assert not np.array_equal(results[0][1]["mean"][...], jnp.zeros(5))


def test_running_statistics_are_traced_without_a_search_for_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tracer that is asked for its sharding searches the whole program."""
    asked: list[object] = []
    monkeypatch.setattr(jax.core.Tracer, "sharding", property(asked.append))
    _, layer = _pair(CODEC)
    _train(layer, _inputs(jnp.float32, 1))
    assert not asked


LAYER_NORMS: dict[str, dict[str, typing.Any]] = {
    "plain": {},
    "epsilon, slow variance": {"epsilon": 1e-2, "use_fast_variance": False},
    "no scale": {"use_scale": False},
    "neither": {"use_bias": False, "use_scale": False},
    "bfloat16": {"dtype": jnp.bfloat16},
    "bfloat16 parameters": {"param_dtype": jnp.bfloat16},
}


@pytest.mark.parametrize("name", LAYER_NORMS)
def test_layer_norm_is_flax_own(name: str, assert_same: typing.Any, apply: typing.Any) -> None:
    options = LAYER_NORMS[name]
    stock = nnx.LayerNorm(5, **options, rngs=nnx.Rngs(0))
    ours = jc.nn.LayerNorm(5, **options, codec=CODEC, rngs=nnx.Rngs(0))
    assert_same(nnx.state(ours), nnx.state(stock))
    (x,) = _inputs(options.get("dtype", jnp.float32), 1)
    assert_same(apply(ours, x), apply(stock, x))
    assert_same(apply(ours, x, mask=jnp.asarray(MASK)), apply(stock, x, mask=jnp.asarray(MASK)))


def test_layer_norm_over_other_axes_has_no_coded_form() -> None:
    layer = jc.nn.LayerNorm(5, reduction_axes=(-2, -1), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="expected reduction_axes=-1 and feature_axes=-1"):
        layer.check_codec(CODEC)
