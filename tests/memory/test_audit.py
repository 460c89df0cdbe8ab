"""The audit of compressed steps with known faults."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxcomp.memory.audit import (
    DECODED_EARLY,
    ENCODED_LATE,
    NEIGHBOUR,
    NOT_COMPRESSED,
    audit,
)
from jaxcomp.memory.compiling import compile_step
from jaxcomp.memory.live_bytes import Buffer, Origin, Timeline, read_timeline, timeline
from jaxcomp.memory.targets import resolve
from jaxcomp.memory.tracing import trace

LAYERS, X = 12, jnp.ones((4096, 64))
WEIGHTS = [jnp.ones((64, 64))] * LAYERS
PLAIN, CODED = LAYERS * X.nbytes, LAYERS * X.nbytes // 8  # float32 against 4 bits


def encode(x):
    with jax.named_scope("jaxcomp/quantize"):
        return (x * 3).astype(jnp.uint4)


def compressed(fn, barriers):
    @jax.custom_vjp
    def op(x, w):
        return fn(x, w)

    def forward(x, w):
        out, code = fn(x, w), encode(x)
        if barriers:
            out, code = lax.optimization_barrier((out, code))
        return out, (code, w)

    def backward(residual, g):
        code, w = residual
        if barriers:
            code, g = lax.optimization_barrier((code, g))
        with jax.named_scope("jaxcomp/quantize"):
            x = code.astype(g.dtype) / 3
        return jax.vjp(fn, x, w)[1](g)

    op.defvjp(forward, backward)
    return op


def product(x, w):
    return jnp.sin(x @ w)


def loss(weights, x, op=product):
    for k in range(LAYERS):
        with jax.named_scope(f"layer{k}"):
            x = op(x, weights[k])
    return jnp.mean(x**2)


def for_cpu(loss):
    return timeline(jax.jit(jax.value_and_grad(loss)), WEIGHTS, X)


def test_a_code_without_barriers_keeps_full_tensors_and_the_audit_says_why():
    bad = for_cpu(functools.partial(loss, op=compressed(product, barriers=False)))
    result = audit(for_cpu(loss), bad, plain_declared_bytes=PLAIN, compressed_declared_bytes=CODED)
    assert not result.agrees
    assert result.declared_saving == PLAIN - CODED
    full = [k for k in result.kept if k.buffer.bytes >= X.nbytes]
    at_fault = [k for k in full if k.reason in (ENCODED_LATE, DECODED_EARLY)]
    assert len(at_fault) >= LAYERS - 1 and len(at_fault) > 0.8 * len(full)
    assert any(k.buffer.origin.scope.startswith("layer1") for k in full)
    assert "optimization_barrier" in str(result) and __file__ in str(result)


def test_on_an_h100_barriers_leave_no_full_tensor_waiting(tmp_path):
    try:
        h100 = resolve("h100")
    except ImportError as error:
        pytest.skip(str(error))

    def compiled(name, step):
        folder = tmp_path / name
        program = compile_step(trace(jax.value_and_grad(step), WEIGHTS, X), h100, dump_dir=folder)
        return read_timeline(folder, program.hlo_text)

    good = functools.partial(loss, op=compressed(product, barriers=True))
    result = audit(
        compiled("plain", loss),
        compiled("good", good),
        plain_declared_bytes=PLAIN,
        compressed_declared_bytes=CODED,
    )
    assert result.compiled_saving > 0
    assert [k for k in result.kept if k.buffer.bytes >= X.nbytes] == [], str(result)


def made(name, scope, phase, start, end, reads=(), size=1000, shape="bf16[500]"):
    """A buffer at a place of its own."""
    origin = Origin(scope, "mul", phase, "model.py:7")
    return Buffer(name, size, shape, origin, start, end, reads, hash(name), 0)


def step_of(*buffers, encodes=()):
    """A program of four forward and four backward points."""
    live = [sum(b.bytes for b in buffers if b.start <= p <= b.end) for p in range(8)]
    return Timeline(
        points=tuple(f"i{p}" for p in range(8)),
        phases=("forward",) * 4 + ("backward",) * 4,
        encodes=tuple(p in encodes for p in range(8)),
        live_bytes=tuple(live),
        buffers=buffers,
        backward_start=4,
    )


PLAIN_STEP = step_of(made("a", "a", "forward", 0, 7, (7,)), made("b", "b", "forward", 1, 6, (6,)))
CODE = made("code", "a/jaxcomp/quantize", "forward", 1, 6, (6,), size=100, shape="u4[200]")


@pytest.mark.parametrize(
    "kept, encodes, reason",
    [
        (made("x", "a", "forward", 0, 5, (5,)), (5,), ENCODED_LATE),
        (made("x", "a/jaxcomp/quantize", "backward", 2, 6, (6,)), (), DECODED_EARLY),
        (made("x", "a", "forward", 0, 6, (6,)), (), NEIGHBOUR),
        (made("x", "b", "forward", 0, 6, (6,)), (), NOT_COMPRESSED),
    ],
)
def test_reasons(kept, encodes, reason):
    reader = made("grad", "b", "backward", kept.reads[0], 7, size=10)
    result = audit(
        PLAIN_STEP,
        step_of(CODE, kept, reader, encodes=encodes),
        plain_declared_bytes=2000,
        compressed_declared_bytes=100,
    )
    assert [(k.buffer, k.reason) for k in result.kept] == [(kept, reason)]
    assert result.kept[0].consumers == ("b · mul",)
    assert reason in str(result) and "model.py:7" in str(result)


def test_the_shortfall_is_split_without_rest():
    kept = made("x", "a", "forward", 0, 6, (6,))
    result = audit(
        PLAIN_STEP, step_of(CODE, kept), plain_declared_bytes=2600, compressed_declared_bytes=100
    )
    assert (result.declared_saving, result.compiled_saving) == (2500, 900)
    parts = result.plain_not_kept, result.compressed_not_declared, result.other_at_peak
    assert parts == (600, 1000, 0)
    assert sum(parts) == result.declared_saving - result.compiled_saving


def test_a_delivered_saving_needs_no_list():
    result = audit(
        PLAIN_STEP, step_of(CODE), plain_declared_bytes=2000, compressed_declared_bytes=100
    )
    assert result.agrees and result.kept == ()
    assert str(result).endswith("agrees")


def test_bad_input():
    forward = Timeline(("i",), ("forward",), (False,), (0,), (), None)
    with pytest.raises(ValueError, match="compressed: expected the timeline of a training step"):
        audit(PLAIN_STEP, forward, plain_declared_bytes=1, compressed_declared_bytes=1)
    with pytest.raises(ValueError, match="plain_declared_bytes: expected bytes, at least 0"):
        audit(PLAIN_STEP, PLAIN_STEP, plain_declared_bytes=-1, compressed_declared_bytes=1)
    with pytest.raises(ValueError, match="tolerance: expected a number from 0 to 1"):
        audit(
            PLAIN_STEP,
            PLAIN_STEP,
            plain_declared_bytes=1,
            compressed_declared_bytes=1,
            tolerance=20.0,
        )
