import functools
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcomp as jc
from jaxcomp.models import resnet
from jaxcomp.nn._coded import coded_modules
from jaxcomp.planning._remat import remat_blocks
from tests.helpers import slow

# Published counts: torchvision's documentation of its weights (1000 classes); He et al.,
# arXiv:1512.03385, table 6 (10 classes), to the last digit for shortcuts without parameters.
COUNTS = {
    ("resnet18", 1000): 11_689_512,
    ("resnet34", 1000): 21_797_672,
    ("resnet50", 1000): 25_557_032,
    ("resnet101", 1000): 44_549_160,
    ("resnet152", 1000): 60_192_808,
    ("resnet20", 10): 269_722,
    ("resnet32", 10): 464_154,
    ("resnet44", 10): 658_586,
    ("resnet56", 10): 853_018,
    ("resnet110", 10): 1_727_962,
}


def _abstract(name: str, spec: str = "exact", num_classes: int = 10) -> resnet.ResNet:
    return nnx.eval_shape(
        lambda: resnet.create(name, num_classes=num_classes, policy=spec, rngs=nnx.Rngs(0))
    )


def _count(model: resnet.ResNet) -> int:
    return sum(math.prod(p.shape) for p in nnx.to_flat_state(nnx.state(model, nnx.Param)).leaves)


DEEP = ("resnet34", "resnet101", "resnet152", "resnet32", "resnet44", "resnet56", "resnet110")


@pytest.mark.parametrize(
    ("name", "classes"),
    [pytest.param(*k, marks=[pytest.mark.slow] if k[0] in DEEP else []) for k in COUNTS],
    ids=[name for name, _ in COUNTS],
)
def test_parameter_counts_are_the_published_ones(name: str, classes: int) -> None:
    assert _count(_abstract(name, num_classes=classes)) == COUNTS[name, classes]


@pytest.mark.slow
def test_parameter_count_of_the_pre_activation_network() -> None:
    n = (164 - 2) // 9  # blocks of three convolutions in each of three stages
    total, cin = 3 * 9 * 16, 16  # the stem
    for width in (16, 32, 64):
        cout = 4 * width
        total += n * (2 * width + 9 * width**2 + 2 * width + width * cout)  # all but the first conv
        total += 2 * cin + cin * width + cin * cout  # first block: norm, convolution, shortcut
        total += (n - 1) * (2 * cout + cout * width)
        cin = cout
    total += 2 * cin + 10 * cin + 10
    assert round(total / 1e6, 1) == 1.7  # as published (arXiv:1603.05027, table 4)
    assert _count(_abstract("preact164")) == total


@pytest.mark.parametrize(("name", "giga_macs"), [("resnet18", 1.814), slow("resnet50", 4.089)])
def test_multiplications_are_the_published_ones(name: str, giga_macs: float) -> None:
    """At 224 pixels, as torchvision documents them; where the stride is changes them (v1.5)."""
    graphdef, state = nnx.split(_abstract(name, num_classes=1000))
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    forward = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, images)
    macs = 0
    for equation in forward.eqns:
        if equation.primitive.name in ("conv_general_dilated", "dot_general"):
            (out,), kernel = equation.outvars, equation.invars[1]
            macs += out.aval.size * kernel.aval.size // kernel.aval.shape[-1]
    assert round(macs / 1e9, 3) == giga_macs


def test_a_pre_activation_network_pools_before_its_blocks() -> None:
    seen = []

    def call(images: jax.Array) -> jax.Array:
        model = resnet.ResNet(
            resnet.PreActBottleneck, (1,), 4, imagenet=True, num_classes=3, rngs=nnx.Rngs(0)
        )
        block = model.blocks[0]
        model.blocks = nnx.List([lambda x: seen.append(x.shape) or block(x)])
        return model(images)

    jax.eval_shape(call, jnp.ones((2, 32, 32, 3)))
    assert seen == [(2, 8, 8, 4)]


def test_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"name='resnet19': expected one of .*'resnet18'"):
        resnet.create("resnet19", num_classes=10, rngs=nnx.Rngs(0))


def test_rule_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="matches nothing"):
        policy = jc.Policy((jc.Rule(jc.Quantize(bits=2), op="conv", path="layer1/.*"),))
        nnx.eval_shape(
            lambda: resnet.create("resnet20", num_classes=10, policy=policy, rngs=nnx.Rngs(0))
        )


