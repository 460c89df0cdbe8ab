import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxcomp.memory import _batch as batch
from jaxcomp.memory import analyze, max_batch


def sine(size):
    return jnp.sin, (jax.ShapeDtypeStruct((size, 250), jnp.float32),)


@pytest.mark.parametrize("multiple", [1, 3, 8])
def test_the_largest_multiple_that_fits(multiple):
    """An array of 1000 bytes an example and its sine: 100 examples, no more."""
    found = max_batch(sine, "cpu", multiple=multiple, capacity=200_999)
    assert found == 100 // multiple * multiple


def test_nothing_fits():
    assert max_batch(sine, "cpu", capacity=1000) == 0


def search(monkeypatch, total, usable):
    """The answer, and the sizes compiled, where `total` tells the bytes of a size."""
    sizes = []
    template = analyze(jnp.sin, 1.0, target="cpu")

    def fake(step, size, **kwargs):
        sizes.append(size)
        needed = total(size)
        return dataclasses.replace(
            template, total_bytes=needed, usable_bytes=usable, fits=needed <= usable
        )

    monkeypatch.setattr(batch, "analyze", fake)
    return max_batch(lambda size: (None, (size,)), "any"), sizes


def test_few_compilations_for_a_line(monkeypatch):
    found, sizes = search(monkeypatch, lambda n: 10**6 + 12345 * n, usable=10**9)
    largest = (10**9 - 10**6) // 12345
    assert 0.99 * largest < found <= largest
    assert len(sizes) <= 5


@pytest.mark.parametrize("step", [7, 64, 1000])
def test_steps_and_bends_end_soon(monkeypatch, step):
    def total(n):
        return 1000 * step * -(-n // step) + n**2 // 50

    found, sizes = search(monkeypatch, total, usable=30_000_000)
    assert total(found) <= 30_000_000 < total(found + max(1, found // 100))
    assert len(sizes) < 20


def test_sizes_that_a_step_rounds_up(monkeypatch):
    found, _ = search(monkeypatch, lambda n: 1000 * -(-n // 32), usable=50_000)
    assert found == 50 * 32


def test_a_refused_program_of_unknown_size_is_too_large(monkeypatch):
    template = analyze(jnp.sin, 1.0, target="cpu")

    def fake(step, size, **kwargs):
        fits = size <= 21
        total = 10 * size if fits else None
        return dataclasses.replace(template, total_bytes=total, usable_bytes=10**6, fits=fits)

    monkeypatch.setattr(batch, "analyze", fake)
    assert max_batch(lambda size: (None, (size,)), "any") == 21


def test_bad_input():
    with pytest.raises(ValueError, match="multiple=0: expected a positive number"):
        max_batch(sine, "cpu", multiple=0, capacity=1000)
    with pytest.raises(ValueError, match="target='cpu': its memory is not known; give a capacity"):
        max_batch(sine, "cpu")


def test_a_step_that_ignores_the_batch_is_an_error():
    with pytest.raises(ValueError, match=r"batches of \[8, 16, 32, 64\] need the same memory"):
        max_batch(lambda size: sine(64), "cpu", capacity=10**6)
