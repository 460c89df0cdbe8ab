import functools
import typing

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jaxcomp as jc

CODEC = jc.Quantize(bits=2)

MASK = np.arange(3 * 3 * 4 * 6).reshape(3, 3, 4, 6) % 3 > 0

CONVS = {
    "plain": ((3, 3), {}, (2, 8, 8, 4)),
    "no bias": ((3, 3), {"use_bias": False}, (2, 8, 8, 4)),
    "strides": ((3, 3), {"strides": 2, "padding": [(1, 1), (1, 1)]}, (2, 7, 9, 4)),
    "valid, one stride an axis": ((2, 3), {"strides": (2, 1), "padding": "VALID"}, (2, 8, 8, 4)),
    "input dilation": ((3, 3), {"input_dilation": 2, "padding": 1}, (2, 5, 5, 4)),
    "kernel dilation": ((3, 3), {"kernel_dilation": (1, 2)}, (2, 8, 8, 4)),
    "groups": ((3, 3), {"feature_group_count": 2}, (2, 8, 8, 4)),
    "mask": ((3, 3), {"mask": MASK}, (2, 8, 8, 4)),
    "circular": ((3, 3), {"padding": "CIRCULAR"}, (2, 8, 8, 4)),
    "reflect": ((3, 3), {"padding": "REFLECT"}, (2, 8, 8, 4)),
    "causal": ((3,), {"padding": "CAUSAL"}, (2, 9, 4)),
    "1d": (3, {}, (2, 9, 4)),
    "3d": ((3, 3, 3), {"strides": 2}, (2, 5, 4, 6, 4)),
    "batch dimensions": ((3, 3), {}, (2, 3, 6, 6, 4)),
    "no batch dimension": ((3, 3), {}, (6, 6, 4)),
    "precision": ((3, 3), {"precision": "highest"}, (2, 8, 8, 4)),
    "bfloat16": ((3, 3), {"dtype": jnp.bfloat16}, (2, 8, 8, 4)),
    "bfloat16 parameters": ((3, 3), {"param_dtype": jnp.bfloat16}, (2, 8, 8, 4)),
    "float32 sums": (
        (3, 3),
        {"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32},
        (2, 8, 8, 4),
    ),
}
TRANSPOSED = {
    "plain": ((3, 3), {}, (2, 8, 8, 4)),
    "no bias, strides": ((3, 2), {"use_bias": False, "strides": (2, 1)}, (2, 8, 8, 4)),
    "1d": (3, {"strides": 2, "padding": "VALID"}, (2, 9, 4)),
    "kernel dilation": ((3, 3), {"kernel_dilation": 2}, (2, 5, 5, 4)),
    "padding": ((3, 3), {"padding": [(1, 2), (0, 1)]}, (2, 5, 5, 4)),
    "mask": ((3, 3), {"mask": MASK}, (2, 8, 8, 4)),
    "batch dimensions": ((3, 3), {}, (2, 3, 6, 6, 4)),
    "no batch dimension": ((3, 3), {}, (6, 6, 4)),
    "bfloat16": ((3, 3), {"dtype": jnp.bfloat16}, (2, 8, 8, 4)),
}
LINEARS = {
    "plain": ({}, (5, 4)),
    "no bias": ({"use_bias": False}, (5, 4)),
    "batch dimensions": ({}, (2, 3, 5, 4)),
    "no batch dimension": ({}, (4,)),
    "precision": ({"precision": "highest"}, (5, 4)),
    "bfloat16": ({"dtype": jnp.bfloat16}, (5, 4)),
    "bfloat16 parameters": ({"param_dtype": jnp.bfloat16}, (5, 4)),
    "float32 sums": ({"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32}, (5, 4)),
}

Layers = tuple[nnx.Module, nnx.Module, jax.Array]


def _normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def _init(key: jax.Array, shape: tuple[int, ...], dtype: typing.Any) -> jax.Array:
    return _normal(*shape).astype(dtype)  # Flax's own compiles for every shape


def _pair(stock: typing.Any, ours: typing.Any, *args: typing.Any, codec: jc.Codec) -> typing.Any:
    def make(layer: typing.Any, **kwargs: typing.Any) -> nnx.Module:
        return layer(4, 6, *args[:-2], **args[-2], kernel_init=_init, rngs=nnx.Rngs(0), **kwargs)

    return make(stock), make(ours, codec=codec), _normal(*args[-1])


def _conv(name: str, codec: jc.Codec) -> Layers:
    return _pair(nnx.Conv, jc.nn.Conv, *CONVS[name], codec=codec)


def _transposed(name: str, codec: jc.Codec) -> Layers:
    return _pair(nnx.ConvTranspose, jc.nn.ConvTranspose, *TRANSPOSED[name], codec=codec)


def _linear(name: str, codec: jc.Codec) -> Layers:
    return _pair(nnx.Linear, jc.nn.Linear, *LINEARS[name], codec=codec)


every_layer = pytest.mark.parametrize(
    "make",
    [functools.partial(_conv, name) for name in CONVS]
    + [functools.partial(_transposed, name) for name in TRANSPOSED]
    + [functools.partial(_linear, name) for name in LINEARS],
    ids=[f"conv, {name}" for name in CONVS]
    + [f"transposed, {name}" for name in TRANSPOSED]
    + [f"linear, {name}" for name in LINEARS],
)


@every_layer
def test_state_and_output_are_flax_own(
    make: typing.Callable[..., Layers], assert_same: typing.Any, apply: typing.Any
) -> None:
    stock, ours, x = make(CODEC)
    assert_same(nnx.state(ours), nnx.state(stock))
    x = x.astype(stock.dtype or x.dtype)
    assert_same(apply(ours, x), apply(stock, x))


def test_initial_values_are_flax_own(assert_same: typing.Any) -> None:
    assert_same(nnx.state(_model(CODEC)), nnx.state(_stock_model()))


@every_layer
def test_gradient_of_an_exact_code_is_flax_own(make: typing.Callable[..., Layers]) -> None:
    stock, ours, x = make(jc.Exact())

    def gradient(layer: nnx.Module) -> typing.Any:
        graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

        def loss(params: nnx.State, x: jax.Array) -> jax.Array:
            return (nnx.merge(graphdef, params, rest)(x).astype(jnp.float32) ** 2).sum()

        return jax.jit(jax.grad(loss, (0, 1)))(params, x)

    # A sum in bfloat16 may or may not be rounded to it before it becomes a float32 gradient.
    rtol = max(1e-5, float(jnp.finfo(stock.dtype or x.dtype).eps))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a.astype(jnp.float32), b.astype(jnp.float32), rtol=rtol, atol=1e-5
        ),
        gradient(ours),
        gradient(stock),
    )


def test_weight_gradient_uses_the_decoded_input_and_input_gradient_the_exact_one() -> None:
    codec = jc.Quantize(bits=2, rounding="nearest")
    stock, ours, x = _linear("plain", codec)
    decoded = codec.decode(codec.encode(x))
    assert not np.array_equal(decoded, x)

    def loss(layer: nnx.Module, x: jax.Array) -> jax.Array:
        return layer(x)[:, 0].sum()

    got, dx = nnx.grad(loss, argnums=(0, 1))(ours, x)
    expected, _ = nnx.grad(loss, argnums=(0, 1))(stock, decoded)
    _, dx_exact = nnx.grad(loss, argnums=(0, 1))(stock, x)
    np.testing.assert_array_equal(got["kernel"][...], expected["kernel"][...])
    np.testing.assert_array_equal(dx, dx_exact)


def test_without_a_codec_the_program_is_flax_own() -> None:
    x = jnp.ones((1, 4, 4, 4))
    models = _model(None), _stock_model()
    programs = [str(jax.make_jaxpr(jax.grad(lambda x, m=m: m(x).sum()))(x)) for m in models]
    assert programs[0] == programs[1]


def test_an_injected_operation_is_refused() -> None:
    with pytest.raises(TypeError, match="conv_general_dilated"):
        jc.nn.Conv(
            4, 6, (3, 3), conv_general_dilated=jax.lax.conv_general_dilated, rngs=nnx.Rngs(0)
        )
    with pytest.raises(TypeError, match="dot_general"):
        jc.nn.Linear(4, 6, dot_general=jax.lax.dot_general, rngs=nnx.Rngs(0))


def test_window_larger_than_the_map_is_refused() -> None:
    _, layer, _ = _conv("plain", jc.AvgPool(window=5))
    with pytest.raises(ValueError, match="window=5"):
        layer(jnp.ones((2, 4, 4, 4)))


# The codec is static: part of the graph definition, no leaf of the state.


def _model(codec: jc.Codec | None) -> nnx.Sequential:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(
        jc.nn.Conv(4, 4, (3, 3), codec=codec, rngs=rngs),
        jc.nn.Linear(4, 4, codec=codec, rngs=rngs),
    )


def _stock_model() -> nnx.Sequential:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Conv(4, 4, (3, 3), rngs=rngs), nnx.Linear(4, 4, rngs=rngs))


