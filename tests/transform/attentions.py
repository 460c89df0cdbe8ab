"""Attentions under `jax.checkpoint`, their loss, and its gradient."""

import jax
import jax.numpy as jnp
from jax import lax


def causal(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def rotated(k):
    """Keys, as rotary embeddings rotate them."""
    first, second = jnp.split(k, 2, -1)
    return jnp.concatenate([-second, first], -1)


def loss_of(attend, x, w):
    q, k, v = ((jnp.tanh(x) @ w[i]).reshape(*x.shape[:2], 4, 16) for i in range(3))
    mixed = jax.checkpoint(attend)(q, k, v)
    return jnp.sin(mixed.reshape(x.shape) @ w[3]).sum()


def projected(frozen):
    """The loss of a causal attention with a frozen projection under its `jax.checkpoint`."""

    def loss(x, w):
        q, k, v = ((jnp.tanh(x) @ w[i]).reshape(*x.shape[:2], 4, 16) for i in range(3))
        mixed = jax.checkpoint(lambda q, k, v: causal(q, k, v).reshape(x.shape) @ frozen)(q, k, v)
        return jnp.sin(mixed).sum()

    return loss


def gradient(function, *args):
    return jax.jit(jax.grad(function, (0, 1)))(*args)


def over_devices(function, check):
    """The sum of a function over two devices, each with its part of the batch."""
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x, w):
        return lax.psum(function(x, w), "batch")

    specs = jax.P("batch"), jax.P()
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=check)


def of_examples(function, x, w):
    """The gradients of two inputs, by `jax.vmap`."""
    return jax.jit(jax.vmap(jax.grad(function), (0, None)))(jnp.stack([x, 2 * x]), w)


def stacked(function):
    """Two layers in a scan."""

    def stack(x, w):
        def body(x, _):
            return jnp.tanh(x + function(x, w)), None

        return lax.scan(body, x, jnp.arange(2))[0].sum()

    return stack
