"""What a compiled step tells about each group: its part of the time, and its working set."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxcomp.memory._targets import resolve
from jaxcomp.planning import Strategy
from jaxcomp.planning._groups import Groups, policy_of
from jaxcomp.planning._probe import probe, trace_scoped
from jaxcomp.planning._problem import Known, make_problem
from jaxcomp.transform._pieces.limits import limits_of

WIDTH, LENGTH, BATCH, DEPTH = 256, 256, 64, 4


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        heads = (part.reshape(*x.shape[:2], 4, -1) for part in jnp.split(self.qkv(x), 3, -1))
        mixed = jax.checkpoint(jax.nn.dot_product_attention)(*heads)
        return self.out(mixed.reshape(x.shape))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = Attention(rngs)

    def __call__(self, x):
        return x + self.attention(self.norm(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List(Block(rngs) for _ in range(DEPTH))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def _make_step(transform, batch):
    model = transform(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))
    gradient = nnx.grad(lambda model, x: jnp.square(model(x)).mean())
    return nnx.jit(gradient), (model, jax.ShapeDtypeStruct((batch, LENGTH, WIDTH), jnp.float32))


@pytest.mark.parametrize("target", ["cpu", pytest.param("h100", marks=pytest.mark.aot)])
@limits_of(slice_nbytes=2**22)
def test_loops_of_equal_blocks_and_working_sets_of_their_choices(target):
    """XLA merges the bodies of equal loops; scores are computed whole only in the plain step."""
    if target == "h100":
        pytest.importorskip("jax_cuda13_plugin")
    where = resolve(target)
    traced, models = trace_scoped(_make_step, Strategy.parse("plain"), BATCH, where)
    groups = Groups.of(models, traced)
    plain = probe(traced, where, None, groups, xla_remat=False)
    names = sorted({*plain.saved, *plain.seconds_of})

    def choices(start):
        return {name: "bits=4" if name.startswith(start) else "keep" for name in names}

    def coded(assignment):
        strategy = Strategy.of(policy_of(assignment, False))
        step, _ = trace_scoped(_make_step, strategy, BATCH, where)
        return probe(step, where, None, groups, xla_remat=True)

    quantized = coded(choices(""))
    attentions = [quantized.seconds_of[f"blocks/{i}/attention"] for i in range(DEPTH)]
    assert max(attentions) < 1.2 * min(attentions)
    assert quantized.seconds_of[""] < 0.05 * quantized.seconds
    problem = make_problem(Known(plain, {4: quantized}, False, {}, None, True), {}, where)
    half = choices(("blocks/0", "blocks/1"))
    steps = [(choices("none"), plain), (choices(""), quantized), (half, coded(half))]
    for assignment, step in steps:
        assert problem.peak(assignment)[0] == pytest.approx(step.report.total_bytes, rel=0.06)
        assert problem.seconds(assignment) == pytest.approx(step.seconds, rel=0.02)
    assert " of blocks/" in plain.peak()[0]