def test_split_treats_a_compressed_model_as_the_stock_one(assert_same: typing.Any) -> None:
    graphdef, params, *rest = nnx.split(_model(CODEC), nnx.Param, nnx.RngState, ...)
    _, stock_params, *stock_rest = nnx.split(_stock_model(), nnx.Param, nnx.RngState, ...)
    assert_same(params, stock_params)
    assert_same(rest, stock_rest)
    assert nnx.to_flat_state(params).paths == nnx.to_flat_state(stock_params).paths
    assert nnx.merge(graphdef, params, *rest).layers[0].codec == CODEC


def test_models_built_alike_share_one_trace_and_a_new_codec_makes_another() -> None:
    traces = []

    @nnx.jit
    def step(model: nnx.Module, x: jax.Array) -> jax.Array:
        traces.append(model)
        return model(x)

    model, other = _model(CODEC), _model(jc.Quantize(bits=2))
    assert nnx.graphdef(model) == nnx.graphdef(other)
    assert hash(nnx.graphdef(model)) == hash(nnx.graphdef(other))
    x = jnp.ones((1, 4, 4, 4))
    step(model, x), step(model, x), step(other, x)
    assert len(traces) == 1
    other.layers[0].codec = jc.Quantize(bits=4)
    assert nnx.graphdef(model) != nnx.graphdef(other)
    step(other, x)
    assert len(traces) == 2


