"""What several test files share."""

import contextlib
import re
import statistics

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jaxcomp import Policy, Rule

without_remat3 = pytest.mark.skipif(
    jax.config.values.get("jax_remat3", False), reason="save_compressed is an error with jax_remat3"
)
# How users compile, for tests that depend on XLA's rounding or fusions; see conftest.py.
OPTIMIZED: dict[str, int | bool] = {"xla_backend_optimization_level": 3}
if jax.__version_info__ < (0, 11):  # later ones know no other way
    OPTIMIZED["xla_cpu_use_fusion_emitters"] = True
AS_WRITTEN = {"xla_allow_excess_precision": False}  # bfloat16 is rounded to between operations
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def slow(*values):
    """Parameters that `make nightly` alone runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def kept(cases, by_default):
    """All cases, of which `make test` runs those that `by_default` has, and `make nightly` all."""
    return [case if case in by_default else slow(*_as_tuple(case)) for case in cases]


def _as_tuple(case):
    return case if isinstance(case, tuple) else (case,)


def only(action, **conditions):
    """A policy of one rule."""
    return Policy((Rule(action, **conditions),))


def normal(shape, dtype=jnp.float32, seed=0):
    """Standard normal values."""
    return jnp.asarray(np.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype))


def assert_same_bits(actual, expected):
    """Equal pytrees of equal dtypes, signs of zeros with them; NaN equal to NaN."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        a, e = as_float(a), as_float(e)
        np.testing.assert_array_equal(a, e)
        number = ~np.isnan(e)
        np.testing.assert_array_equal(np.signbit(a)[number], np.signbit(e)[number])


def assert_close(actual, expected, rtol=1e-5):
    """Equal pytrees up to `rtol` of each array's largest value."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        e = as_float(e)
        np.testing.assert_allclose(as_float(a), e, rtol=0, atol=rtol * np.max(np.abs(e), initial=0))


def as_float(x):
    """As a float64 numpy array, which holds every value of the dtypes used here."""
    return np.asarray(x).astype(np.float64)


@contextlib.contextmanager
def without_type_checks():
    """As a user has it: the library's own errors, not those of jaxtyping's hook."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def z_limit(tests):
    """What the largest of so many standard normal numbers stays below, but for one run in 10^6."""
    return statistics.NormalDist().inv_cdf(1 - 1e-6 / (2 * tests))


def error_of_mean(draws, exact):
    """The norm of the error of a mean of arrays, and what chance alone makes of it."""
    found = np.stack([np.asarray(draw, np.float32) for draw in draws])
    error = found.mean(0) - np.asarray(exact, np.float32)
    return np.linalg.norm(error), np.sqrt((found.var(0, ddof=1) / len(draws)).sum())


def distance(got, expected):
    """The norm of the difference of two pytrees, over the norm of the second."""
    got, expected = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
        for tree in (got, expected)
    )
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


def assert_scattered_by_chance(draws, expected):
    """64 draws of each array, along axis 0, scatter around the expected one as by chance."""
    for drawn, mean in zip(draws, expected, strict=True):
        error = np.asarray(drawn) - np.asarray(mean)
        spread = error.std(0, ddof=1) / 8  # the root of 64
        z = (error.mean(0) / np.where(spread == 0, np.inf, spread)).ravel()
        assert (z != 0).mean() > 0.9
        assert abs(z.mean()) < 4 / len(z) ** 0.5 * 3  # neighbours are not independent
        assert 0.8 < z.std() < 1.3


def eight_devices():
    """A mesh of the 8 virtual devices; skips the test on an attached device."""
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    return jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))


def shard(x):
    """`x` with axis 0 spread over the 8 virtual devices."""
    return jax.device_put(x, jax.NamedSharding(eight_devices(), jax.P("batch")))


def replicate(x):
    """`x` on each of the 8 virtual devices."""
    return jax.device_put(x, jax.NamedSharding(eight_devices(), jax.P()))


def collectives(fn, *args):
    """Names of the collective operations in the compiled program."""
    text = jax.jit(fn).lower(*args).compile().as_text()
    names = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return set(re.findall(rf"\b({names})(?:-start)?\(", text))


def stored_shapes(fn, *args):
    """(shape, dtype name) of what `jax.vjp` keeps, sorted."""
    backward = jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *args)
    return sorted((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(backward))


def check_bilinear(op, stock, lhs, rhs, decoded):
    """The contract of an op that is linear in `lhs` and in `rhs` and stores `lhs` as `decoded`.

    Its result has the bits of `stock`; its gradients are those of `stock`, of `rhs` at `decoded`.
    """
    out = jax.jit(stock)(lhs, rhs)
    assert_same_bits(jax.jit(op)(lhs, rhs), out)
    cotangent = normal(out.shape, out.dtype, seed=3)

    @jax.jit
    def pull(lhs, decoded, rhs):
        primal, backward = jax.vjp(op, lhs, rhs)
        return primal, backward(cotangent), jax.vjp(stock, decoded, rhs)[1](cotangent)

    primal, (dlhs, drhs), (dlhs_exact, drhs_decoded) = pull(lhs, decoded, rhs)
    rtol = 4 * float(jnp.finfo(lhs.dtype).eps)
    assert_close(primal, out, rtol)
    assert (dlhs.dtype, drhs.dtype) == (lhs.dtype, rhs.dtype)
    assert_close(dlhs, dlhs_exact, rtol)
    assert_close(drhs, drhs_decoded, rtol)


def assert_unbiased(draws, exact):
    """The mean over axis 0 is `exact`, as far as so many draws can tell."""
    draws, exact = as_float(draws), as_float(exact)
    error = np.abs(draws.mean(0) - exact)
    std = draws.std(0, ddof=1) / len(draws) ** 0.5
    assert np.all(std > 0)
    assert np.all(error < z_limit(exact.size) * std + 2.0**-17 * np.abs(exact))
