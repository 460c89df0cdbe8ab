import json

import jax
import jax.numpy as jnp

from experiments.bench import kernels
from jaxcomp.memory._costs import costs

SIZE = 512


def coded_step(*_):
    """A step with a product, a kernel that writes a code, and one without codes."""

    @jax.jit
    def step(state, x):
        code = jnp.round(jnp.tanh(x @ state) * 100).astype(jnp.int8)
        return state + 1e-3, code

    shape = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
    return step, (shape, shape)


def field(number, value):
    """A field of a protocol buffer: an integer, or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value):
    head = bytes([value & 127 | (128 if value > 127 else 0)])
    return head + varint(value >> 7) if value > 127 else head


def space(plane, line, events):
    """A profile of one plane with one line; events are names and nanoseconds."""
    names = sorted({name for name, _ in events})
    known = b"".join(
        field(4, field(1, k) + field(2, field(1, k) + field(2, name.encode())))
        for k, name in enumerate(names, 1)
    )
    made = b"".join(
        field(4, field(1, names.index(name) + 1) + field(3, 1000 * duration))
        for name, duration in events
    )
    lines = field(3, field(1, 1) + field(2, line.encode()) + made)
    return field(1, field(1, 1) + field(2, plane.encode()) + lines + known)


def test_durations_are_those_of_the_kernels_of_gpus():
    events = [("a", 5), ("b", 7), ("a", 6)]
    gpu = space("/device:GPU:0", "Stream #13(Compute)", events)
    others = space("/device:GPU:0", "XLA Modules", events) + space("/host:CPU", "Stream", events)
    assert kernels.durations(gpu + others) == {"a": (2, 11), "b": (1, 7)}


def _arrays(shapes):
    state, *arrays = (jnp.ones(shape.shape, shape.dtype) for shape in shapes)
    return state, arrays


def test_kernels_are_joined_with_the_bytes_of_their_instructions(tmp_path):
    step, shapes = coded_step()
    program = step.lower(*shapes).compile()
    text = program.as_text()
    trace = kernels.profiled(program, *_arrays(shapes))
    assert kernels.durations(trace) == {}  # a CPU has none
    names = [c.instruction.name.replace(".", "_") for c in costs(text) if c.kernels]
    names += ["of_a_library", "rows__3"]
    profile = {name: (2 * kernels.STEPS, 1e6 * kernels.STEPS) for name in names}
    rows = {"plain": kernels.kernels(text, profile)}
    content = {"model": "small", "devices": ["GPU"], "command": "python"}
    kernels.write(tmp_path, rows, content)
    found = json.loads((tmp_path / "kernels.json").read_text())["rows"]["plain"]
    assert {k["runs"] for k in found} == {2} and {k["milliseconds"] for k in found} == {1}
    nbytes = {kind: {k["nbytes"] for k in found if k["kind"] == kind} for kind in kernels.KINDS}
    array = 4 * SIZE**2
    # Two runs: a product in, a code out. A kernel of rows is known by its name alone.
    assert nbytes[kernels.KINDS[1]] == {2 * (array + SIZE**2), 0}
    assert nbytes[kernels.KINDS[2]] == {2 * 2 * array}
    assert 0 in nbytes[kernels.KINDS[0]]  # the library's
    table = (tmp_path / "kernels.md").read_text()
    assert "| plain | kernels that read or write codes | 4 | 2.00 |  |  |" in table
    assert "| plain | other fused kernels | 2 | 1.00 | 0.00 |" in table