@pytest.mark.parametrize("checkpointer", [ocp.StandardCheckpointer, ocp.PyTreeCheckpointer])
@pytest.mark.parametrize(("saved", "loaded"), [(None, CODEC), (CODEC, None)])
def test_checkpoints_load_both_ways(
    checkpointer: typing.Callable[[], ocp.Checkpointer],
    saved: jc.Codec | None,
    loaded: jc.Codec | None,
    tmp_path: typing.Any,
    assert_same: typing.Any,
) -> None:
    source = _model(saved) if saved else _stock_model()
    target = _model(loaded) if loaded else _stock_model()
    state = jax.tree.map(lambda a: a + 1, nnx.state(source))
    template = nnx.state(target)
    with checkpointer() as writer:
        writer.save(tmp_path / "checkpoint", state)
    with checkpointer() as reader:
        if checkpointer is ocp.StandardCheckpointer:
            restored = reader.restore(tmp_path / "checkpoint", template)
        else:
            restore_args = ocp.checkpoint_utils.construct_restore_args(template)
            restored = reader.restore(
                tmp_path / "checkpoint", item=template, restore_args=restore_args
            )
    nnx.update(target, restored)
    assert_same(nnx.state(target), state)


# Flax's transforms.


def test_grad_remat_and_vmap_agree() -> None:
    model = jc.nn.Linear(4, 4, codec=jc.Quantize(bits=4), rngs=nnx.Rngs(0))
    x = _normal(5, 4)

    def loss(model: nnx.Module, x: jax.Array) -> jax.Array:
        return (model(x) ** 2).sum()

    plain = nnx.jit(nnx.grad(loss))(model, x)
    again = nnx.jit(nnx.grad(nnx.remat(loss)))(model, x)
    jax.tree.map(np.testing.assert_array_equal, plain, again)
    outputs = nnx.vmap(lambda model, x: model(x), in_axes=(None, 0))(model, x)
    np.testing.assert_allclose(outputs, model(x), rtol=1e-6)


def test_scan_over_layers() -> None:
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key: jax.Array) -> jc.nn.Linear:
        return jc.nn.Linear(4, 4, codec=jc.Quantize(bits=8), rngs=nnx.Rngs(key))

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer: jc.nn.Linear, x: jax.Array) -> jax.Array:
        return jnp.tanh(layer(x))

    layers = make(jax.random.split(jax.random.key(0), 3))
    x = _normal(5, 4)

    def unrolled(layers: jc.nn.Linear, x: jax.Array) -> jax.Array:
        for i in range(3):
            x = jnp.tanh(x @ layers.kernel[...][i] + layers.bias[...][i][None])
        return x

    got, expected = (
        nnx.jit(nnx.value_and_grad(lambda layers, x, f=f: (f(layers, x) ** 2).sum()))(layers, x)
        for f in (forward, unrolled)
    )
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=0.01 * np.abs(b).max()),
        got[1],
        expected[1],
    )


# The operations where Flax takes an injected one.


def _gradients(loss: typing.Callable[..., jax.Array], params: typing.Any) -> typing.Any:
    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize("kind", ["linen.Dense", "linen.Conv", "nnx.Linear", "nnx.Conv"])
