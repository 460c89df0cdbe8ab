import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomp as jc
from jaxcomp.memory._collectives import collective_traffic
from jaxcomp.ops import linear_cross_entropy, linear_log_probs
from tests.helpers import assert_close, kept, normal, slow, without_type_checks

CLASSES = 37


def stock(x, kernel, labels, bias):
    logits = jnp.dot(x, kernel, preferred_element_type=jnp.float32)
    logits += jnp.broadcast_to(bias.astype(jnp.float32), logits.shape)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def arguments(shape=(6, 5), dtype=jnp.float32):
    labels = jnp.asarray(np.random.default_rng(0).integers(0, CLASSES, shape))
    kernel, bias = normal((8, CLASSES), dtype, seed=1), normal((CLASSES,), dtype, seed=2)
    return 2 * normal((*shape, 8), dtype), kernel, labels, bias


@pytest.mark.parametrize(
    ("dtype", "chunk_size"),
    [
        *((jnp.float32, chunk_size) for chunk_size in (1, 8, 37, 4096)),
        (jnp.bfloat16, 8),
        *(slow(jnp.bfloat16, chunk_size) for chunk_size in (1, 37, 4096)),
    ],
)
def test_loss_and_gradients_are_those_of_whole_logits(chunk_size, dtype):
    x, kernel, labels, bias = arguments(dtype=dtype)
    weights = normal((6, 5), seed=3)

    def ours(x, kernel, bias):
        return linear_cross_entropy(x, kernel, labels, bias=bias, chunk_size=chunk_size)

    def theirs(x, kernel, bias):
        return stock(x, kernel, labels, bias)

    found, wanted = (jax.jit(f)(x, kernel, bias) for f in (ours, theirs))
    assert found.dtype == jnp.float32
    assert_close(found, wanted, 1e-6)
    gradients = [
        jax.jit(jax.grad(lambda *a, f=f: (f(*a) * weights).sum(), (0, 1, 2)))(x, kernel, bias)
        for f in (ours, theirs)
    ]
    assert [g.dtype for g in gradients[0]] == [dtype] * 3
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, 1e-5 if dtype == jnp.float32 else 0.02)


@pytest.mark.parametrize(
    ("wanted", "dtype", "chunk_size"),
    kept(
        itertools.product([(1, 0), (0, 1), (1, 1)], [jnp.float32, jnp.bfloat16], [1, 8, 37]),
        [
            *((wanted, jnp.float32, 8) for wanted in [(1, 0), (0, 1), (1, 1)]),
            *(((1, 1), jnp.float32, chunk_size) for chunk_size in (1, 37)),
            ((1, 1), jnp.bfloat16, 8),
        ],
    ),
)
def test_log_probs_entropies_and_gradients_are_those_of_whole_logits(chunk_size, dtype, wanted):
    x, kernel, labels, bias = arguments(dtype=dtype)
    bias = bias.at[9:20].set(-jnp.inf)  # more than a chunk that no example can have
    labels = jnp.where((labels >= 9) & (labels < 20), 0, labels)
    weights = normal((2, 6, 5), seed=3) * jnp.array(wanted)[:, None, None]

    def ours(x, kernel, bias):
        return linear_log_probs(
            x, kernel, labels, bias=bias, temperature=0.7, chunk_size=chunk_size
        )

    def theirs(x, kernel, bias):
        logits = jnp.dot(x, kernel, preferred_element_type=jnp.float32)
        logits = (logits + jnp.broadcast_to(bias.astype(jnp.float32), logits.shape)) / 0.7
        log_probs = jax.nn.log_softmax(logits)
        finite = jnp.where(jnp.isfinite(log_probs), log_probs, 0)
        entropy = -(jnp.exp(log_probs) * finite).sum(-1)
        return jnp.take_along_axis(log_probs, labels[..., None], -1)[..., 0], entropy

    results = [jax.jit(f)(x, kernel, bias) for f in (ours, theirs)]
    assert_close(tuple(results[0]), results[1], 1e-6)
    gradients = [
        jax.jit(jax.grad(lambda *a, f=f: (jnp.stack(f(*a)) * weights).sum(), (0, 1, 2)))(
            x, kernel, bias
        )
        for f in (ours, theirs)
    ]
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, 1e-5 if dtype == jnp.float32 else 0.02)


def test_a_temperature_is_positive():
    x, kernel, labels, _ = arguments()
    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="expected a positive number"):
            linear_log_probs(x, kernel, labels, temperature=temperature)


