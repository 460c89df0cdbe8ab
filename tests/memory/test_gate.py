"""What the codecs promise is what XLA's buffer assignment comes to; nothing is run."""

import typing

import jax.numpy as jnp
import pytest

import jaxcomp as jc
from experiments.bench.stage import step_factory
from jaxcomp.memory import MemoryReport, analyze
from jaxcomp.planning import Strategy


def _report(spec: str, blocks: int, batch: int, target: str, **stage: typing.Any) -> MemoryReport:
    """Of a step of gradient descent on bottleneck blocks, which are all that it keeps."""
    step, arguments = step_factory(blocks, **stage)(Strategy.parse(spec), batch)
    return analyze(step, *arguments, target=target, xla_remat=False)


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


@pytest.mark.aot
@pytest.mark.parametrize("bits", [2, 4])
def test_h100_keeps_what_a_block_declares(bits: int, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax_cuda13_plugin")
    batch, stage = 16, {"size": 56, "width": 64, "dtype": jnp.bfloat16}
    declared = _stored_by_block(jc.Quantize(bits=bits), batch, **stage)
    two, three = (
        _report(f"quantize:bits={bits}", blocks, batch, "h100", **stage) for blocks in (2, 3)
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
    stage = {"size": 16, "width": 8, "dtype": jnp.float32}
    two, four, plain = (
        _report(spec, 2, 8, "cpu", **stage).temp_bytes
        for spec in ("quantize:bits=2", "quantize:bits=4", "plain")
    )
    assert two < four < plain


def _saves_half_a_result(
    of: str, reports: dict[str, MemoryReport], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two reports, the second needs less, by half of what a block of 16 samples returns."""
    value = 16 * 56 * 56 * 256 * 2
    (before, first), (after, second) = ((n, r.temp_bytes) for n, r in reports.items())
    with capsys.disabled():
        print(
            f"\nh100, {of}, {before}: {first / 2**20:.1f} MiB, {after} {second / 2**20:.1f}, "
            f"a block's result {value / 2**20:.1f}"
        )
    assert second < first - value / 2


@pytest.mark.aot
def test_a_tpus_step_needs_half_of_plains_and_less_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What reads a code decodes it there, so that no cotangent is written for it."""
    stage = {"size": 56, "width": 64, "dtype": jnp.bfloat16}
    plain, fused = (_report(spec, 4, 128, "v5e", **stage) for spec in ("plain", "fused:bits=4"))
    assert plain.estimated_cycles is not None and fused.estimated_cycles is not None
    cycles = fused.estimated_cycles / plain.estimated_cycles
    with capsys.disabled():
        print(
            f"\nv5e, four blocks, fused:bits=4: temp {fused.temp_bytes / 2**20:.1f} MiB (plain "
            f"{plain.temp_bytes / 2**20:.1f}), {cycles:.3f} times plain's estimated cycles"
        )
    assert fused.temp_bytes < 0.45 * plain.temp_bytes
    assert cycles < 0.95
