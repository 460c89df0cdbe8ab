import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import memory
from jaxcomp.codecs import noise
from tests.helpers import DTYPES, normal, shard, slow, without_type_checks, z_limit

STD = 12**-0.5  # of a uniform number


def assert_uniform(u):
    """Mean, variance, histogram and lag-1 correlation are those of independent uniform numbers."""
    u = np.asarray(u, np.float64)
    assert 0 < u.min() < u.max() < 1
    limit = z_limit(4)
    assert abs(u.mean() - 0.5) < limit * STD / u.size**0.5
    assert abs(u.var() - STD**2) < limit * (1 / 180 / u.size) ** 0.5  # the variance of (u - 1/2)^2
    lag = ((u[1:] - 0.5) * (u[:-1] - 0.5)).ravel()
    assert abs(lag.mean()) < limit * STD**2 / lag.size**0.5
    counts = np.histogram(u, 64, (0, 1))[0]
    chi2 = ((counts - u.size / 64) ** 2 / (u.size / 64)).sum()
    assert abs(chi2 - 63) < limit * (2 * 63) ** 0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniform_over_values_without_a_seed(dtype):
    assert_uniform(noise.uniform(normal((1 << 17,), dtype)))


def test_uniform_over_indices_of_one_value():
    assert_uniform(noise.uniform(jnp.full((64, 2048), 1.5)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_uniform_over_values_at_one_index(dtype):
    """Every float16 of a sign, or as many neighbouring float32: only the value tells them apart."""
    word = {jnp.float32: jnp.uint32, jnp.float16: jnp.uint16}[dtype]
    bits = jnp.arange(30000, dtype=word) + jnp.asarray(1.0, dtype).view(word) // 4
    assert_uniform(jax.vmap(noise.uniform)(bits.view(dtype)[:, None])[:, 0])


def test_uniform_over_seeds_and_unrelated_between_them():
    draws = jax.vmap(lambda seed: noise.uniform(normal((16,)), seed))(jnp.arange(-4000, 4000))
    assert_uniform(draws)  # the lag is from a seed to the next
    assert_uniform(draws.T)  # from an element to the next


def test_noise_tells_nothing_about_the_value():
    x = normal((1 << 17,))
    u = np.asarray(noise.uniform(x), np.float64) - 0.5
    for f in (np.asarray(x, np.float64), np.asarray(x, np.float64) % 0.01 - 0.005):
        z = (u * f).sum() / (STD * np.linalg.norm(f))
        assert abs(z) < z_limit(2)


def test_deterministic_and_none_is_seed_zero():
    x = normal((4, 5))
    np.testing.assert_array_equal(noise.uniform(x), noise.uniform(x, 0))
    assert not np.any(np.asarray(noise.uniform(x, 0)) == np.asarray(noise.uniform(x, 1)))


def test_differs_between_vmap_lanes_and_scan_steps():
    x = normal((6, 3, 5))
    lanes = jax.vmap(noise.uniform)(x)
    _, steps = jax.lax.scan(lambda carry, x: (carry, noise.uniform(x)), 0, x)
    np.testing.assert_array_equal(lanes, steps)
    assert len(np.unique(lanes)) > 0.99 * x.size  # 90 draws from 2^16 numbers
    for i in range(6):
        np.testing.assert_array_equal(lanes[i], noise.uniform(x[i]))


def test_differs_between_the_shards_of_equal_values_but_not_from_one_device():
    x = jnp.full((16, 5), 0.3)
    u = jax.jit(noise.uniform)(shard(x))
    np.testing.assert_array_equal(u, noise.uniform(x))
    assert len(np.unique(u)) > 0.9 * x.size


def test_index_is_row_major_in_any_rank():
    flat = noise.uniform(jnp.ones(2 * 3 * 4 * 5))
    for shape in [(120,), (6, 20), (2, 3, 4, 5), (1, 120, 1)]:
        np.testing.assert_array_equal(jax.jit(noise.uniform)(jnp.ones(shape)).ravel(), flat)


@pytest.mark.parametrize("seed", [1.5, np.array([1, 2]), True])
def test_seed_other_than_an_integer_scalar_is_an_error(seed):
    message = "seed .*expected an integer scalar"
    with without_type_checks(), pytest.raises(TypeError, match=message):
        noise.uniform(jnp.ones(3), seed)


def test_key_as_seed_is_an_error():
    message = "seed .*expected an integer scalar"
    with without_type_checks(), pytest.raises(TypeError, match=message):
        noise.uniform(jnp.ones(3), jax.random.key(0))


def test_numbers_lie_on_their_grid():
    numbers = np.asarray(noise.uniform(normal((64, 1024))), np.float64)
    index = numbers * 2**16 - 0.5
    np.testing.assert_array_equal(index, np.round(index))
    assert 0 <= index.min() < 8
    assert 2**16 - 9 < index.max() < 2**16


def test_fingerprint_changes_with_any_value_and_its_place():
    x = normal((5, 7))
    prints = {int(noise.fingerprint(x, x)), int(noise.fingerprint(x)), int(noise.fingerprint())}
    for i, j in np.ndindex(5, 7):
        prints.add(int(noise.fingerprint(x.at[i, j].set(jnp.nextafter(x[i, j], 10.0)))))
    prints.add(int(noise.fingerprint(x[::-1])))
    assert len(prints) == 3 + 35 + 1


def test_fingerprint_changes_with_signs_and_powers_of_two():
    x = normal((64,))
    prints = {int(noise.fingerprint(a)) for a in (x, -x, 2 * x, x / 4, x * 0, x * 0 + 1)}
    signs = jnp.where(normal((500, 8, 8)) > 0, 1.0, -1.0)
    assert len(prints) == 6
    assert len(set(jax.vmap(noise.fingerprint)(signs).tolist())) == 500


def test_fingerprint_has_no_gradient():
    gradient = jax.grad(lambda x: x.sum() + noise.fingerprint(x).astype(jnp.float32) * 0)
    assert gradient(jnp.ones(3)).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "shape", [(3, 5), slow((64, 24)), (1000, 300), slow((16, 28, 28, 8)), (70_000,)]
)
def test_spot_check_sees_what_is_beside_padding(shape):
    """Numbers in the first or last percent of an axis, or at one index, are not all of an array."""
    x = normal(shape)
    arrays = [x, 0 * x, x[::-1], x * 1j, jnp.ones(shape)]
    for axis, size in enumerate(shape):
        along = jnp.moveaxis(x, axis, 0)
        percent = -(-size // 100)
        places = [*range(size)] if size <= 64 else [np.s_[:percent], np.s_[-percent:]]
        kept = (jnp.zeros_like(along).at[place].set(along[place]) for place in places)
        arrays += [jnp.moveaxis(part, 0, axis) for part in kept]
    assert len({int(noise.spot_check(x)) for x in arrays}) == len(arrays)


def test_spot_check_sees_any_percent_of_an_array():
    rng = np.random.default_rng(0)
    shape = (32, 40, 50)
    zeros = noise.spot_check(jnp.zeros(shape))
    for _ in range(50):
        x = jnp.zeros(shape).at[tuple(rng.integers(shape, size=(640, 3)).T)].set(1)
        assert noise.spot_check(x) != zeros


@pytest.mark.aot
@pytest.mark.parametrize("shape", [(50257, 768), (100_000_000,)])
def test_a_tpu_samples_a_large_array(shape):
    """A strided slice of all of it would have to fit into the vector memory."""
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert memory.analyze(noise.spot_check, x, target="v5e").estimated_cycles < 10_000


@pytest.mark.parametrize("bits", [1, 4, 7, 8])
def test_rounded_is_the_integer_part_of_the_sum(bits):
    rng, top = np.random.default_rng(0), 2**bits - 1
    level = np.concatenate([rng.uniform(0, top, 100_000), np.arange(top + 1)]).astype(np.float32)
    words = rng.integers(0, 2**32, level.size, dtype=np.uint32)
    rounded = jax.jit(lambda *of: noise.rounded(*of, bits))(level, words)
    grid = 2.0**15 if bits == 8 else 2.0**16
    on_grid = np.round(level.astype(np.float64) * grid) / grid
    exact = np.floor(on_grid + np.floor(words * (grid / 2**32)) / grid)
    np.testing.assert_array_equal(rounded, exact)
    np.testing.assert_array_equal(rounded[-top - 1 :], np.arange(top + 1))


@pytest.mark.parametrize("level", [0.0, 1.7, 3.0])
def test_rounded_takes_constants(level):
    """XLA must not join the constants of the sum."""
    words = jnp.arange(2**16, dtype=jnp.uint32) << 16
    rounded = jax.jit(lambda w: noise.rounded(jnp.full(w.shape, level), w, 2))(words)
    np.testing.assert_allclose(rounded.mean(), level, atol=2.0**-17)
    levels = jnp.linspace(0, 3, 301)
    word = jnp.uint32(0.123 * 2**32)
    rounded = jax.jit(lambda x: noise.rounded(x, jnp.full(x.shape, word), 2))(levels)
    np.testing.assert_array_equal(rounded, np.floor(np.asarray(levels, np.float64) + 0.123))
    nearest = noise.rounded(levels, jnp.asarray(noise.HALF), 2)
    np.testing.assert_array_equal(nearest, np.floor(np.asarray(levels, np.float64) + 0.5))


@pytest.mark.parametrize("channels", [64, 1024, 2048])
def test_words_of_indices_are_independent_along_each_channel(channels):
    @jax.jit
    def sums(seed):
        words = noise.indexed_words((4096, channels), noise.folded(seed, 0))
        return (noise.fraction(words) - 0.5).sum(0)

    seeds = jnp.arange(max(8, 4096 // channels))
    variance = jnp.square(jax.lax.map(sums, seeds)).mean() * 12 / 4096
    assert float(variance) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("shape", [(2**18,), (16, 8, 32, 64)])
def test_words_of_indices_are_uniform_and_independent_of_their_neighbours(shape):
    draw = jax.jit(lambda seed: noise.fraction(noise.indexed_words(shape, noise.folded(seed, 0))))
    u, other = (np.asarray(draw(seed)) - 0.5 for seed in (0, 1))
    count = np.histogram(u, 64, (-0.5, 0.5))[0]
    assert ((count - u.size / 64) ** 2 / (u.size / 64)).sum() < 120  # 63 degrees of freedom
    pairs = [(u, other), *((u, np.roll(u, n, axis)) for axis in range(u.ndim) for n in (1, 2, 3))]
    for a, b in pairs:
        assert abs((a * b).mean() * 12) < 5 / math.sqrt(u.size)


@pytest.mark.parametrize("shape", [(2**18,), (64, 64, 64)])
def test_words_of_two_codes_are_uniform_and_independent(shape):
    words = noise.indexed_words(shape, noise.folded(0, 0))
    u, *others = (np.asarray(noise.fraction(noise.other_words(words, i))) - 0.5 for i in range(3))
    for i, other in enumerate(others):
        assert_uniform(other.ravel() + 0.5)
        for one in (u, *others[:i]):
            for shift in (0, 1, 2, 64):
                assert abs((one * np.roll(other, shift)).mean() * 12) < 5 / math.sqrt(u.size)


def test_words_of_indices_do_not_depend_on_the_form():
    """Axis by axis, as on a TPU, by a count, in a loop and in a batch."""
    shape, salt = (3, 5, 7), noise.folded(3, 0)
    index = jnp.arange(105, dtype=jnp.uint32).reshape(shape)
    by_axes = jax.jit(lambda salt: noise._salted_index(shape, 1, salt & 0))(salt)
    np.testing.assert_array_equal(by_axes, index)
    words = noise.indexed_words(shape, salt)
    pair = noise._pair_hash(index >> 1, salt)
    np.testing.assert_array_equal(words, jnp.where(index % 2 == 0, pair << 16, pair))
    salts = jnp.stack([salt, salt + 1])
    batch = jax.vmap(lambda salt: noise.indexed_words(shape, salt))(salts)
    _, loop = jax.lax.scan(lambda c, salt: (c, noise.indexed_words(shape, salt)), 0, salts)
    np.testing.assert_array_equal(batch, loop)
    np.testing.assert_array_equal(batch[0], words)


def test_salt_differs_with_all_elements_of_parameters_and_the_order_of_samples():
    x, scale, bias = normal((40, 6, 8)), jnp.ones(8), jnp.ones(8)
    salts = [noise.salt(None, y, scale, bias) for y in (x, x[::-1], x[:, ::-1], x[..., ::-1], -x)]
    salts += [noise.salt(1, x, scale, bias), noise.salt(None, x), noise.salt(None, x, scale)]
    salts += [noise.salt(None, x, scale, -bias), noise.salt(None, -x, scale, -bias)]
    salts += [noise.salt(None, x, 2 * scale, bias), noise.salt(None, x, 2 * scale, 2 * bias)]
    for i in range(8):
        one, other = scale.at[i].set(-1), scale.at[i].set(1 + 1e-7)
        salts += [noise.salt(None, x, one, bias), noise.salt(None, x, scale, other)]
        salts += [noise.salt(None, x, one, one)]
    assert len({*map(int, salts)}) == len(salts)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_salts_differ_with_signs_and_powers_of_two(dtype):
    rng, count = np.random.default_rng(0), 10_000
    signs = np.where(rng.random((count, 4, 40)) < 0.5, 1.0, -1.0)
    powers = np.exp2(rng.integers(-3, 4, (count, 4, 40)))
    x = jnp.asarray(np.concatenate([signs, powers]), dtype)
    ones, of_signs = jnp.ones((2 * count, 12)), jnp.asarray(signs[:, 0, :12], dtype)
    salt = jax.jit(jax.vmap(lambda *arrays: noise.salt(None, *arrays)))
    assert len(set(salt(x, ones, ones).tolist())) == 2 * count
    parameters = of_signs[: count // 2], of_signs[count // 2 :]
    same = jnp.broadcast_to(x[0], (count // 2, 4, 40))
    different = len({row.tobytes() for row in np.concatenate(parameters, 1)})
    assert len(set(salt(same, *parameters).tolist())) == different


def test_words_have_the_upper_bits_of_the_hash():
    x = normal((64, 64))
    numbers = noise.fraction(noise.words(x, 3))
    np.testing.assert_array_equal(numbers, noise.uniform(x, 3))
    upper = noise._hash(x, noise._mix(jnp.uint32(4))) >> 16
    np.testing.assert_array_equal(noise.words(x, 3) >> 16, upper)
