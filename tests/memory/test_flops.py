import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxcomp.memory._flops import flops, jaxpr_flops

LAYERS = 4


def test_flops_of_products_and_scans():
    x, w = jnp.ones((32, 64)), jnp.ones((LAYERS, 64, 64))
    products = LAYERS * 2 * 32 * 64 * 64

    def layers(w, x):
        return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

    assert flops(layers, w, x) == products
    assert flops(jax.jit(jax.grad(layers)), w, x) == 3 * products
    assert flops(jax.grad(jax.checkpoint(layers)), w, x) == 4 * products


def test_flops_of_ragged_products_count_each_row_once():
    x, w, sizes = jnp.ones((32, 64)), jnp.ones((4, 64, 16)), jnp.array([8, 8, 0, 16])

    def experts(x, w):
        return jnp.sum(lax.ragged_dot(x, w, sizes) ** 2)

    assert flops(experts, x, w) == 2 * 32 * 64 * 16
    assert flops(jax.grad(experts, (0, 1)), x, w) == 3 * 2 * 32 * 64 * 16


@pytest.mark.parametrize("stride, dilation, groups", [(1, 1, 1), (2, 1, 1), (1, 2, 4)])
def test_flops_of_convolutions_are_xlas_own(stride, dilation, groups):
    x, w = jnp.ones((2, 12, 12, 8)), jnp.ones((3, 3, 8 // groups, 16))

    def conv(x, w):
        return lax.conv_general_dilated(
            x,
            w,
            (stride, stride),
            "SAME",
            rhs_dilation=(dilation, dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    own = jax.jit(conv).lower(x, w).cost_analysis()["flops"]
    assert flops(conv, x, w) == own


def test_flops_of_branches_and_loops_over_data():
    x = jnp.ones((16, 16))
    assert flops(lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x), x) == (
        2 * 2 * 16**3
    )
    assert flops(lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, x), x) is None
    assert flops(lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x) @ x, x) == (
        2 * 16**3
    )


def test_shard_map_counts_all_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    gram = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=spec, out_specs=spec)
    assert flops(gram, jnp.ones((16, 4))) == 8 * 2 * (2 * 4 * 2)


def test_of_a_platform_dependent_the_platforms_branch_counts():
    def product(x):
        return lax.platform_dependent(x, tpu=lambda x: x @ x, default=lambda x: x)

    jaxpr = jax.make_jaxpr(product)(jnp.ones((4, 4))).jaxpr
    assert jaxpr_flops(jaxpr, "tpu") == 2 * 4**3
    assert (
        jaxpr_flops(jaxpr, "cuda")
        == jaxpr_flops(jaxpr, "cpu")
        == flops(product, jnp.ones((4, 4)))
        == 0
    )
