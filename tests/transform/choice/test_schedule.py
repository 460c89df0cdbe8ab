"""What `checkpoint` stores: each value once, arguments never, masks in bits."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcomp as jc
from jaxcomp.codecs._codec import array_nbytes
from tests.helpers import (
    assert_close,
    assert_same_bits,
    error_of_mean,
    normal,
    only,
    slow,
    stored_shapes,
)
from tests.transform.mlp import CODEC, W1, W2, X, mlp

NO_RULES = jc.Policy(())

ROW = jnp.ones((1, 128))


def _norm(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-5)


def _layer_norm(x, scale, bias):
    return _norm(x) * scale + bias


def _large(plan):
    """(shape, role, decision) of what is no statistic."""
    return [(v.shape, v.role, v.decision) for v in plan.values if v.role != "statistic"]


def test_layer_norm_stores_one_tensor():
    def block(x, scale, bias, w):
        return _layer_norm(jnp.sin(x), scale, bias) @ w

    plan = jc.checkpoint(block, CODEC).plan(X, ROW, ROW, W1)
    # The derivative of sine follows from x, which is an argument; so does the norm's input.
    assert _large(plan) == []

    def after_product(x, w1, scale, bias, w2):
        return _layer_norm(x @ w1, scale, bias) @ w2

    wide = jnp.ones((1, 256))
    (only,) = (
        v
        for v in jc.checkpoint(after_product, CODEC).plan(X, W1, wide, wide, W2).values
        if v.role != "statistic"
    )
    assert (only.shape, only.role, only.decision) == ((32, 256), "operand", str(CODEC))
    assert "mean of 256" in only.note


@pytest.mark.parametrize("approximate", [True, False])
def test_gelu_stores_one_code(approximate):
    def mlp(x, w1, w2):
        return jax.nn.gelu(x @ w1, approximate=approximate) @ w2

    plan = jc.checkpoint(mlp, CODEC).plan(X, W1, W2)
    assert [(v.op, v.shape, v.decision) for v in plan.values] == [
        ("activation", (32 * 256,), str(CODEC))
    ]
    words = 4 * (32 + 256)  # the noise is hashed from these
    assert plan.saved_bytes == CODEC.nbytes((32, 256), jnp.bfloat16) + words
    assert plan.exact_bytes > 3 * 32 * 256 * 4
    assert len(_large(jc.checkpoint(mlp, jc.Exact()).plan(X, W1, W2))) == 1
    # Two levels do not tell the derivative, and rounding to nearest has no mean to correct for.
    for codec in (jc.Quantize(bits=2), jc.Quantize(bits=4, rounding="nearest")):
        assert _large(jc.checkpoint(mlp, codec).plan(X, W1, W2)) == [
            ((32, 256), "operand", str(codec)),
            ((32, 256), "derivative", str(codec)),
        ]


def test_gated_unit_stores_two_codes():
    def swiglu(x, w, v, out):
        return (jax.nn.silu(x @ w) * (x @ v)) @ out

    (unit,) = jc.checkpoint(swiglu, CODEC).plan(X, W1, W1, W2).values
    assert (unit.op, unit.shape, unit.decision) == ("activation", (2 * 32 * 256,), str(CODEC))
    assert unit.saved_bytes == 2 * (CODEC.nbytes((32, 256), jnp.bfloat16) + 4 * (32 + 256))


def test_convolution_norm_relu_store_one_code_and_one_bit_a_unit():
    image, kernel = normal((4, 8, 8, 16)), 0.1 * normal((3, 3, 16, 16), seed=1)

    def unit(x, kernel):
        dims = ("NHWC", "HWIO", "NHWC")
        h = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)
        mean = h.mean((0, 1, 2), keepdims=True)
        variance = jnp.square(h).mean((0, 1, 2), keepdims=True) - jnp.square(mean)
        return jax.nn.relu((h - mean) * lax.rsqrt(variance + 1e-5))

    def net(x, a, b, c):
        return unit(unit(unit(x, a), b), c)

    plan = jc.checkpoint(net, CODEC).plan(image, kernel, kernel, kernel)
    decisions = [decision for _, _, decision in _large(plan)]
    assert decisions.count(str(CODEC)) == 3
    assert decisions.count("Packed(bits=1)") == 3
    assert len(decisions) == 6


def test_a_value_that_comes_twice_on_a_path_has_two_codes():
    def attention(x, w):
        return jax.nn.softmax(x @ w)

    (weights,) = (
        v for v in jc.checkpoint(attention, CODEC).plan(X, W1).values if v.role != "statistic"
    )
    assert weights.decision == f"2 x {CODEC}"
    assert weights.saved_bytes == 2 * CODEC.nbytes((32, 256), jnp.float32)


def test_a_residual_stream_has_one_code_a_layer():
    def stack(x, w1, w2):
        for _ in range(5):
            x = x + jax.nn.relu(_norm(x) @ w1) @ w2
        return x

    plan = jc.checkpoint(stack, CODEC).plan(X, W1, W2)
    stored = [decision for shape, _, decision in _large(plan) if shape == X.shape]
    assert stored == [str(CODEC)] * 4  # the first layer's input is an argument


@pytest.mark.parametrize(
    ("dtype", "act"),
    [
        (jnp.float32, jnp.tanh),
        (jnp.float32, jax.nn.gelu),
        (jnp.bfloat16, jnp.sin),
        *(slow(jnp.float32, act) for act in (jax.nn.sigmoid, jnp.sin)),
        *(slow(jnp.bfloat16, act) for act in (jnp.tanh, jax.nn.sigmoid, jax.nn.gelu)),
    ],
)
def test_no_product_is_made_again_only_to_save_codes(act, dtype):
    def network(ws, x):
        for w in ws:
            x = act(x @ w)
        return x

    ws = [jax.ShapeDtypeStruct((128, 128), dtype)] * 4
    x = jax.ShapeDtypeStruct((1024, 128), dtype)
    found = jc.plan(jc.checkpoint(network), ws, x)
    assert (
        found.saved_bytes == jc.plan(jc.checkpoint(network, "quantize:bits=4"), ws, x).saved_bytes
    )
    assert 4 < found.bits_per_element < 5


def test_codes_never_take_more_bytes_than_the_exact_values_they_follow_from():
    def normalized(x):  # over 32 values: two codes of independent noise
        groups = x.reshape(*x.shape[:-1], -1, 32)
        mean = jnp.square(groups).mean(-1, keepdims=True)
        return (groups * lax.rsqrt(mean + 1e-3)).reshape(x.shape)

    def two_branches(x, w1, w2):
        h = x @ w1
        return (normalized(jnp.sin(h)) * normalized(jnp.cos(h))) @ w2

    x, w = (jax.ShapeDtypeStruct((n, 256), jnp.bfloat16) for n in (1024, 256))
    plans = {b: jc.plan(jc.checkpoint(two_branches, jc.Quantize(b)), x, w, w) for b in (8, 4, 2)}
    assert plans[8].saved_bytes == plans[4].saved_bytes > plans[2].saved_bytes
    note = "kept exactly: codes of all values take more bytes than what they follow from"
    (exact,) = (v for v in plans[4].values if v.role != "statistic")
    assert exact.decision == "exact" and exact.note.startswith(note)


def test_what_waits_is_what_the_plan_says():
    f = jc.checkpoint(mlp, CODEC)
    arguments = [(a.shape, "float32") for a in (X, W1, W2)]
    (value,) = f.plan(X, W1, W2).values
    codes = [shape for shape in stored_shapes(f, X, W1, W2) if shape not in arguments]
    assert codes.count(((32, 256), "uint4")) == 1
    assert sum(array_nbytes(*shape) for shape in codes) == value.saved_bytes


def test_frozen_weights_store_nothing_for_their_gradient():
    def stored(argument):
        return stored_shapes(
            lambda a: jc.checkpoint(mlp, CODEC)(
                *(X, W1, W2)[:argument], a, *(X, W1, W2)[argument + 1 :]
            ),
            (X, W1, W2)[argument],
        )

    code = ((32, 256), "uint4")
    assert stored(0).count(code) == 1  # the derivative
    assert stored(2).count(code) == 1  # the operand


def test_jax_policies_keep_and_recompute():
    def named(x, w1, w2):
        return jax.nn.gelu(checkpoint_name(x @ w1, "hidden")) @ w2

    kept = [
        (jax.checkpoint_policies.everything_saveable, 2),  # the derivative, too
        (jax.checkpoint_policies.nothing_saveable, 0),
        (jax.checkpoint_policies.dots_saveable, 1),
        (jax.checkpoint_policies.save_only_these_names("hidden"), 1),
        (jax.checkpoint_policies.save_only_these_names("other"), 0),
    ]
    exact = jax.grad(lambda *args: jnp.sum(named(*args) ** 2), (0, 1, 2))(X, W1, W2)
    for policy, count in kept:
        f = jc.checkpoint(named, policy)
        plan = f.plan(X, W1, W2)
        assert [v.decision for v in plan.values] == ["exact"] * count
        got = jax.jit(jax.grad(lambda *args, f=f: jnp.sum(f(*args) ** 2), (0, 1, 2)))(X, W1, W2)
        assert_close(got, exact, 1e-5)


def test_a_sum_to_keep_is_kept_where_its_products_are_recomputed():
    def blocks(x, w1, w2):
        for _ in range(3):
            x = checkpoint_name(x + jax.nn.gelu(x @ w1) @ w2, "sum")
        return x

    f = jc.checkpoint(blocks, jax.checkpoint_policies.save_only_these_names("sum"))
    plan = f.plan(X, W1, W2)
    assert [(value.shape, value.decision) for value in plan.values] == 2 * [(X.shape, "exact")]


def test_products_are_made_again_where_that_takes_fewer_bytes():
    def read(*values):
        return jax.checkpoint(lambda *v: sum(jnp.sum(jnp.sin(x)) for x in v))(*values)

    def three(x, w1, w2):
        h = jnp.cumsum(jnp.tanh(x @ w1), 1)  # is stored, or what it follows from
        return read(h @ w2, 2 * (h @ w2), h @ jnp.cos(w2))

    def deep(x, w1, w2):
        y = x
        for _ in range(3):
            y = jnp.tanh(jnp.tanh(y @ w1) @ w2)
        weigh = jax.checkpoint(lambda x, y: jnp.sum(jnp.sin(x)) * jnp.sum(jnp.sin(y)))
        return weigh(x, lax.stop_gradient(y @ w1)) + jnp.sum(w1) + jnp.sum(w2)

    again = only("cheapest", primitives=("dot_general",))

    def stored(fn, policy=NO_RULES):
        plan = jc.checkpoint(fn, policy)
        shapes = [v.shape for v in plan.plan(X, W1, W2).values]
        expected, got = (jax.grad(f, (0, 1, 2))(X, W1, W2) for f in (fn, plan))
        assert_close(got, expected)
        return sorted(shapes)

    assert stored(three) == [(32, 128), (32, 128), (32, 256), (32, 256)]
    assert stored(three, again) == [(32, 256)]
    assert stored(deep, again) == [(32, 256)]  # of a chain, the result
    assert stored(three, only("cheapest", names=("no",), required=False)) == stored(three)
    with pytest.raises(ValueError, match=r"matches nothing.* at most 8192 elements"):
        jc.checkpoint(deep, only("cheapest", names=("no",))).plan(X, W1, W2)


def test_offloaded_values_leave_the_device():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def named(x, w1, w2):
        return jax.nn.gelu(checkpoint_name(x @ w1, "hidden")) @ w2

    f = jc.checkpoint(named, policy)
    (hidden,) = f.plan(X, W1, W2).values
    assert (hidden.decision, hidden.saved_bytes) == ("offload", 0)
    traced = str(jax.make_jaxpr(jax.grad(lambda *a: f(*a).sum()))(X, W1, W2))
    assert "Host" in traced or "pinned_host" in traced


def test_codecs_by_name_primitive_role_dtype_and_size():
    def relu(x, w1, w2):
        return jax.nn.relu(checkpoint_name(x @ w1, "hidden")) @ w2

    def sine(x, w1, w2):
        return jnp.sin(x @ w1) + jnp.sum(w2)

    def coded(fn, policy):
        return [v.decision for v in jc.checkpoint(fn, policy).plan(X, W1, W2).values]

    def match(**conditions):
        return only(CODEC, **conditions)

    unit = [str(CODEC), "Packed(bits=1)"]
    for policy in (
        match(names=["hidden"]),
        match(roles=["operand"]),
        match(dtypes=["float32"], min_size=32 * 256),
        only(CODEC, primitives=("dot_general", "conv_general_dilated")),
        match(names=["hidden"]) + only(jc.Quantize(8)),
    ):
        assert coded(relu, policy) == unit
    assert coded(sine, match(roles=["derivative"])) == [str(CODEC)]
    assert coded(sine, jc.Policy(())) == ["exact"]
    # One exact tensor gives both of GELU's; a code for one would save nothing.
    assert coded(mlp, match(roles=["operand"])) == ["exact"]
    assert coded(sine, match(min_size=10**6)) == ["exact"]
    small = jc.checkpoint(sine, match(min_size=10**6)).plan(X, W1, W2)
    assert "every value is too small for Rule(" in str(small)


def test_boundary_stores_the_input_alone_and_says_that_it_is_biased():
    codec = jc.Quantize(bits=8, rounding="nearest")
    f = jc.checkpoint(mlp, jc.recipes.boundary(codec), coded_argnums=0)
    plan = f.plan(X, W1, W2)
    assert [(v.role, v.decision) for v in plan.values] == [("input", str(codec))]
    assert "biased" in str(plan)
    decoded = codec.decode(codec.encode(X))
    got = jax.grad(lambda x: f(x, W1, W2).sum())(X)
    assert_close(got, jax.grad(lambda x: mlp(x, W1, W2).sum())(decoded), 1e-5)


def test_boundary_encodes_what_a_loop_gives():
    mixed = jax.checkpoint(lambda x: lax.map(lambda row: jnp.tanh(row @ W1), jnp.sin(x)))

    def loss(x):
        return jnp.sin(mixed(x)).sum()

    codec = jc.Quantize(bits=8, rounding="nearest")
    function = jc.checkpoint(loss, jc.recipes.boundary(codec), coded_argnums=0)
    assert [v.decision for v in function.plan(X).values] == [str(codec)] * 2
    x, y = (codec.decode(codec.encode(value)) for value in (X, mixed(X)))
    assert_close(jax.grad(function)(X), jax.vjp(mixed, x)[1](jnp.cos(y))[0], 1e-5)

    exact = jc.checkpoint(loss, jc.recipes.boundary(jc.Offload(jc.Exact())), coded_argnums=0)
    assert [v.decision for v in exact.plan(X).values] == ["offload"] * 2
    assert "biased" not in str(exact.plan(X))
    assert_same_bits(jax.grad(exact)(X), jax.grad(loss)(X))


def test_ragged_products_have_codes():
    def experts(x, w1, w2, sizes):
        return jnp.sum(lax.ragged_dot(jax.nn.silu(lax.ragged_dot(x, w1, sizes)), w2, sizes) ** 2)

    args = X, jnp.stack([W1, -W1]), jnp.stack([W2, 2 * W2]), jnp.array([8, 24])
    values = jc.checkpoint(experts, CODEC).plan(*args).values
    assert {(v.shape, v.role, v.decision) for v in values} == {
        ((32, 256), "operand", str(CODEC)),
        ((32, 256), "derivative", str(CODEC)),
        ((32, 128), "derivative", str(CODEC)),
    }

    def gradient(fn):
        return jax.grad(fn, (0, 1, 2))(*args)

    exact = jax.jit(lambda: gradient(experts))()
    assert_close(jax.jit(lambda: gradient(jc.checkpoint(experts, jc.Exact())))(), exact, 1e-5)
    draw = jax.jit(lambda seed: gradient(jc.checkpoint(experts, CODEC, seed=seed)))
    draws = [draw(seed) for seed in range(16)]
    for one, *drawn in zip(exact, *draws, strict=True):
        error, chance = error_of_mean(drawn, one)
        assert 0 < error < 2.2 * chance


def test_arrays_that_a_function_closes_over_do_not_count_as_differentiated():
    def block(x):
        return jnp.tanh(x @ W1) @ W2

    plan = jc.checkpoint(block, CODEC).plan(X)
    assert [v.role for v in plan.values] == ["derivative"]  # no operand of a frozen product
    assert plan.saved_bytes == CODEC.nbytes((32, 256), jnp.float32)


def test_coded_arguments_and_only_they_are_coded():
    plan = jc.checkpoint(mlp, CODEC, coded_argnums=0).plan(X, W1, W2)
    assert [(v.role, v.shape) for v in plan.values if v.role == "input"] == [("input", X.shape)]
    assert plan.exact_bytes == jc.checkpoint(mlp, CODEC).plan(X, W1, W2).exact_bytes + X.nbytes


def test_plan_says_what_it_cannot_look_into_and_when_nothing_is_gained():
    def branch(x, w):
        def told():
            jax.debug.print("taken")
            return jnp.sin(x @ w)

        return lax.cond(x.sum() > 0, told, lambda: x)

    plan = jc.checkpoint(branch, CODEC).plan(X, 0.1 * normal((128, 128)))
    assert {v.decision for v in plan.values if v.role != "mask"} == {"exact"}
    assert all("read by lax.cond, test_" in v.note for v in plan.values if v.role != "mask")
    assert "hardly anything is saved" in str(plan)
    source = jc.checkpoint(_layer_norm, CODEC).plan(X, ROW, ROW).values[0].source
    assert source.startswith("test_schedule.py:")

    def sharded(x, w):
        mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
        product = lambda x, w: jnp.sin(x @ w)  # noqa: E731
        return jax.shard_map(product, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))(
            x, w
        )

    assert "call jc.checkpoint inside of it" in str(jc.checkpoint(sharded, CODEC).plan(X, W1))
    spectrum = lambda x, w: jnp.abs(jnp.fft.fft(x @ w)) ** 2  # noqa: E731
    assert "the notes of the values say why" in str(jc.checkpoint(spectrum, CODEC).plan(X, W1))


def test_a_rule_for_inputs_says_where_they_are_named():
    boundary = jc.recipes.boundary(jc.Quantize(bits=8))
    with pytest.raises(ValueError, match=r"an input is what coded_argnums of jaxcomp\.checkpoint"):
        jc.plan(jc.checkpoint(lambda x: jnp.sin(x @ x), boundary), jnp.ones((8, 8)))
