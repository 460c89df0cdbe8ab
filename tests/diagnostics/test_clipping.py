import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp.diagnostics import _clipping as clipping
from tests.helpers import as_float, normal


class Block(nnx.Module):
    """A unit whose result is added to that of another."""

    def __init__(self):
        self.before = jc.nn.NormAct(jc.nn.BatchNorm(3, rngs=nnx.Rngs(0)), codec=jc.SignAware(4))
        self.first = jc.nn.NormAct(jc.nn.BatchNorm(3, rngs=nnx.Rngs(0)), codec=jc.SignAware(4))
        self.second = jc.nn.NormAct(jc.nn.BatchNorm(3, rngs=nnx.Rngs(0)), codec=jc.SignAware(4))
        self.unused = jc.nn.NormAct(jc.nn.BatchNorm(3, rngs=nnx.Rngs(0)), codec=jc.SignAware(4))

    def __call__(self, x):
        return self.second(x, self.first(x))


def normalized(x):
    return (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + 1e-5)


def test_counts_what_no_level_reaches():
    x = normal((32, 9, 9, 3)).at[0, 0].multiply(50).at[3, :2].multiply(-20)
    h = normalized(as_float(x))
    levels = jc.SignAware(4, signed=True).levels
    first = (h > levels.top) | (h < levels.bottom)
    unit = np.sqrt(1.0 + 1.0)  # of a norm with scale 1 and no bias, and of what is added
    top = jc.SignAware(4).levels.top
    second = (np.abs(h) > 16) | (np.maximum(h + np.maximum(h, 0), 0) > top * unit)
    with pytest.warns(UserWarning, match="of the values of first are beyond the last level"):
        found = jc.diagnostics.clipped(Block(), x)
    assert 0 < first.mean() < 0.1
    assert 0 < second.mean() < 0.1
    np.testing.assert_allclose(found["first"], first.mean(), atol=1e-4)
    np.testing.assert_allclose(found["second"], second.mean(), atol=1e-4)
    assert np.isnan(found["unused"])
    assert np.isnan(found["before"])  # not called, and named before those that are


def test_a_value_that_is_not_finite_shows():
    x = normal((4, 3, 3, 3)).at[0, 0, 0, 0].set(jnp.nan)
    assert np.isnan(jc.diagnostics.clipped(Block(), x)["first"])


def test_the_model_is_not_changed():
    model = Block()
    jc.diagnostics.clipped(model, normal((4, 3, 3, 3)))
    assert model.first.clipped is None
    assert not model.first.norm.mean[...].any()


def test_a_model_without_such_codes_is_an_error():
    with pytest.raises(ValueError, match="expected nn"):
        jc.diagnostics.clipped(nnx.Sequential(jc.nn.BatchNorm(3, rngs=nnx.Rngs(0))), normal((4, 3)))


def test_counts_what_a_residuals_norm_has_beyond_the_levels():
    norm = jc.nn.BatchNorm(3, rngs=nnx.Rngs(0))
    unit = jc.nn.NormAct(norm, residual_norm=nnx.clone(norm), codec=jc.SignAware(4))
    x, residual = jnp.tile(jnp.array([-1.0, 1.0]), 300)[:, None], normal((600, 1), seed=1)
    x, residual = (jnp.broadcast_to(a, (600, 3))[:, None] for a in (x, residual.at[:1].set(-60)))
    model = nnx.Sequential(Both(unit, residual))
    with pytest.warns(UserWarning, match="of the values of layers/0/unit are beyond"):
        found = jc.diagnostics.clipped(model, x)
    assert found["layers/0/unit"] == pytest.approx(1 / 600)


class Both(nnx.Module):
    """Calls a unit with a residual."""

    def __init__(self, unit, residual):
        self.unit, self.residual = unit, nnx.data(residual)

    def __call__(self, x):
        return self.unit(x, self.residual).value


def test_counts_before_and_after_a_pool():
    pool = jc.nn.MaxPool((2, 2), (2, 2))
    unit = jc.nn.NormAct(jc.nn.BatchNorm(3, rngs=nnx.Rngs(0)), pool=pool, codec=jc.SignAware(4))
    x = normal((32, 8, 8, 3)).at[0, 0].multiply(50).at[3, :2].multiply(-20)
    h = normalized(as_float(x))
    pooled = np.maximum(h, 0).reshape(32, 4, 2, 4, 2, 3).max((2, 4))
    before, after = np.abs(h) > 16, pooled > jc.SignAware(4).levels.top
    expected = (before.sum() + after.sum()) / (before.size + after.size)
    assert 0 < before.mean() < 0.1
    assert 0 < after.mean() < 0.1
    with pytest.warns(UserWarning, match="of the values of layers/0 are beyond"):
        found = jc.diagnostics.clipped(nnx.Sequential(unit), x)
    assert found["layers/0"] == pytest.approx(expected, abs=1e-4)


class Stock(nnx.Module):
    """Stock batch norms: one with a ReLU, one whose result is added to it."""

    def __init__(self):
        self.first, self.second = (nnx.BatchNorm(3, rngs=nnx.Rngs(0)) for _ in range(2))

    def __call__(self, x):
        return nnx.relu(self.second(x[::-1]) + nnx.relu(self.first(x)))


class Ours(Block):
    """The same with layers of ours."""

    def __call__(self, x):
        return self.second(x[::-1], self.first(x))


def test_stock_batch_norms_count_as_ours():
    x = normal((32, 9, 9, 3)).at[0, 0].multiply(50).at[3, :2].multiply(-20)
    model = Stock()
    with pytest.warns(UserWarning, match="of the values of first are beyond the last level"):
        found = jc.diagnostics.clipped(jc.compress(model, "fused:bits=4"), x)
    with pytest.warns(UserWarning):
        ours = jc.diagnostics.clipped(Ours(), x)
    assert found == pytest.approx({path: ours[path] for path in ("first", "second")})
    assert not model.first.mean[...].any()
    unclipped = jc.diagnostics.clipped(jc.compress(Stock(), "fused:bits=4,scale_source=range"), x)
    assert unclipped == {"first": 0.0, "second": 0.0}
    assert np.isnan(jc.diagnostics.clipped(model, x.at[0].set(jnp.nan))["first"])


def test_a_compressed_part_of_a_model():
    x = normal((32, 9, 9, 3)).at[0, 0].multiply(50).at[3, :2].multiply(-20)
    model = nnx.Sequential(jc.compress(Stock(), "fused:bits=4"), nnx.Linear(3, 3, rngs=nnx.Rngs(0)))
    with pytest.warns(UserWarning, match="of the values of layers/0/first are beyond"):
        assert list(jc.diagnostics.clipped(model, x)) == ["layers/0/first", "layers/0/second"]


def test_what_a_jitted_loss_compiled_to_count_is_not_what_it_trains_with():
    counted = []
    x = normal((32, 9, 9, 3))
    model = jc.compress(Stock(), "fused:bits=4")
    of_model = nnx.jit(lambda model, x: model(x).sum())
    clipping.count_clipped(copy := nnx.clone(model), lambda *share: counted.append(share))
    of_model(copy, x)
    jax.effects_barrier()
    assert [path for path, *_ in counted] == ["first", "second"]
    of_model(model, x)
    jax.effects_barrier()
    assert len(counted) == 2
