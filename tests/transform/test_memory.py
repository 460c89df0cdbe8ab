"""What `checkpoint` declares is what XLA's buffer assignment comes to; nothing is run."""

import pytest

from experiments.bench.checkpoint import measure


def test_h100_keeps_what_a_convolution_unit_declares(capsys):
    pytest.importorskip("jax_cuda13_plugin")
    figures = measure("conv", "each", "h100")
    declared, compiled = figures["declared_bytes"], figures["compiled_bytes"]
    with capsys.disabled():
        print(f"\nh100, 4 bits: declares {declared / 2**20:.2f}, adds {compiled / 2**20:.2f}")
    assert compiled <= 1.1 * declared
