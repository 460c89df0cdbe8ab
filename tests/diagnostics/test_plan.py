import functools
import pathlib

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp.memory import declared_residual_bytes
from jaxcomp.models import resnet
from tests.helpers import slow, without_type_checks

X = jax.ShapeDtypeStruct((16, 28, 28, 1), jnp.float32)


def create(spec):
    """The shapes of a network of three stages; none of its parameters is computed."""
    return nnx.eval_shape(
        lambda: resnet.create(
            "resnet8", num_classes=10, in_channels=1, policy=spec, rngs=nnx.Rngs(0)
        )
    )


@functools.cache
def plan_of(spec):
    return jc.plan(create(spec), X)


@pytest.mark.parametrize(
    "spec", [slow("exact"), "quantize:bits=2", "fused:bits=4", slow("division")]
)
def test_sums_are_what_the_program_declares(spec):
    found = plan_of(spec)
    graphdef, state = nnx.split(create(spec))

    def run(state, x):
        return nnx.merge(graphdef, state, copy=True)(x)

    assert found.saved_bytes == declared_residual_bytes(run, state, X)
    assert (found.saved_bytes == found.exact_bytes) == (spec == "exact")


def test_average_bits_are_exact():
    codec = jc.Quantize(bits=2)
    found = plan_of("quantize:bits=2")
    coded = [m for m in found.values if m.decision == str(codec) and m.saved_bytes]
    shapes = {  # of a block's input by the number of its elements
        size: (16, n, n, c)
        for size, n, c in ((16 * n * n * c, n, c) for n, c in ((28, 16), (14, 32), (7, 64)))
    }
    for m in coded[:-1]:
        statistics = 2 * 4 * shapes[m.elements][-1] if m.op == "batch_norm" else 0
        assert m.saved_bytes == codec.nbytes(shapes[m.elements], X.dtype) + statistics
    bits = 8 * sum(m.saved_bytes for m in coded) / sum(m.elements for m in coded)
    assert found.bits_per_element == bits


def test_units_are_listed_with_what_they_cover():
    rows = {m.path: m for m in plan_of("fused:bits=4").values}
    assert "blocks/0/unit1/norm" not in rows
    unit = rows["blocks/0/unit1"]
    assert (unit.op, unit.elements) == ("norm_act", 16 * 28 * 28 * 16)
    assert 4 < 8 * unit.saved_bytes / unit.elements < 4.1


class Mixed(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = jc.nn.Conv(4, 4, (1, 1), codec=jc.Quantize(bits=2), rngs=rngs)
        self.norm = nnx.GroupNorm(4, num_groups=2, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.conv(x))


def test_elements_of_a_unit_are_those_that_it_has_codes_for():
    rngs = nnx.Rngs(0)
    norms = [jc.nn.BatchNorm(8, rngs=rngs) for _ in range(3)]
    pool = jc.nn.MaxPool((2, 2), (2, 2))
    pooled = jc.nn.NormAct(norms[0], pool=pool, codec=jc.SignAware(4))
    added = jc.nn.NormAct(norms[1], residual_norm=norms[2], codec=jc.SignAware(4))
    x = jax.ShapeDtypeStruct((16, 8, 8, 8), jnp.float32)
    (found,) = (m for m in jc.plan(pooled, x).values if m.op == "norm_act")
    assert found.elements == 16 * 8 * 8 * 8 * 5 // 4
    assert found.saved_bytes == pytest.approx(16 * 8 * 8 * 8 * 6 // 4 / 2, rel=0.05)
    (found,) = (m for m in jc.plan(added, x, x).values if m.op == "norm_act")
    assert found.elements == 2 * 16 * 8 * 8 * 8
    assert found.saved_bytes == pytest.approx(3 * 16 * 8 * 8 * 8 / 2, rel=0.05)


def test_a_layer_of_flax_is_listed_as_exact_with_its_source_line():
    x = jax.ShapeDtypeStruct((2, 8, 8, 4), jnp.float32)
    found = jc.plan(Mixed(), x)
    (left,) = (v for v in found.values if v.decision == "exact")
    assert (left.path, left.op) == ("norm", "GroupNorm")
    assert left.exact_bytes == left.saved_bytes > 0
    assert all(v.source.startswith("test_plan.py:") for v in found.values)
    total = f"{found.saved_bytes:,} bytes are saved, {found.exact_bytes:,} without compression"
    assert total in str(found)
    assert "outside of layers of jaxcomp.nn: norm" in str(found)
    assert "outside of layers" not in str(plan_of("quantize:bits=2"))


def test_a_stock_model_and_its_compressed_form_have_one_table():
    model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.sin)
    x = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    before = jc.plan(model, x)
    after = jc.plan(jc.compress(model, "quantize:bits=4"), x)
    assert before.saved_bytes == before.exact_bytes == after.exact_bytes == 4 * 512 * 64
    assert after.saved_bytes == jc.Quantize(bits=4).nbytes((512, 64), jnp.float32)
    assert after.bits_per_element == pytest.approx(4, abs=1.1)


def test_functions_of_arrays_have_a_plan():
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 64), (64, 64)))

    def layer(x, *, w):
        return jnp.sin(x @ w)

    (exact,) = jc.plan(layer, x, w=w).values
    assert (exact.shape, exact.dtype, exact.decision) == (x.shape, "float32", "exact")
    assert exact.source.startswith("test_plan.py:")
    (coded,) = jc.plan(jc.checkpoint(layer, jc.Quantize(2)), x, w=w).values
    assert (coded.role, coded.decision) == ("derivative", str(jc.Quantize(2)))
    with without_type_checks(), pytest.raises(TypeError, match="model_or_fn=3: expected a model"):
        jc.plan(3, x)
    with pytest.raises(ValueError, match="no gradient"):
        jc.plan(lambda n: jax.lax.while_loop(lambda n: n < 9, lambda n: n + 1, n), 3.0)


