import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp.models import catalog, resmlp
from jaxcomp.nn._coded import coded_modules
from jaxcomp.planning._remat import remat_blocks
from tests.helpers import assert_close, kept, normal

# Published in millions (arXiv:2105.03404, tables 1 and 3: 15.4, 30.0, 44.7, 115.7): a block has
# T(T + 1) + 8 D^2 + 11 D + ... parameters; to the last digit by hand.
COUNTS = {
    "resmlp_s12": 15_350_872,
    "resmlp_s24": 30_020_680,
    "resmlp_s36": 44_690_488,
    "resmlp_b24": 115_736_776,
}
IMAGES = normal((8, 8, 8, 3))
DEEP = ("resmlp_s24", "resmlp_s36", "resmlp_b24")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in DEEP else []) for n in COUNTS]
)
def test_parameter_counts_are_the_published_ones(name):
    model = nnx.eval_shape(lambda: resmlp.create(name, num_classes=1000, rngs=nnx.Rngs(0)))
    assert sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param))) == COUNTS[name]


def small(policy="exact", **options):
    model = resmlp.ResMLP(
        16,
        2,
        patch=2,
        scale=0.5,
        image_size=8,
        num_classes=3,
        rngs=nnx.Rngs(0),
        **options,
    )
    return jc.compress(model, policy)


def reference(params, images):
    """The network in plain JAX, from the paper's equations."""

    def affine(p, x):
        return p["scale"] * x + p.get("bias", 0)

    def linear(p, x):
        return x @ p["kernel"] + p["bias"]

    stem = params["stem"]
    patches = images.reshape(-1, 4, 2, 4, 2, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 16, 12)
    x = patches @ stem["kernel"].reshape(12, 16) + stem["bias"]
    for block in params["blocks"].values():
        mixed = linear(block["mixing"], affine(block["norm1"], x).mT).mT
        x = x + affine(block["branch1"]["scale"], mixed)
        hidden = jax.nn.gelu(linear(block["fc1"], affine(block["norm2"], x)))
        x = x + affine(block["branch2"]["scale"], linear(block["fc2"], hidden))
    return linear(params["head"], affine(params["norm"], x).mean(1))


def step_of(make):
    model = nnx.eval_shape(make)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    params = jax.tree.map(lambda p: 0.3 * normal(p.shape), params)

    def loss(params, images):
        logits = nnx.merge(graphdef, params, rest, copy=True)(images)
        return jnp.square(logits - 1).mean(), logits

    return jax.jit(jax.grad(loss, has_aux=True)), params


@jax.numpy_rank_promotion("allow")
def test_is_the_network_of_the_paper():
    step, params = step_of(small)
    gradients, logits = step(params, IMAGES)
    pure = nnx.to_pure_dict(params)
    expected = jax.jit(jax.grad(lambda p: jnp.square(reference(p, IMAGES) - 1).mean()))(pure)
    assert_close(logits, jax.jit(reference)(pure, IMAGES), 1e-5)
    assert_close(jax.tree.leaves(nnx.to_pure_dict(gradients)), jax.tree.leaves(expected), 1e-4)


SPECS = "pruning:density=0.5,block=4", "pruning:density=0.5,block=4,rest_bits=4"


@pytest.mark.parametrize("spec", kept(SPECS, SPECS[1:]))
def test_forward_is_exact_and_the_gradient_is_near(spec):
    step, params = step_of(small)
    coded, _ = step_of(lambda: small(spec))
    (expected, logits), (got, same) = step(params, IMAGES), coded(params, IMAGES)
    np.testing.assert_allclose(same, logits, rtol=1e-4, atol=1e-5)
    expected, got = (np.concatenate([*map(np.ravel, jax.tree.leaves(g))]) for g in (expected, got))
    assert 1e-3 < np.linalg.norm(got - expected) / np.linalg.norm(expected) < 0.6


def test_pruning_keeps_blocks_of_linear_inputs_and_codes_of_the_rest():
    """Of GELU only the derivative's code: its output waits as the next layer's input.

    The LayerScale after that stores nothing.
    """
    spec = "pruning:density=0.25,block=4,rest_bits=4"
    graphdef, state = nnx.split(nnx.eval_shape(lambda: small(spec)))

    def forward(state, images):
        return nnx.merge(graphdef, state)(images)

    kept = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(forward, *a)[1], state, IMAGES))
    kept = [a for a in kept if a.shape[:1] == (8,) and a.shape != IMAGES.shape]
    codes = sorted(a.shape for a in kept if a.dtype == jnp.uint4)
    assert codes == [(8, 16, 16)] * 7 + [(8, 16, 64)] * 2  # three affines a block and the last
    blocks = sorted(a.shape for a in kept if a.ndim == 4)
    assert blocks == [(8, 1, 1, 4)] + [(8, 4, 4, 4)] * 4 + [(8, 16, 4, 4)] * 2
    others = [a for a in kept if a.ndim < 4 and a.dtype != jnp.uint4]
    assert all(a.dtype == jnp.uint8 or a.shape[1] == 1 for a in others)  # indices and extremes


def test_every_layer_is_planned_and_told_of():
    model = small(jc.Quantize(bits=2))
    found = jc.plan(model, IMAGES)
    assert not [v for v in found.values if v.decision == "exact" and v.saved_bytes]
    paths = {v.path for v in found.values if v.saved_bytes and v.elements}
    assert {"blocks/0/fc2", "blocks/1/fc2"} <= paths
    assert not any(path.startswith("blocks/0/branch2") for path in paths)
    planned = jc.diagnostics.plan_bits(
        lambda model, x: (model(x) ** 2).mean(), model, IMAGES, bits=3
    )
    assert {"blocks/0/fc2", "blocks/1/fc2"} <= {rule.path for rule in planned.rules}


def test_rules_reach_every_layer():
    model = nnx.eval_shape(lambda: small("pruning:density=0.5,rest_bits=2"))
    layers = coded_modules(model).values()
    assert {layer.kind for layer in layers} == {"dot", "affine", "gelu"}
    for layer in layers:
        assert layer.codec == (jc.BlockSparse(8, 0.5) if layer.kind == "dot" else jc.Quantize(2))


def test_stochastic_depth_skips_sublayers_of_samples():
    model = small(stochastic_depth=0.5)
    same = jnp.broadcast_to(IMAGES[:1], (64, *IMAGES.shape[1:]))
    assert len(np.unique(np.asarray(model(same)).round(4), axis=0)) > 8  # of 2^4 networks
    stock = small()
    nnx.update(stock, nnx.state(model, nnx.Param))
    model.eval()
    np.testing.assert_allclose(model(IMAGES), stock(IMAGES), rtol=1e-4, atol=1e-6)


def test_remat_changes_nothing_but_rounding():
    step, params = step_of(small)
    recomputed, _ = step_of(lambda: remat_blocks(small()))
    assert_close(recomputed(params, IMAGES)[0], step(params, IMAGES)[0], 1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 20}, "image_size=20: expected a multiple of 16"),
        ({"image_size": 0}, "image_size=0: expected a multiple of 16"),
        ({"stochastic_depth": 1.0}, "stochastic_depth=1.0: expected 0 to less than 1"),
    ],
)
def test_options_that_do_not_fit_are_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        resmlp.create("resmlp_s12", num_classes=10, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("create", [resmlp.create, functools.partial(catalog.create, image_size=8)])
def test_unknown_name_is_an_error(create):
    with pytest.raises(ValueError, match=r"name='resmlp': expected one of .*'resmlp_s12'"):
        create("resmlp", num_classes=10, rngs=nnx.Rngs(0))
