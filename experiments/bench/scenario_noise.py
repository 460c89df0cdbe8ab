r"""Measures what codes add to the gradients of the scenarios, in small sizes.

    python -m experiments.bench.scenario_noise --out experiments/results/scenarios-noise

`experiments/zoo/scenarios/small.py` has the sizes. The noise is the norm of the error of a gradient
over that of the exact gradient, the mean of the draws. The bias is the largest z value of the mean
error along 8 random directions: below 4.5 it is chance.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax.flatten_util import ravel_pytree

import jaxcomp as jc
from experiments.common.options import Out
from experiments.common.record import (
    describe_environment,
    make_folder,
    write_json,
    write_table,
)
from experiments.zoo.scenarios.small import LOSSES, SHAPES, arguments

BITS, DRAWS, DIRECTIONS = (8, 4, 3), 48, 8
HEADER = ("scenario", "bits", "noise of a gradient", "largest z of the mean error")


def measure(name: str, bits: int) -> dict[str, Any]:
    """Returns the noise and the bias of one scenario."""
    loss = functools.partial(LOSSES[name], lambda block: block)
    given = arguments(name)
    exact = ravel_pytree(jax.jit(jax.grad(loss))(*given))[0]

    def drawn(seed: jax.Array) -> jax.Array:
        coded = jc.checkpoint(loss, jc.Quantize(bits=bits), seed=seed)
        return ravel_pytree(jax.grad(coded)(*given))[0]

    draws = jax.lax.map(jax.jit(drawn), jnp.arange(DRAWS, dtype=jnp.uint32))
    errors = np.asarray(draws - exact, np.float64)
    along = errors @ np.random.default_rng(1).normal(size=(errors.shape[1], DIRECTIONS))
    z = along.mean(axis=0) / (along.std(axis=0, ddof=1) / DRAWS**0.5)
    noise = np.linalg.norm(errors, axis=1).mean() / np.linalg.norm(np.asarray(exact))
    figures = {"noise": float(noise), "z": float(np.abs(z).max())}
    return {"scenario": name, "bits": bits} | figures


def main(out: Out) -> None:
    """Take the gradients; write noise.json and noise.md."""
    make_folder(out)
    rows = [measure(name, bits) for name in SHAPES for bits in BITS]
    environment = describe_environment()
    write_json(out / "noise.json", environment | {"draws": DRAWS, "rows": rows})
    cells = [[r["scenario"], str(r["bits"]), f"{r['noise']:.3f}", f"{r['z']:.1f}"] for r in rows]
    title = "Codes of all values of the scenarios in small sizes:"
    typer.echo(write_table(out / "noise.md", title, [HEADER, *cells], environment["command"]))


if __name__ == "__main__":
    typer.run(main)