def test_in_evaluation_nothing_is_coded():
    assert plan_of("fused:bits=4").saved_bytes < plan_of("fused:bits=4").exact_bytes
    model = create("fused:bits=4")
    model.eval()
    found = jc.plan(model, X)
    assert found.saved_bytes == found.exact_bytes


def test_paths_may_be_any_text():
    def linear():
        return jc.nn.Linear(4, 4, codec=jc.Quantize(bits=2), rngs=nnx.Rngs(0))

    class Named(nnx.Module):
        def __init__(self):
            self.layers = nnx.Dict({"res-1": linear(), "a.b": linear()})

        def __call__(self, x):
            return self.layers["a.b"](self.layers["res-1"](x))

    found = jc.plan(Named(), jax.ShapeDtypeStruct((8, 4), jnp.float32))
    assert [m.path for m in found.values] == ["layers/res-1", "layers/a.b"]


class StockBlock(nnx.Module):
    def __init__(self, rngs):
        self.conv1, self.conv2 = (nnx.Conv(8, 8, (3, 3), rngs=rngs) for _ in range(2))
        self.norm1, self.norm2 = (nnx.BatchNorm(8, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        y = self.norm1(self.conv1(x))
        y = self.norm2(self.conv2(nnx.relu(y)))
        return nnx.relu(x + y)


class StockNet(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.blocks = nnx.List(StockBlock(rngs) for _ in range(3))

    def __call__(self, x):
        x = nnx.relu(self.norm(self.stem(x)))
        x = nnx.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        for block in self.blocks:
            x = block(x)
        return x


def line(text):
    """Where this file has a text."""
    lines = pathlib.Path(__file__).read_text().splitlines()
    return f"test_plan.py:{1 + next(i for i, line in enumerate(lines) if text in line)}"


def test_the_table_has_a_row_for_repeated_blocks_and_says_what_reads_exact_values():
    policy = jc.Policy((jc.Rule(jc.Quantize(4), min_size=2**14),))  # no codes of max pools
    model = jc.compress(StockNet(nnx.Rngs(0)), policy)
    found = jc.plan(model, jax.ShapeDtypeStruct((16, 32, 32, 3), jnp.float32))
    table = str(found).splitlines()
    masks = sorted((v.path, v.source) for v in found.values if v.role == "mask" and "/" in v.path)
    lines = line("self.conv2(nnx" + ".relu(y)"), line("return nnx" + ".relu(x + y)")
    assert masks == sorted((f"blocks/{i}", at) for i in range(3) for at in lines)
    (largest,) = [v for v in found.values if v.decision == "exact" and v.elements > 8]
    assert "read by self.norm" in largest.note
    assert f"nnx.max_pool, {line('nnx' + '.max_pool(x, (3')}" in largest.note
    assert largest.note in table[1]
    (row,) = [one for one in table if one.startswith("blocks/*/conv1")]
    assert " x 3 " in row
    assert len(table) < len(found.values)
    size = table[0].index("saved") + len("saved")
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20}
    saved = [
        float(number) * units[unit]
        for number, unit in (row[:size].split()[-2:] for row in table[1:] if "iB" in row)
    ]
    assert saved == sorted(saved, reverse=True)
    assert not [v for v in found.values if v.source and not v.source.startswith("test_plan.py")]


def test_a_function_that_encodes_inside_shows_what_it_saves():
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 64), (64, 64)))
    model = jc.compress(
        nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.sin), "quantize:bits=4"
    )
    layer = jc.checkpoint(lambda x, w: jnp.sin(x @ w), jc.Quantize(4))
    whole = jc.plan(model, x), jc.plan(layer, x, w)
    calls = jc.plan(lambda x: model(x).sum(), x), jc.plan(jax.jit(lambda x, w: layer(x, w=w)), x, w)
    for one, inside in zip(whole, calls, strict=True):
        assert (inside.saved_bytes, inside.exact_bytes) == (one.saved_bytes, one.exact_bytes)
        assert {value.decision for value in inside.values} == {"code"}
    nothing = jax.checkpoint_policies.nothing_saveable
    again = jc.checkpoint(lambda x, w: jnp.sin(x @ w), nothing)
    of_call = jc.plan(lambda x, w: again(x, w) * 2.0, x, w)
    assert (of_call.saved_bytes, of_call.exact_bytes) == (0, jc.plan(again, x, w).exact_bytes)
    found = jc.plan(jax.grad(lambda x, w: layer(x, w).sum(), (0, 1)), x, w)
    assert found.saved_bytes == whole[1].saved_bytes
    assert "the bytes without compression are unknown" in str(found)
