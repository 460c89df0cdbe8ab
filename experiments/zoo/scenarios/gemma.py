"""A frozen decoder with adapters (LoRA): RMS norms, rotary positions, one key head and GeGLU.

Its form is that of Gemma: arXiv:2403.08295, with the norms of arXiv:2503.19786 after each part.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from experiments.zoo.scenarios.scenario import Around

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder; there is one head of keys and values."""

    depth: int
    width: int
    heads: int
    head: int
    hidden: int
    rank: int = 16

    def kernels(self) -> dict[str, tuple[int, int]]:
        """The shape of each kernel of a layer."""
        wide = self.heads * self.head
        return {
            "q": (self.width, wide),
            "k": (self.width, self.head),
            "v": (self.width, self.head),
            "o": (wide, self.width),
            "gate": (self.width, self.hidden),
            "up": (self.width, self.hidden),
            "down": (self.hidden, self.width),
        }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalizes features in float32."""
    y = x.astype(jnp.float32)
    y *= jax.lax.rsqrt(jnp.square(y).mean(axis=-1, keepdims=True) + 1e-6)
    return (y * (1 + scale)).astype(x.dtype)


def rotated(x: jax.Array) -> jax.Array:
    """Rotates the halves of the features by their position."""
    length, features = x.shape[1], x.shape[-1]
    rates = 10_000.0 ** (-jnp.arange(0, features, 2) / features)
    angles = (jnp.arange(length)[:, None] * rates)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (
        first * jnp.cos(angles) - second * jnp.sin(angles),
        second * jnp.cos(angles) + first * jnp.sin(angles),
    )
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def layer(params: Params, adapters: Params, x: jax.Array, *, causal: bool) -> jax.Array:
    """An attention and a feed-forward network, each with a norm before and after it."""

    def dense(name: str, x: jax.Array) -> jax.Array:
        down, up = (w.astype(x.dtype) for w in adapters[name])
        return x @ params[name] + (x @ down) @ up

    def heads(name: str) -> jax.Array:
        size = params["k"].shape[-1]
        return dense(name, y).reshape(*x.shape[:2], -1, size)

    y = rms_norm(x, params["before_attention"])
    q, k, v = rotated(heads("q")), rotated(heads("k")), heads("v")
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=causal).reshape(*x.shape[:2], -1)
    x += rms_norm(dense("o", mixed), params["after_attention"])
    y = rms_norm(x, params["before_network"])
    y = dense("down", jax.nn.gelu(dense("gate", y)) * dense("up", y))
    return x + rms_norm(y, params["after_network"])


def apply(
    around: Around, params: Params, adapters: Params, x: jax.Array, *, causal: bool = True
) -> jax.Array:
    """Hidden states of embedded tokens: a scan over the layers, and a norm."""
    block = around(functools.partial(layer, causal=causal))
    x, _ = jax.lax.scan(lambda x, w: (block(*w, x), None), x, (params["layers"], adapters))
    return rms_norm(x, params["norm"])


def shapes(sizes: Sizes) -> tuple[Params, Params]:
    """The shapes of the frozen parameters, in bfloat16, and of the adapters, in float32."""

    def stacked(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((sizes.depth, *shape), dtype)

    norms = "before_attention", "after_attention", "before_network", "after_network"
    layers = {name: stacked(*shape) for name, shape in sizes.kernels().items()}
    layers |= {name: stacked(sizes.width) for name in norms}
    adapters = {
        name: (
            stacked(inputs, sizes.rank, dtype=jnp.float32),
            stacked(sizes.rank, outputs, dtype=jnp.float32),
        )
        for name, (inputs, outputs) in sizes.kernels().items()
    }
    norm = jax.ShapeDtypeStruct((sizes.width,), jnp.bfloat16)
    return {"layers": layers, "norm": norm}, adapters
