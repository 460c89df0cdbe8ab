"""What `checkpoint` declares is what XLA's buffer assignment comes to; nothing is run."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxcomp as jc
from experiments.bench.checkpoint import measure
from jaxcomp.memory import analyze
from jaxcomp.models._lm import attend


def _print(capsys, what, declared, compiled):
    with capsys.disabled():
        print(f"\nh100, {what}: declares {declared / 2**20:.2f}, adds {compiled / 2**20:.2f} MiB")


@pytest.mark.aot
def test_h100_keeps_what_a_convolution_unit_declares(capsys):
    pytest.importorskip("jax_cuda13_plugin")
    figures = measure("conv", "each", "h100")
    declared, compiled = figures["declared_bytes"], figures["compiled_bytes"]
    _print(capsys, "convolution, 4 bits", declared, compiled)
    assert compiled <= 1.1 * declared


def _attention(x, weights):
    """Queries take turns, and are computed again in the backward pass."""
    q, k, v = (
        part.reshape(*x.shape[:2], 4, -1) for part in jnp.split(x @ weights["qkv"], 3, axis=-1)
    )
    mixed = jax.checkpoint(attend, static_argnums=(3, 4))(q, k, v, True, 256)
    return x + mixed.reshape(x.shape)


@pytest.mark.aot
def test_h100_keeps_what_long_attention_declares(capsys):
    pytest.importorskip("jax_cuda13_plugin")

    def step(x, blocks):
        def loss(x, blocks):
            return jnp.mean(functools.reduce(_attention, blocks, x).astype(jnp.float32) ** 2)

        return jax.grad(jc.checkpoint(loss, jc.recipes.transformer(bits=2)), (0, 1))(x, blocks)

    x = jax.ShapeDtypeStruct((1, 4096, 256), jnp.bfloat16)
    weights = {"qkv": jax.ShapeDtypeStruct((256, 768), x.dtype)}
    fewer, more = (
        analyze(step, x, [weights] * count, target="h100", xla_remat=False) for count in (3, 6)
    )
    declared, compiled = (
        (getattr(more, figure) - getattr(fewer, figure)) / 3
        for figure in ("declared_residual_bytes", "temp_bytes")
    )
    _print(capsys, "long attention, 2 bits", declared, compiled)
    assert compiled <= 1.1 * declared


@pytest.mark.aot
@pytest.mark.parametrize("action", [jc.Offload(jc.Quantize(8)), "offload"])
def test_h100_keeps_nothing_of_what_is_offloaded(action, capsys):
    """Sums over a cotangent, such as a bias's gradient, do not wait for the end either."""
    pytest.importorskip("jax_cuda13_plugin")

    def block(x, weights, bias):
        return jnp.sin(x @ weights + bias[None])

    def step(x, blocks):
        def loss(x, blocks):
            for weights, bias in blocks:
                x = block(x, weights, bias)
            return jnp.sum(x**2)

        return jax.grad(jc.checkpoint(loss, jc.Policy((jc.Rule(action),))), (0, 1))(x, blocks)

    x, width = jax.ShapeDtypeStruct((8192, 256), jnp.float32), 256
    parameters = tuple(jax.ShapeDtypeStruct(shape, x.dtype) for shape in ((width, width), (width,)))
    fewer, more = (
        analyze(step, x, [parameters] * count, target="h100", xla_remat=False) for count in (4, 8)
    )
    adds = (more.temp_bytes - fewer.temp_bytes) / 4
    _print(capsys, f"{action} in place of 8 MiB a block", 0, adds)
    assert adds <= 2**19