SPECS = ("cast:dtype=bfloat16", "pooling:window=2", "quantize:bits=2", "quantize:bits=8")
NETWORKS: dict[str, typing.Any] = {
    "imagenet": (resnet.Bottleneck, (1, 1), 4, True),
    "cifar": (resnet.BasicBlock, (1, 1), 8, False),
    "pre-activation": (resnet.PreActBottleneck, (1, 1), 4, False),
}
CASES: list[typing.Any] = [("cifar", spec) for spec in SPECS[:2]]
CASES += [("imagenet", "quantize:bits=2"), ("imagenet", "fused:bits=4")]
MORE = [("cifar", "fused:bits=4"), ("pre-activation", "fused:bits=4")]
MORE += [("imagenet", "quantize:bits=8"), ("imagenet", "fused:bits=4,scale_source=range")]
MORE += [("cifar", "quantize:bits=2"), ("pre-activation", "quantize:bits=2")]
MORE += [("imagenet", "fused:bits=3,scale_source=range")]
CASES += [slow(*case) for case in MORE]
BATCH, CLASSES = 8, 3
IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, 16, 16, 3)), jnp.float32)


def _small(
    network: str, spec: str | jc.Policy, remat: bool = False, dtype: typing.Any = None
) -> resnet.ResNet:
    block, depths, width, imagenet = NETWORKS[network]
    model = resnet.ResNet(
        block,
        depths,
        width,
        imagenet=imagenet,
        num_classes=CLASSES,
        dtype=dtype,
        rngs=nnx.Rngs(0),
    )
    jc.compress(model, spec)
    return remat_blocks(model) if remat else model


def _value(rng: np.random.Generator, path: typing.Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """A value for a parameter or a statistic; Flax's own initializers take long to compile."""
    name = jax.tree_util.keystr(path)
    noise = rng.normal(size=leaf.shape)
    if "kernel" in name:
        value = noise / math.sqrt(math.prod(leaf.shape[:-1]))
    else:
        value = 0.2 * noise + ("scale" in name or "var" in name)
    return jnp.asarray(value, leaf.dtype)


class Step(typing.NamedTuple):
    logits: jax.Array
    gradients: nnx.State
    statistics: nnx.State


@functools.cache
def _compile(
    network: str, spec: str | jc.Policy, remat: bool = False
) -> typing.Callable[[jax.Array], Step]:
    graphdef, *state = nnx.split(
        nnx.eval_shape(lambda: _small(network, spec, remat)), nnx.Param, nnx.BatchStat
    )
    rng = np.random.default_rng(0)
    params, statistics = jax.tree.map_with_path(functools.partial(_value, rng), state)

    @jax.jit
    def step(images: jax.Array) -> Step:
        def loss(params: nnx.State) -> tuple[jax.Array, typing.Any]:
            model = nnx.merge(graphdef, params, statistics, copy=True)
            logits = model(images)
            losses = -jax.nn.log_softmax(logits)[jnp.arange(BATCH), jnp.arange(BATCH) % CLASSES]
            return losses.mean(), (logits, nnx.state(model, nnx.BatchStat))

        gradients, (logits, new) = jax.grad(loss, has_aux=True)(params)
        return Step(logits, gradients, new)

    return step


def _vector(gradients: nnx.State) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradients)])


def _error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(("network", "spec"), CASES)
def test_forward_is_exact_and_a_step_is_finite(network: str, spec: str) -> None:
    got, expected = _compile(network, spec)(IMAGES), _compile(network, "exact")(IMAGES)
    for a, b in zip(*map(jax.tree.leaves, (got[::2], expected[::2])), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    gradient = _vector(got.gradients)
    assert np.isfinite(gradient).all()
    assert 0 < _error(gradient, _vector(expected.gradients)) < 1


@pytest.mark.parametrize("spec", ["exact", slow("quantize:bits=8")])
def test_remat_changes_nothing_but_rounding(spec: str) -> None:
    got = _compile("imagenet", spec, remat=True)(IMAGES)
    expected = _compile("imagenet", spec)(IMAGES)
    for a, b in zip(*map(jax.tree.leaves, (got[::2], expected[::2])), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    error = _error(_vector(got.gradients), _vector(expected.gradients))
    assert error < (1e-4 if spec == "exact" else 1e-2)


@pytest.mark.slow
def test_eight_bits_are_close() -> None:
    got, expected = (
        _compile("imagenet", s)(IMAGES).gradients for s in ("quantize:bits=8", "exact")
    )
    assert _error(_vector(got), _vector(expected)) < 0.02


def test_mean_gradient_over_draws_is_near_the_exact_one() -> None:
    expected = _vector(_compile("imagenet", "exact")(IMAGES).gradients)
    draws = 64

    def errors(policy: str | jc.Policy) -> tuple[float, float]:
        step = _compile("imagenet", policy)
        # The noise is a hash of the values: a change of their last bits draws all of it again.
        rng = np.random.default_rng(0)
        images = [IMAGES + 1e-5 * rng.normal(size=IMAGES.shape) for _ in range(draws)]
        gradients = np.stack([_vector(step(x.astype(IMAGES.dtype)).gradients) for x in images])
        one = float(np.mean([_error(gradient, expected) for gradient in gradients]))
        return one, _error(gradients.mean(0), expected)

    # Linear in what is coded: no bias, so the error of the mean falls with the root of the draws.
    one, mean = errors(jc.Policy((jc.Rule(jc.Quantize(bits=2), op="conv|dot"),)))
    assert mean < 1.5 * one / math.sqrt(draws)
    # A norm's gradient is not (see `ops.batch_norm`); its bias is small beside the noise.
    one, mean = errors("quantize:bits=2")
    assert mean < one / 3


@pytest.mark.parametrize("strategy", ["fused:bits=4", slow("fused:bits=4,scale_source=range")])
def test_one_code_for_each_unit_is_unbiased_too(strategy: str) -> None:
    expected = _vector(_compile("imagenet", "exact")(IMAGES).gradients)
    step = _compile("imagenet", strategy)
    rng = np.random.default_rng(0)
    draws = [IMAGES + 1e-5 * rng.normal(size=IMAGES.shape) for _ in range(64)]
    gradients = np.stack([_vector(step(x.astype(IMAGES.dtype)).gradients) for x in draws])
    one = float(np.mean([_error(gradient, expected) for gradient in gradients]))
    assert _error(gradients.mean(0), expected) < one / 3


def test_a_fused_network_stores_codes_only() -> None:
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: _small("imagenet", "fused:bits=4", dtype=jnp.bfloat16))
    )

    def forward(state: nnx.State, x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, state)(x)

    pullback = jax.eval_shape(lambda s, x: jax.vjp(forward, s, x)[1], state, IMAGES)
    large = [a for a in jax.tree.leaves(pullback) if a.ndim == 4 and a.shape[0] == BATCH]
    kept = [a for a in large if a.dtype != jnp.uint4]
    assert [a.shape for a in kept] == [IMAGES.shape]


