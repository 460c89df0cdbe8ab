"""What the codecs promise is what XLA's buffer assignment comes to; nothing is run."""

import typing

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp.memory import MemoryReport, analyze
from jaxcomp.models import resnet


class Stage(nnx.Module):
    """Bottleneck blocks of one shape; they are all that a training step of it keeps."""

    def __init__(self, blocks: int, width: int, rules: tuple[jc.Rule, ...], dtype: typing.Any):
        layers = resnet.Layers(dtype, nnx.Rngs(0))
        shape = 4 * width, width, 1
        self.blocks = nnx.List(
            [resnet.Bottleneck(layers, *shape, resnet.Projection) for _ in range(blocks)]
        )
        jc.apply(self, rules)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def _report(
    spec: str, blocks: int, batch: int, size: int, width: int, dtype: typing.Any, target: str
) -> MemoryReport:
    """Of a step of gradient descent on a stage."""
    rules = jc.recipes.from_spec(spec)
    model = nnx.eval_shape(lambda: Stage(blocks, width, rules, dtype))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def step(params: nnx.State, rest: nnx.State, x: jax.Array) -> typing.Any:
        def loss(params: nnx.State, x: jax.Array) -> typing.Any:
            merged = nnx.merge(graphdef, params, rest, copy=True)
            value = (merged(x).astype(jnp.float32) ** 2).mean()
            return value, nnx.state(merged, nnx.BatchStat)

        (_, new), (dparams, dx) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return jax.tree.map(lambda p, d: p - 0.1 * d, params, dparams), new, dx

    x = jax.ShapeDtypeStruct((batch, size, size, 4 * width), dtype)
    jitted = jax.jit(step, donate_argnums=(0, 1), compiler_options=jc.compiler_options())
    return analyze(jitted, params, rest, x, target=target, xla_remat=False)


def _stored_by_block(codec: jc.Codec, batch: int, size: int, width: int, dtype: typing.Any) -> int:
    """Bytes that one more bottleneck block stores, from its layers' shapes alone.

    Weights and scales count too: what waits is their copy in the dtype of the computation.
    """

    def shape(channels: int) -> tuple[int, ...]:
        return batch, size, size, channels

    narrow, wide = shape(width), shape(4 * width)
    convs = [wide, narrow, narrow]  # the layers' inputs
    norms = [narrow, narrow, wide]
    coded = sum(codec.nbytes(x, dtype) for x in convs + norms)
    masks = sum(jc.Packed(bits=1).nbytes(x, jnp.bool) for x in norms)
    statistics = sum(2 * 4 * x[-1] for x in norms)  # mean and variance in float32
    weights = 4 * width * width + 9 * width * width + width * 4 * width
    scales = sum(x[-1] for x in norms)
    return coded + masks + statistics + (weights + scales) * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize("bits", [2, 4])
def test_h100_keeps_what_a_block_declares(bits: int, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax_cuda13_plugin")
    batch, size, width, dtype = 16, 56, 64, jnp.bfloat16
    declared = _stored_by_block(jc.Quantize(bits=bits), batch, size, width, dtype)
    two, three = (
        _report(f"quantize:bits={bits}", blocks, batch, size, width, dtype, "h100")
        for blocks in (2, 3)
    )
    assert three.declared_residual_bytes - two.declared_residual_bytes == declared
    added = three.temp_bytes - two.temp_bytes  # the peak field moves by the outputs' place too
    with capsys.disabled():
        print(
            f"\nh100, quantize:bits={bits}: a block declares {declared / 2**20:.2f} MiB, "
            f"adds {added / 2**20:.2f} MiB ({added / declared:.3f})"
        )
    assert added <= 1.1 * declared


def test_cpu_temp_falls() -> None:
    size = {"batch": 8, "size": 16, "width": 8, "dtype": jnp.float32, "target": "cpu"}
    two, four, plain = (
        _report(spec, 3, **size).temp_bytes
        for spec in ("quantize:bits=2", "quantize:bits=4", "exact")
    )
    assert two < four < plain