def test_injected_operations(kind: str) -> None:
    codec = jc.Quantize(bits=8)
    dot = functools.partial(jc.ops.dot_general, codec=codec)
    conv = functools.partial(jc.ops.conv_general_dilated, codec=codec)
    x = _normal(2, 6, 6, 4)

    def loss_of(inject: bool) -> tuple[typing.Callable[..., jax.Array], typing.Any]:
        if kind.startswith("linen"):
            layer = {
                "linen.Dense": lambda **k: flax.linen.Dense(5, **k),
                "linen.Conv": lambda **k: flax.linen.Conv(5, (3, 3), **k),
            }[kind](**_injected(inject, kind, dot, conv))
            params = layer.init(jax.random.key(0), x)
            return lambda p: (layer.apply(p, x).astype(jnp.float32) ** 2).sum(), params
        layer = {
            "nnx.Linear": lambda **k: nnx.Linear(4, 5, rngs=nnx.Rngs(0), **k),
            "nnx.Conv": lambda **k: nnx.Conv(4, 5, (3, 3), rngs=nnx.Rngs(0), **k),
        }[kind](**_injected(inject, kind, dot, conv))
        graphdef, state = nnx.split(layer)
        return lambda s: (nnx.merge(graphdef, s)(x).astype(jnp.float32) ** 2).sum(), state

    value, gradient = _gradients(*loss_of(True))
    expected_value, expected = _gradients(*loss_of(False))
    np.testing.assert_array_equal(value, expected_value)
    leaves = jax.tree.leaves(gradient), jax.tree.leaves(expected)
    assert any(not np.array_equal(a, b) for a, b in zip(*leaves, strict=True))  # it is in use
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_allclose(a, b, atol=0.02 * np.abs(b).max())


def _injected(inject: bool, kind: str, dot: typing.Any, conv: typing.Any) -> dict[str, typing.Any]:
    if not inject:
        return {}
    return {"conv_general_dilated": conv} if kind.endswith("Conv") else {"dot_general": dot}


@pytest.mark.parametrize("kind", ["conv", "dot", "batch_norm"])
def test_noise_is_drawn_anew_when_parameters_change(kind: str) -> None:
    """The same input at every step, as a first layer may have: errors must not add up."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 3)), jnp.float32)
    rngs, codec = nnx.Rngs(0), jc.Quantize(bits=2)
    layer = {
        "conv": lambda: jc.nn.Conv(3, 4, (3,), codec=codec, rngs=rngs),
        "dot": lambda: jc.nn.Linear(3, 4, codec=codec, rngs=rngs),
        "batch_norm": lambda: jc.nn.BatchNorm(3, codec=codec, rngs=rngs),
    }[kind]()
    weight = layer.scale if kind == "batch_norm" else layer.kernel

    differentiate = nnx.jit(nnx.grad(lambda layer, x: jnp.sin(3 * layer(x)).sum()))

    def gradient() -> jax.Array:
        grads = differentiate(layer, x)
        return grads["scale" if kind == "batch_norm" else "kernel"][...]

    first, again = gradient(), gradient()
    np.testing.assert_array_equal(first, again)
    weight[...] = weight[...] + 1e-6
    assert np.abs(gradient() - first).max() > 1e-3 * np.abs(first).max()


def test_circular_transposed_convolutions_have_no_coded_form() -> None:
    layer = jc.nn.ConvTranspose(4, 6, (3, 3), padding="CIRCULAR", rngs=nnx.Rngs(0))
    assert layer(jnp.ones((2, 5, 5, 4))).shape == (2, 5, 5, 6)
    with pytest.raises(ValueError, match="has no form for padding='CIRCULAR'"):
        layer.check_codec(CODEC)


@pytest.mark.parametrize("kind", ["conv", "linear", "transposed"])
def test_a_sink_takes_its_statistic_and_changes_nothing_else(kind: str) -> None:
    make = {"conv": _conv, "linear": _linear, "transposed": _transposed}[kind]
    _, layer, x = make("plain", CODEC)

    def run(layer: nnx.Module) -> typing.Any:
        graphdef, sinks, rest = nnx.split(layer, jc.nn.Sink, ...)

        def loss(sinks: nnx.State, x: jax.Array) -> jax.Array:
            return (nnx.merge(graphdef, sinks, rest, copy=True)(x) ** 2).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(sinks, x)

    value, (_, dx) = run(layer)
    layer.sink = jc.nn.Sink(jnp.ones((len(x), 6)))
    value_with, (statistic, dx_with) = run(layer)
    assert value == value_with
    np.testing.assert_allclose(dx_with, dx, rtol=1e-5, atol=1e-5)
    assert np.all(np.asarray(statistic["sink"][...])[:, :2] > 0)
