"""Batch norms whose statistics are of several devices are recognized."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from tests.helpers import error_of_mean, slow
from tests.transform.batch_norms import RANGE, as_users_write, conv

__all__ = ("as_users_write",)


@pytest.mark.parametrize(
    ("argnums", "check"), [(0, True), slow(1, False), slow(0, False), slow(1, True)]
)
def test_statistics_over_devices(check, argnums):
    """A norm with `axis_name`, inside of `jax.shard_map` over 8 devices."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    layers = [nnx.BatchNorm(8, axis_name="data", rngs=nnx.Rngs(0)) for _ in range(2)]
    kernel = jax.random.normal(jax.random.key(0), (2, 3, 3, 8, 8)) / 8
    x = 1 + jax.random.normal(jax.random.key(1), (16, 8, 8, 8))
    weight = jax.random.normal(jax.random.key(2), x.shape)

    def network(kernel, x):
        for layer, k in zip(layers, kernel, strict=True):
            graphdef, state = nnx.split(layer)
            x = jax.nn.relu(nnx.merge(graphdef, state, copy=True)(conv(x, k)))
        return x

    def gradient(fn, argnums):
        def of_device(*arguments):
            def loss(kernel, x, weight):
                return lax.psum((weight * fn(kernel, x)).sum(), "data")

            found = jax.grad(loss, argnums)(*arguments)
            return found if check or argnums else lax.pmean(found, "data")

        specs = P(), P("data"), P("data")
        run = jax.shard_map(
            of_device, mesh=mesh, in_specs=specs, out_specs=specs[argnums], check_vma=check
        )
        return run(kernel, x, weight)

    draw = jax.jit(lambda seed: gradient(jc.checkpoint(network, RANGE, seed=seed), argnums))
    exact = jax.jit(lambda: gradient(network, argnums))()
    error, chance = error_of_mean([draw(seed) for seed in range(30)], exact)
    assert 0 < error < 2.2 * chance + 1e-4 * np.linalg.norm(exact)


def test_statistics_in_rows_for_one_collective():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def norm(x):
        rows = [x.mean((0, 1, 2))[None], jnp.square(x).mean((0, 1, 2))[None]]
        mean, square = lax.pmean(jnp.concatenate(rows), "data")
        return jax.nn.relu((x - mean) * lax.rsqrt(square - mean**2 + 1e-5))

    def gradient(fn):
        def of_device(x):
            return jax.grad(lambda x: jnp.sin(fn(x)).sum())(x)

        specs = P("data")
        run = jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=specs)
        return jax.jit(run)(1 + jax.random.normal(jax.random.key(1), (16, 8, 8, 8)))

    found, exact = gradient(jc.checkpoint(norm, RANGE)), gradient(norm)
    assert 0 < np.linalg.norm(found - exact) < 0.3 * np.linalg.norm(exact)


def test_statistics_over_two_axes_of_devices_are_left_alone():
    kind = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "more"), axis_types=kind)

    def norm(x):
        mean = lax.pmean(x.mean((0, 1, 2)), ("data", "more"))
        var = lax.pmean(jnp.square(x - mean).mean((0, 1, 2)), ("data", "more"))
        return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-5))

    def gradient(x):
        return jax.grad(lambda x: jc.checkpoint(norm, "fused:bits=4")(x).sum())(x)

    specs = P(("data", "more"))
    run = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=specs)
    with pytest.raises(ValueError, match="matches nothing"):
        run(jax.random.normal(jax.random.key(1), (16, 8, 8, 8)))