def test_without_a_bias_under_vmap_and_scan():
    x, kernel, labels, _ = arguments()
    wanted = jax.jit(linear_cross_entropy, static_argnames="chunk_size")(
        x, kernel, labels, chunk_size=8
    )
    assert_close(wanted, jax.jit(stock)(x, kernel, labels, jnp.zeros(CLASSES)), 1e-6)

    def of_row(x, labels):
        return linear_cross_entropy(x, kernel, labels, chunk_size=8)

    assert_close(jax.jit(jax.vmap(of_row))(x, labels), wanted, 1e-6)
    in_turn = jax.jit(lambda *args: jax.lax.map(lambda args: of_row(*args), args))
    assert_close(in_turn(x, labels), wanted, 1e-6)


def test_what_is_not_finite_shows():
    x, kernel, labels, _ = arguments((3,))
    loss = linear_cross_entropy(x.at[0, 0].set(jnp.nan), kernel, labels.at[1].set(-1))
    assert np.isnan(loss).tolist() == [True, True, False]
    found = linear_log_probs(x.at[0, 0].set(jnp.nan), kernel, labels.at[1].set(-1))
    assert np.isnan(found.log_probs).tolist() == [True, True, False]
    assert np.isnan(found.entropy).tolist() == [True, False, False]
    gradient = jax.grad(lambda x: linear_cross_entropy(x, kernel, labels.at[1].set(-1)).sum())(x)
    assert np.isnan(gradient).all(1).tolist() == [False, True, False]
    impossible = linear_cross_entropy(
        x, kernel, jnp.array([0, 1, 2]), bias=jnp.zeros(CLASSES).at[:8].set(-jnp.inf), chunk_size=8
    )
    assert np.isinf(impossible).all()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_sharded_batch_needs_the_gradients_alone(kind):
    x, kernel, labels, _ = arguments((16,))

    @jax.jit
    def gradient(x, kernel, labels):
        def mean(x, kernel):
            return linear_cross_entropy(x, kernel, labels, chunk_size=8).mean()

        return jax.grad(mean, (0, 1))(x, kernel)

    alone = gradient(x, kernel, labels)
    mesh = jax.make_mesh((8,), ("data",), (kind,))
    placed = NamedSharding(mesh, PartitionSpec("data"))
    with jax.set_mesh(mesh):
        inputs = jax.device_put(x, placed), kernel, jax.device_put(labels, placed)
        assert_close(gradient(*inputs), alone, 1e-5)
        text = gradient.lower(*inputs).compile().as_text()
    assert collective_traffic(text) <= 2 * 4 * kernel.size + 256


def test_the_logits_are_not_in_memory():
    tokens, features, classes = 4096, 256, 32_768

    def step(loss):
        def of(x, kernel, labels):
            return jax.grad(lambda *a: loss(*a, labels).mean(), (0, 1))(x, kernel)

        return of

    inputs = (
        jax.ShapeDtypeStruct((tokens, features), jnp.bfloat16),
        jax.ShapeDtypeStruct((features, classes), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    whole, in_chunks = (
        jc.memory.analyze(step(loss), *inputs)
        for loss in (
            lambda x, k, y: stock(x, k, y, jnp.zeros(classes)),
            linear_cross_entropy,
        )
    )
    logits = 4 * tokens * classes
    print(f"whole: {whole.temp_bytes:,} bytes; in chunks: {in_chunks.temp_bytes:,}")
    assert whole.temp_bytes >= logits
    assert in_chunks.temp_bytes < 0.4 * logits


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"chunk_size": 0}, "chunk_size=0: expected 1 or more"),
        ({"labels": jnp.zeros(3, jnp.int32)}, r"labels of shape \(3,\): expected \(\*batch"),
        ({"kernel": jnp.zeros((8, 0))}, r"kernel of shape \(8, 0\): expected at least one class"),
        ({"kernel": jnp.zeros((7, CLASSES))}, r"kernel of shape \(7, 37\)"),
        ({"bias": jnp.zeros(3)}, r"bias of shape \(3,\): expected \(37,\)"),
    ],
)
def test_bad_input(change, error):
    x, kernel, labels, bias = arguments()
    given = {"x": x, "kernel": kernel, "labels": labels, "bias": bias} | change
    with without_type_checks(), pytest.raises(ValueError, match=error):
        linear_cross_entropy(**given)
