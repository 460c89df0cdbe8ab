"""Byte-level language models without attention, in Flax NNX: a GRU and a selective scan.

Sources: arXiv:1406.1078 and arXiv:2312.00752 (Mamba, without its fused kernel).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

BYTES = 256


class LanguageModel(nnx.Module):
    def __init__(self, features: int, blocks: list[nnx.Module], **options: Any) -> None:
        self.embed = nnx.Embed(BYTES, features, **options)
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(features, BYTES, **options)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class GRU(LanguageModel):
    def __init__(
        self,
        features: int = 512,
        depth: int = 2,
        *,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        cells = [nnx.GRUCell(features, features, **options) for _ in range(depth)]
        super().__init__(features, [nnx.RNN(cell, rngs=rngs) for cell in cells], **options)


class SelectiveScan(nnx.Module):
    def __init__(
        self, features: int, *, states: int = 16, dtype: DTypeLike | None, rngs: nnx.Rngs
    ) -> None:
        inner, self.rank, self.states = 2 * features, features // 16, states
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.norm = nnx.RMSNorm(features, **options)
        self.enter = nnx.Linear(features, 2 * inner, use_bias=False, **options)
        self.conv = nnx.Conv(
            inner, inner, (4,), padding="CAUSAL", feature_group_count=inner, **options
        )
        self.select = nnx.Linear(inner, self.rank + 2 * states, use_bias=False, **options)
        self.rate = nnx.Linear(self.rank, inner, **options)
        self.log_decay = nnx.Param(jnp.zeros((inner, states)))
        self.skip = nnx.Param(jnp.ones(inner))
        self.leave = nnx.Linear(inner, features, use_bias=False, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        u, gate = jnp.split(self.enter(self.norm(x)), 2, axis=-1)
        u = nnx.silu(self.conv(u))
        rate, b, c = jnp.split(self.select(u), [self.rank, self.rank + self.states], axis=-1)
        decay = -jnp.exp(self.log_decay[...])

        def step(state: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
            rate, b, c, u = (a.astype(jnp.float32) for a in inputs)
            fed = (rate * u)[..., None] * b[:, None]
            state = state * jnp.exp(rate[..., None] * decay[None]) + fed
            return state, (state * c[:, None]).sum(-1).astype(x.dtype)

        by_time = [a.swapaxes(0, 1) for a in (nnx.softplus(self.rate(rate)), b, c, u)]
        start = jnp.zeros((x.shape[0], *decay.shape))
        y = lax.scan(step, start, by_time)[1].swapaxes(0, 1)
        y = y + u * self.skip[...].astype(x.dtype)
        return x + self.leave(y * nnx.silu(gate))


class Mamba(LanguageModel):
    def __init__(
        self,
        features: int = 512,
        depth: int = 2,
        *,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        blocks: list[nnx.Module] = [SelectiveScan(features, **options) for _ in range(depth)]
        super().__init__(features, blocks, **options)
