"""ResNet-50 (v1.5) as plain functions on dictionaries of parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

Tree = dict[str, Any]
Layers = tuple[int, ...]
Block = Callable[[Tree, Tree, jax.Array, int], tuple[jax.Array, Tree]]


def init_conv(key: jax.Array, size: int, cin: int, cout: int) -> jax.Array:
    std = (2 / (size * size * cout)) ** 0.5
    return std * jax.random.normal(key, (size, size, cin, cout))


def init_norm(features: int) -> tuple[Tree, Tree]:
    params = {"scale": jnp.ones(features), "bias": jnp.zeros(features)}
    return params, {"mean": jnp.zeros(features), "var": jnp.ones(features)}


def init_block(key: jax.Array, cin: int, features: int, stride: int) -> tuple[Tree, Tree]:
    keys = jax.random.split(key, 4)
    params: Tree = {
        "conv1": init_conv(keys[0], 1, cin, features),
        "conv2": init_conv(keys[1], 3, features, features),
        "conv3": init_conv(keys[2], 1, features, 4 * features),
    }
    state: Tree = {}
    params["norm1"], state["norm1"] = init_norm(features)
    params["norm2"], state["norm2"] = init_norm(features)
    params["norm3"], state["norm3"] = init_norm(4 * features)
    if stride != 1 or cin != 4 * features:
        params["shortcut"] = init_conv(keys[3], 1, cin, 4 * features)
        params["norm4"], state["norm4"] = init_norm(4 * features)
    return params, state


def init(key: jax.Array, layers: Layers = (3, 4, 6, 3), classes: int = 1000) -> tuple[Tree, Tree]:
    keys = iter(jax.random.split(key, 2 + sum(layers)))
    params: Tree = {"stem": init_conv(next(keys), 7, 3, 64)}
    state: Tree = {}
    params["norm"], state["norm"] = init_norm(64)
    params["blocks"], state["blocks"], width = [], [], 64
    for stage, count in enumerate(layers):
        for i in range(count):
            features = 64 * 2**stage
            made = init_block(next(keys), width, features, stride_of(stage, i))
            params["blocks"].append(made[0])
            state["blocks"].append(made[1])
            width = 4 * features
    params["head"] = {
        "w": 0.01 * jax.random.normal(next(keys), (width, classes)),
        "b": jnp.zeros(classes),
    }
    return params, state


def stride_of(stage: int, i: int) -> int:
    return 2 if stage > 0 and i == 0 else 1


def conv(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
    pad = w.shape[0] // 2
    return lax.conv_general_dilated(
        x,
        w.astype(x.dtype),
        window_strides=(stride, stride),
        padding=[(pad, pad), (pad, pad)],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def batch_norm(params: Tree, state: Tree, x: jax.Array) -> tuple[jax.Array, Tree]:
    y = x.astype(jnp.float32)
    mean = jnp.mean(y, (0, 1, 2))
    var = jnp.var(y, (0, 1, 2))
    y = (y - mean) * lax.rsqrt(var + 1e-5) * params["scale"] + params["bias"]
    state = {
        "mean": 0.9 * state["mean"] + 0.1 * mean,
        "var": 0.9 * state["var"] + 0.1 * var,
    }
    return y.astype(x.dtype), state


def bottleneck(params: Tree, state: Tree, x: jax.Array, stride: int) -> tuple[jax.Array, Tree]:
    new = {}
    y, new["norm1"] = batch_norm(params["norm1"], state["norm1"], conv(x, params["conv1"]))
    y = conv(jax.nn.relu(y), params["conv2"], stride)
    y, new["norm2"] = batch_norm(params["norm2"], state["norm2"], y)
    y = conv(jax.nn.relu(y), params["conv3"])
    y, new["norm3"] = batch_norm(params["norm3"], state["norm3"], y)
    if "shortcut" in params:
        x = conv(x, params["shortcut"], stride)
        x, new["norm4"] = batch_norm(params["norm4"], state["norm4"], x)
    return jax.nn.relu(x + y), new


def apply(
    params: Tree,
    state: Tree,
    images: jax.Array,
    layers: Layers = (3, 4, 6, 3),
    dtype: DTypeLike = jnp.bfloat16,
    block: Block = bottleneck,
) -> tuple[jax.Array, Tree]:
    """Logits and the new running averages."""
    new: Tree = {"blocks": []}
    x = conv(images.astype(dtype), params["stem"], 2)
    x, new["norm"] = batch_norm(params["norm"], state["norm"], x)
    x = jax.nn.relu(x)
    pads = [(0, 0), (1, 1), (1, 1), (0, 0)]
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), pads)
    blocks = iter(zip(params["blocks"], state["blocks"], strict=True))
    for stage, count in enumerate(layers):
        for i in range(count):
            x, changed = block(*next(blocks), x, stride_of(stage, i))
            new["blocks"].append(changed)
    x = jnp.mean(x, (1, 2))
    return x @ params["head"]["w"].astype(dtype) + params["head"]["b"].astype(dtype), new
