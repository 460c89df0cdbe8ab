"""The timeline against XLA's own figures, and its names against the program that was compiled."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax

from jaxcomp import compress
from jaxcomp.memory._buffer import group
from jaxcomp.memory._buffer_assignment import dump_options, no_compilation_cache
from jaxcomp.memory._compiling import compile_step
from jaxcomp.memory._live_bytes import format_bytes, read_timeline, timeline
from jaxcomp.memory._targets import resolve
from jaxcomp.memory._tracing import trace
from tests.helpers import OPTIMIZED

WEIGHTS, X = jnp.ones((3, 64, 64)), jnp.ones((512, 64))


def loss(weights, x):
    for k in range(3):
        with jax.named_scope(f"layer{k}"):
            x = jnp.sort(x @ weights[k])  # nothing fuses across a sort
    return jnp.mean(x**2)


def scanned(weights, x):
    def layer(x, w):
        with jax.named_scope("cell"):
            return jnp.sin(x @ w), None

    return jnp.mean(lax.scan(layer, x, weights)[0] ** 2)


@functools.cache
def of_step():
    return timeline(jax.jit(jax.value_and_grad(loss), compiler_options=OPTIMIZED), WEIGHTS, X)


def test_every_value_that_xla_lists_at_its_peak_is_read(tmp_path):
    lowered = jax.jit(jax.value_and_grad(loss)).lower(WEIGHTS, X)
    with no_compilation_cache():
        compiled = lowered.compile(compiler_options=dump_options(tmp_path, "cpu"))
    t = read_timeline(tmp_path, compiled.as_text(), resolve("cpu"))
    (file,) = tmp_path.glob("*-live-range.txt")
    point = int(re.search(r"Live ranges at (\d+) \(peak\)", file.read_text()).group(1))
    listed = dict(re.findall(r"    (\S+): (\d+) bytes \(cumul", file.read_text()))
    read = {b.name: b.bytes for b in t.buffers if b.start <= point <= b.end}
    assert read == {name.replace("{}", ""): int(size) for name, size in listed.items() if int(size)}


def test_the_peak_is_what_xla_allocates():
    lowered = jax.jit(jax.value_and_grad(loss)).lower(WEIGHTS, X)
    stats = lowered.compile(OPTIMIZED).memory_analysis()
    allocated = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    # XLA also pads for alignment and may leave gaps; constants are not in its three figures.
    assert 0.9 * allocated <= of_step().peak_bytes <= allocated + 1024


def test_bytes_shared_in_place_count_once():
    def grow(x):
        return lax.fori_loop(0, 4, lambda k, x: x.at[k].set(k * 1.0), x)

    t = timeline(jax.jit(grow, donate_argnums=0), jnp.ones((1024, 256)))
    assert t.peak_bytes < 1.5 * 1024 * 256 * 4


def test_values_are_named_by_scope_pass_and_source_line():
    t = of_step()
    kept = [
        b for b in t.alive(t.backward_start) if b.bytes >= X.nbytes and b.origin.phase != "other"
    ]
    forward = {b.origin.scope for b in kept if b.origin.phase == "forward"}
    assert {"layer0", "layer1", "layer2"} <= forward
    lines = {b.origin.source for b in kept if b.origin.phase == "forward"}
    with open(__file__) as file:
        sorts = [k for k, line in enumerate(file, 1) if "nothing fuses across a sort" in line]
    assert f"{__file__}:{sorts[0]}" in lines
    assert {b.origin.scope for b in t.buffers if b.origin.phase == "argument"} >= {"weights", "x"}
    assert any(b.origin.phase == "backward" for b in t.buffers)


def test_the_backward_pass_starts_between_the_passes():
    t = of_step()
    before, after = t.phases[: t.backward_start], t.phases[t.backward_start :]
    assert before.count("forward") > 3 * before.count("backward")
    assert after.count("backward") > 3 * after.count("forward")
    assert timeline(jax.jit(loss), WEIGHTS, X).backward_start is None


def test_the_backward_pass_of_the_first_micro_batch_starts_first():
    def step(weights, x):
        total = jax.tree.map(jnp.zeros_like, weights)
        for part in jnp.split(x, 4):
            part, total = jax.lax.optimization_barrier((part, total))
            total = jax.tree.map(jnp.add, total, jax.grad(loss)(weights, part))
        return total

    options = {"xla_disable_hlo_passes": "cse_barrier_expander"}
    t = timeline(jax.jit(step, compiler_options=options), WEIGHTS, X, target="cpu")
    first = t.phases.index("backward", t.phases.index("forward"))
    assert first <= t.backward_start < len(t.points) / 2
    assert "forward" in t.phases[2 * t.backward_start :]  # of later micro-batches


def test_readers_of_a_value_come_while_it_is_alive():
    t = of_step()
    assert any(b.reads for b in t.buffers)
    assert all(b.start <= r <= b.end for b in t.buffers for r in b.reads)


def test_residuals_stacked_by_a_scan_are_named_by_the_scope_inside():
    t = timeline(jax.jit(jax.value_and_grad(scanned)), WEIGHTS, X)
    stacks = [b for b in t.alive(t.peak_point) if b.shape == "f32[3,512,64]"]
    assert stacks
    assert {b.origin.scope for b in stacks} == {"cell"}
    assert {b.origin.phase for b in stacks} == {"forward"}


def test_recomputed_values_are_told_from_backward_ones():
    def rematted(weights, x):
        return loss(weights, jax.checkpoint(lambda x: jnp.sort(jnp.sort(x, axis=0)))(x))

    t = timeline(jax.jit(jax.grad(rematted, argnums=1)), WEIGHTS, X)
    assert "recomputed" in t.phases or "recomputed" in {b.origin.phase for b in t.buffers}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(64, 64, rngs=rngs)
        self.second = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        return jnp.sort(self.second(jnp.sort(self.first(x))))


def test_without_scopes_the_nearest_weight_names_the_layer():
    graph, state = nnx.split(Block(nnx.Rngs(0)))

    def step(state):
        return jax.value_and_grad(lambda s: jnp.mean(nnx.merge(graph, s)(X) ** 2))(state)

    t = timeline(jax.jit(step), state)
    scopes = {b.origin.scope for b in t.buffers if b.bytes >= X.nbytes}
    assert {"first", "second"} <= scopes
    with open(__file__) as file:
        lines = [
            k for k, line in enumerate(file, 1) if "self.second(jnp.sort(self.first(x)" in line
        ]
    assert f"{__file__}:{lines[0]}" in {b.origin.source for b in t.buffers}


def test_a_program_in_the_compilation_cache_is_compiled_again(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        jitted = jax.jit(lambda x: jnp.sort(x) + 3)
        jitted.lower(X).compile()
        assert timeline(jitted, X).peak_bytes >= 2 * X.nbytes
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_an_h100_timeline_names_layers(tmp_path):
    try:
        h100 = resolve("h100")
    except ImportError as error:
        pytest.skip(str(error))
    compiled = compile_step(trace(jax.value_and_grad(loss), WEIGHTS, X), h100, dump_dir=tmp_path)
    t = read_timeline(tmp_path, compiled.hlo_text, h100)
    kinds = ("argument", "output", "temp")
    allocated = sum(compiled.memory[f"{kind}_size_in_bytes"] for kind in kinds)
    assert 0.9 * allocated <= t.peak_bytes <= allocated + 1024
    assert {"layer0", "layer1", "layer2"} <= {b.origin.scope for b in t.alive(t.backward_start)}


def test_the_table_lists_the_largest_and_sums_the_rest():
    t = of_step()
    lines = t.table(rows=2).splitlines()
    groups = group(t.alive(t.peak_point))
    assert lines[0].startswith(f"peak {format_bytes(t.peak_bytes)}")
    assert format_bytes(groups[0].buffers[0].bytes) in lines[2] and groups[0].label() in lines[2]
    assert format_bytes(sum(g.bytes for g in groups[2:])) in lines[-1]
    with pytest.raises(ValueError, match="rows: expected at least 1, got 0"):
        t.table(rows=0)


class Blocks(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(32, 7, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.relu(block(x))
        return self.head(x)


def test_buffers_of_an_nnx_step_have_the_names_of_the_model_and_equal_layers_share_a_row():
    model = Blocks()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.sum(model(x)))(model)
        optimizer.update(model, grads)
        return loss

    t = timeline(step, model, optimizer, jax.ShapeDtypeStruct((64, 32), jnp.float32))
    shapes = {b.origin.scope: b.shape for b in t.buffers if b.origin.phase == "argument"}
    assert shapes["model/head/kernel"] == "f32[32,7]" and shapes["x"] == "f32[64,32]"
    assert shapes["optimizer/opt_state/0/trace/blocks/2/kernel"] == "f32[32,32]"
    assert not any("states" in buffer.origin.scope for buffer in t.buffers)
    assert "blocks/1" in {b.origin.scope for b in t.buffers if b.origin.phase == "forward"}
    assert re.search(r"3 x 4.0 KiB +argument +f32\[32,32\] +model/blocks/\*/kernel", t.table())


def test_a_folder_without_a_dump_is_an_error(tmp_path):
    text = jax.jit(jnp.sin).lower(X).compile().as_text()
    with pytest.raises(RuntimeError, match=r"no \*-live-range.txt"):
        read_timeline(tmp_path, text, resolve("cpu"))


@pytest.mark.parametrize(
    "count, text", [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB")]
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


class TwoConvolutions(nnx.Module):
    """Layers of equal shapes, whose encoder JAX traces once."""

    def __init__(self, rngs):
        self.first, self.second, self.last = (
            nnx.Conv(64, 64, (1, 1), use_bias=False, rngs=rngs) for _ in range(3)
        )
        self.norm1, self.norm2 = (nnx.BatchNorm(64, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        x = nnx.relu(self.norm1(self.first(x)))
        x = nnx.relu(self.norm2(self.second(x)))
        return self.last(x)


@pytest.mark.aot
def test_a_code_has_the_module_and_the_line_of_its_layer():
    def step(model, x):
        return nnx.grad(lambda model: (model(x) ** 2).mean())(model)

    model = compress(TwoConvolutions(nnx.Rngs(0)), policy="fused:bits=4")
    x = jax.ShapeDtypeStruct((32, 28, 28, 64), jnp.float32)
    t = timeline(nnx.jit(step), model, x, target="h100")
    with open(__file__) as file:
        lines = {
            f"norm{n}": f"{__file__}:{k}"
            for k, line in enumerate(file, 1)
            for n in (1, 2)
            if f"nnx.relu(self.norm{n}(" in line and "{" not in line
        }
    codes = {b.origin.scope: b.origin.source for b in t.buffers if b.shape == "u4[32,28,28,64]"}
    assert codes == lines
