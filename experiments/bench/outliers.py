r"""Measures the error of codes for values with outliers, such as language models have.

    python -m experiments.bench.outliers --out experiments/results/outliers

The values are made, not those of a model: normal ones, each channel with a scale of its own. With
"outlier channels", one channel in 128 is 60 times as large, and another has a mean of 30. With
"massive tokens", the first token of each sample is 500 times as large in three channels, too (Sun
et al., "Massive Activations in Large Language Models", COLM 2024, section 2). A Hadamard rotation
of 64 channels before the code, and back after it, is what QuaRot does (Ashkboos et al., NeurIPS
2024, section 4). An error is a part of the variance of its channel. The total is a part of the
variance of all channels, in which the largest ones count most.
"""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jaxtyping import Array, Float
from scipy.linalg import hadamard

from experiments.common.options import Out, usage_errors
from experiments.common.record import describe_environment, make_folder, write_json, write_table
from jaxcomp.codecs import Codec, Quantize

SAMPLES, TOKENS, CHANNELS, ROTATED = 8, 512, 1024, 64
CODES: dict[str, tuple[Codec, bool]] = {
    name: code
    for bits in (2, 3, 4)
    for name, code in (
        (f"{bits} bits", (Quantize(bits), False)),
        (f"{bits} bits, dither", (Quantize(bits, rounding="dither"), False)),
        (f"{bits} bits, rotated", (Quantize(bits), True)),
    )
}
Values = Float[Array, "samples tokens channels"]


def made(seed: int) -> dict[str, Values]:
    """Makes the values of each kind."""
    values, scales = jax.random.split(jax.random.key(seed))
    channel = jnp.arange(CHANNELS)
    scale = jnp.exp(0.7 * jax.random.normal(scales, (1, 1, CHANNELS)))
    normal = scale * jax.random.normal(values, (SAMPLES, TOKENS, CHANNELS))
    mean = jnp.where(channel % 128 == 7, 30.0, 0.0)[None, None]
    outliers = normal * jnp.where(channel % 128 == 5, 60.0, 1.0)[None, None] + mean
    massive = outliers.at[:, 0, jnp.array([5, 400, 900])].multiply(500)
    return {"normal": normal, "outlier channels": outliers, "massive tokens": massive}


def rotated(x: Values) -> Values:
    """Rotates each 64 channels by a Hadamard matrix, which is its own inverse."""
    matrix = jnp.asarray(hadamard(ROTATED) / np.sqrt(ROTATED), x.dtype)
    groups = x.reshape(*x.shape[:-1], -1, ROTATED)
    return jnp.einsum("stgc,cd->stgd", groups, matrix).reshape(x.shape)


def errors(x: Values, codec: Codec, rotates: bool) -> dict[str, float]:
    """Returns mean squared errors over variances, without first tokens."""
    turn = rotated if rotates else lambda values: values
    decoded = turn(codec.decode(codec.encode(turn(x), 1)))
    error = jnp.square(decoded - x)[:, 1:].mean((0, 1))
    variance = jnp.var(x[:, 1:], (0, 1))
    return {
        "median": float(jnp.median(error / variance)),
        "mean": float(jnp.mean(error / variance)),
        "total": float(jnp.sum(error) / jnp.sum(variance)),
    }


@usage_errors()
def main(
    out: Out, seed: Annotated[int, typer.Option(help="Seed of the values.", min=0)] = 0
) -> None:
    """Encode the values of each kind by each code; write outliers.json and outliers.md."""
    make_folder(out)
    rows: list[dict[str, Any]] = []
    for kind, x in made(seed).items():
        for name, (codec, rotates) in CODES.items():
            bits = 8 * codec.nbytes(x.shape, x.dtype) / x.size
            figures = errors(x, codec, rotates)
            rows.append({"kind": kind, "row": name, "bits": bits} | figures)
    content = describe_environment() | {"seed": seed, "rows": rows}
    write_json(out / "outliers.json", content)
    table = [["values", "code", "bits", "median channel", "mean of channels", "total"]]
    for row in rows:
        shown = (f"{row[figure]:.2g}" for figure in ("median", "mean", "total"))
        table.append([row["kind"], row["row"], f"{row['bits']:.2f}", *shown])
    title = "Error of codes over the variance of a channel:"
    typer.echo(write_table(out / "outliers.md", title, table, content["command"]))


if __name__ == "__main__":
    typer.run(main)
