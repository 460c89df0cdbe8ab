import jax
import jax.numpy as jnp

from jaxcomp._core.shard_map import match_varying, struct_like, type_like, varying_axes


def mapped(body, **options):
    """Runs `body(rows, columns, whole)`, whose arrays vary over one axis each, or none."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"in_specs": (jax.P("a"), jax.P("b"), jax.P()), "out_specs": jax.P(("a", "b"))}
    return jax.shard_map(body, mesh=mesh, **specs, **options)(*[jnp.arange(8.0)] * 3)


def test_every_array_varies_over_all_over():
    def body(rows, columns, whole):
        both = match_varying({"rows": rows, "columns": columns, "whole": whole, "none": None})
        assert both["none"] is None
        assert [varying_axes(a) for a in jax.tree.leaves(both)] == [{"a", "b"}] * 3
        assert [varying_axes(a) for a in match_varying((rows, whole))] == [{"a"}] * 2
        assert not varying_axes(match_varying((whole,))[0])
        return both["whole"]

    assert mapped(body).tolist() == [*range(8)] * 8


def test_nothing_varies_by_type_without_the_check_or_outside():
    def body(rows, columns, whole):
        assert match_varying((rows, columns, whole)) == (rows, columns, whole)
        return whole

    mapped(body, check_vma=False)
    x = jnp.ones(3)
    assert match_varying((x, None, x))[2] is x


def test_likes_vary_as_their_array_does():
    def body(rows, columns, whole):
        found = struct_like(rows, (2, 3), jnp.bfloat16)
        assert (found.shape, found.dtype) == ((2, 3), jnp.bfloat16)
        assert found.manual_axis_type.varying == {"a"}
        (transposed,) = jax.linear_transpose(lambda a: a * rows, type_like(rows))(rows)
        assert varying_axes(transposed) == {"a"}
        return whole

    mapped(body)
    assert not type_like(jnp.full(2, 0.5)).weak_type