def test_evaluation_stores_nothing_and_is_as_ever() -> None:
    def evaluate(spec: str) -> jax.Array:
        model = _small("imagenet", spec)
        model.eval()
        return model(IMAGES)

    got, expected = (jax.jit(evaluate, static_argnums=0)(s) for s in ("fused:bits=2", "exact"))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_state_is_the_same_whatever_the_policy() -> None:
    expected = nnx.state(nnx.eval_shape(lambda: _small("imagenet", "exact")))
    for spec in SPECS:
        model = nnx.eval_shape(lambda spec=spec: _small("imagenet", spec))
        convolutions = [m for m in coded_modules(model).values() if m.kind == "conv"]
        assert convolutions and all(m.codec is not None for m in convolutions)
        got = nnx.state(model)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        assert jax.tree.leaves(got) == jax.tree.leaves(expected)
        nnx.split(model, nnx.Param, nnx.BatchStat)  # fails if there is any other state


@pytest.mark.slow
def test_declared_bytes_fall() -> None:
    def declared(spec: str) -> int:
        model = nnx.eval_shape(lambda: _small("imagenet", spec))
        graphdef, state = nnx.split(model)
        images = jax.ShapeDtypeStruct((8, 64, 64, 3), jnp.float32)

        def forward(state: nnx.State, x: jax.Array) -> jax.Array:
            return nnx.merge(graphdef, state)(x)

        return jc.memory.declared_residual_bytes(forward, state, images)

    order = "quantize:bits=2", "quantize:bits=4", "pooling:window=2", "exact"
    figures = [declared(spec) for spec in order]
    assert figures == sorted(set(figures))
    # Of 32-bit values two inputs (of the norm, of the convolution) and a mask wait.
    assert figures[0] < 0.1 * figures[-1]


def test_bfloat16_computes_in_it_and_keeps_parameters_in_float32() -> None:
    model = nnx.eval_shape(lambda: _small("imagenet", "quantize", dtype=jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    graphdef, state = nnx.split(model)

    def forward(state: nnx.State, x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, state)(x)

    logits, pullback = jax.eval_shape(lambda s, x: jax.vjp(forward, s, x), state, IMAGES)
    assert (logits.shape, logits.dtype) == ((BATCH, CLASSES), jnp.float32)
    large = [a for a in jax.tree.leaves(pullback) if a.size >= BATCH * 4 * 4 * 4]
    kept = {a.dtype.name for a in large if a.shape[0] == BATCH}
    assert kept == {"uint4", "uint8", "bfloat16"}  # codes, masks, the images


def test_window_larger_than_a_map_is_an_error() -> None:
    graphdef, state = nnx.split(_abstract("resnet20", "pooling:window=9"))
    images = jax.ShapeDtypeStruct((8, 32, 32, 3), jnp.float32)  # the last maps are 8 by 8
    with pytest.raises(ValueError, match="window=9"):
        jax.eval_shape(lambda state, x: nnx.merge(graphdef, state)(x), state, images)
