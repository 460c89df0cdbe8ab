import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp import storage
from jaxcomp.memory import declared_residual_bytes
from jaxcomp.models import resnet

X = jax.ShapeDtypeStruct((16, 28, 28, 1), jnp.float32)


def create(spec):
    rules = jc.recipes.from_spec(spec)
    return resnet.create("resnet20", num_classes=10, in_channels=1, rules=rules, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("spec", ["exact", "quantize:bits=2", "fused:bits=4", "division"])
def test_sums_are_what_the_program_declares(spec):
    model = create(spec)
    found = storage(model, X)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def run(params, x):
        return nnx.merge(graphdef, params, rest, copy=True)(x)

    assert found.stored_bytes == declared_residual_bytes(run, params, X)
    assert (found.stored_bytes == found.exact_bytes) == (spec == "exact")


def test_average_bits_are_exact():
    found = storage(create("quantize:bits=2"), X)
    coded = [m for m in found.modules if isinstance(m.codec, jc.Quantize) and m.stored_bytes]
    shapes = {  # of a block's input by the number of its elements
        size: (16, n, n, c)
        for size, n, c in ((16 * n * n * c, n, c) for n, c in ((28, 16), (14, 32), (7, 64)))
    }
    for m in coded[:-1]:
        statistics = 2 * 4 * shapes[m.elements][-1] if m.op == "batch_norm" else 0
        assert m.stored_bytes == m.codec.nbytes(shapes[m.elements], X.dtype) + statistics
    bits = 8 * sum(m.stored_bytes for m in coded) / sum(m.elements for m in coded)
    assert found.bits_per_element == bits
    assert f"{bits:.3f} bits for a coded element, metadata included" in str(found)


def test_units_are_listed_with_what_they_cover():
    rows = {m.path: m for m in storage(create("fused:bits=4"), X).modules}
    assert "blocks/0/unit1/norm" not in rows
    unit = rows["blocks/0/unit1"]
    assert (unit.op, unit.elements) == ("norm_act", 16 * 28 * 28 * 16)
    assert 4 < 8 * unit.stored_bytes / unit.elements < 4.1


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
    (found,) = (m for m in jc.storage(pooled, x).modules if m.op == "norm_act")
    assert found.elements == 16 * 8 * 8 * 8 * 5 // 4
    assert found.stored_bytes == pytest.approx(16 * 8 * 8 * 8 * 6 // 4 / 2, rel=0.05)
    (found,) = (m for m in jc.storage(added, x, x).modules if m.op == "norm_act")
    assert found.elements == 2 * 16 * 8 * 8 * 8
    assert found.stored_bytes == pytest.approx(3 * 16 * 8 * 8 * 8 / 2, rel=0.05)


def test_elements_of_a_residuals_norm_are_those_that_its_shortcut_makes():
    rngs = nnx.Rngs(0)
    norms = [jc.nn.BatchNorm(16, rngs=rngs) for _ in range(2)]
    unit = jc.nn.NormAct(norms[0], residual_norm=norms[1], codec=jc.SignAware(4))
    shortcut = jc.nn.Conv(8, 16, (1, 1), strides=2, rngs=rngs)
    x, residual = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 4, 4, 16), (16, 8, 8, 8)))
    (found,) = (m for m in jc.storage(unit, x, residual, shortcut).modules if m.op == "norm_act")
    assert found.elements == 2 * 16 * 4 * 4 * 16
    assert found.stored_bytes == pytest.approx(3 * 16 * 4 * 4 * 16 / 2, rel=0.05)


def test_a_layer_without_a_coded_form_is_listed_and_an_error_if_strict():
    x = jax.ShapeDtypeStruct((2, 8, 8, 4), jnp.float32)
    found = storage(Mixed(), x)
    (left,) = (m for m in found.modules if m.codec is None)
    assert (left.path, left.op) == ("norm", "GroupNorm")
    share = left.stored_bytes / found.stored_bytes
    with pytest.raises(ValueError, match=rf"norm \(GroupNorm\) {share:.1%}"):
        storage(Mixed(), x, strict=True)


def test_in_evaluation_nothing_is_coded():
    model = create("fused:bits=4")
    assert storage(model, X).stored_bytes < storage(model, X).exact_bytes
    model.eval()
    found = storage(model, X)
    assert found.stored_bytes == found.exact_bytes


def test_paths_may_be_any_text():
    def linear():
        return jc.nn.Linear(4, 4, codec=jc.Quantize(bits=2), rngs=nnx.Rngs(0))

    class Named(nnx.Module):
        def __init__(self):
            self.layers = nnx.Dict({"res-1": linear(), "a.b": linear()})

        def __call__(self, x):
            return self.layers["a.b"](self.layers["res-1"](x))

    found = storage(Named(), jax.ShapeDtypeStruct((8, 4), jnp.float32))
    assert [m.path for m in found.modules] == ["layers/res-1", "layers/a.b"]
