"""Networks that others published, taken as they are: what compression may and may not change."""

import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxcomp as jc
from jaxcomp.diagnostics._losses import moved
from tests.helpers import assert_same_bits, only
from tests.zoo import convolutional, generative, graphs, language, recurrent, vision

NETWORKS = {
    f"{family.__name__.rpartition('.')[2]}/{make.__name__}": make
    for family, makes in {
        convolutional: ("linen_resnet", "haiku_resnet", "haiku_mobilenet", "equinox_convnext"),
        vision: ("nnx_vit", "equinox_vit", "equinox_vision_mamba"),
        language: (
            *("qwen3", "qwen3_experts", "llama3", "gemma3", "mamba2", "linen_experts"),
            *("whisper", "bart"),
        ),
        generative: ("diffusion_unet", "diffusion_state_space", "vq_vae", "fourier_operator"),
        graphs: ("nnx_attention", "haiku_messages", "equivariant_transformer"),
        recurrent: ("haiku_lstm", "linen_gru"),
    }.items()
    for make in (getattr(family, name) for name in makes)
}
POLICIES = {"stock": None, "exact": jc.Exact(), "coded": only(jc.Quantize(bits=4))}
DRAWS = 64
ROUNDING = 1e-5  # of the gradient of a parameter
OF_ALL = 1e-6  # of the gradient of all: a parameter whose own gradient is zero has rounding alone

pytestmark = [pytest.mark.zoo, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", params=NETWORKS)
def compiled(request):
    """A network, its step by each policy, and how long each took to trace and compile."""
    with jax.numpy_rank_promotion("allow"):
        network = NETWORKS[request.param]()
        steps, seconds = {}, {}
        for name, policy in POLICIES.items():
            step = jax.jit(jax.value_and_grad(network.step(policy), has_aux=True))
            start = time.perf_counter()
            steps[name] = step.lower(network.params, network.arrays, 0).compile()
            seconds[name] = time.perf_counter() - start
    ratio = seconds["coded"] / seconds["stock"]
    print(f"\n{request.param}: {ratio:.1f} times the {seconds['stock']:.1f} s of stock to compile")
    return network, SimpleNamespace(**steps)


def numbers(leaf):
    """An array as numbers, a random key too."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def vectors(gradient):
    return [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(gradient)]


def norm(leaves):
    return float(np.sqrt(sum(np.sum(leaf**2) for leaf in leaves)))


def allowed(gradient):
    """The error of each parameter's gradient that rounding may leave."""
    return [ROUNDING * norm([leaf]) + OF_ALL * norm(gradient) for leaf in gradient]


def test_loss_and_state_have_the_stock_bits(compiled):
    network, steps = compiled
    stock, coded = (step(network.params, network.arrays, 0) for step in (steps.stock, steps.coded))
    assert np.isfinite(stock[0][0])
    assert_same_bits(*(jax.tree.map(numbers, found[0]) for found in (coded, stock)))


def test_exact_gives_the_stock_gradient(compiled):
    network, steps = compiled
    stock, exact = (
        vectors(step(network.params, network.arrays, 0)[1]) for step in (steps.stock, steps.exact)
    )
    errors = [norm([a - b]) for a, b in zip(exact, stock, strict=True)]
    print(f"error with Exact(): {np.linalg.norm(errors) / norm(stock):.1e}")
    assert all(np.array(errors) <= allowed(stock))
    assert np.linalg.norm(errors) <= ROUNDING * norm(stock)


def test_the_coded_gradient_is_unbiased(compiled):
    """Half of the draws says where a bias would be; the other half tests it there.

    The exact gradient is tested as a direction, too: a bias may be a change of length.
    """
    network, steps = compiled

    def errors(draw):
        params = moved(network.params, draw)
        stock, coded = (
            vectors(step(params, network.arrays, draw)[1]) for step in (steps.stock, steps.coded)
        )
        return [a - b for a, b in zip(coded, stock, strict=True)]

    gradient = vectors(steps.stock(network.params, network.arrays, 0)[1])
    sums = errors(0)
    for draw in range(1, DRAWS // 2):
        sums = [total + error for total, error in zip(sums, errors(draw), strict=True)]
    directions = [
        [d / max(norm([d]), np.finfo(float).tiny) for d in pair]
        for pair in zip(sums, gradient, strict=True)
    ]
    along = np.array(
        [
            [
                [error @ d for d in pair]
                for error, pair in zip(errors(draw), directions, strict=True)
            ]
            for draw in range(DRAWS // 2, DRAWS)
        ]
    )  # draws, parameters, two directions
    deviation = along.std(0, ddof=1) / (DRAWS // 2) ** 0.5
    limit = stats.t.isf(1e-6 / (2 * deviation.size), DRAWS // 2 - 1)
    excess = np.maximum(np.abs(along.mean(0)) - np.array(allowed(gradient))[:, None], 0)
    z = excess / np.maximum(deviation, np.finfo(float).tiny)
    noise = norm([deviation]) / norm(gradient)
    print(f"largest z: {z.max():.1f}, {limit:.1f} are allowed; noise of a mean: {noise:.1e}")
    assert noise > ROUNDING  # something was encoded
    assert z.max() < limit
