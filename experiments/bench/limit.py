r"""Measures how far above the limit codecs are, on the saved activations of trained networks.

    python -m experiments.bench.limit --out experiments/results/limit

An unbiased code of R bits for each of many independent Gaussian values has an error of at least
1 / (2^(2R) - 1) of their variance (the rate-distortion function of a Gaussian source, Cover and
Thomas, "Elements of Information Theory", theorem 10.3.2, with the decoder scaled to be unbiased).
The distance is the error over this limit. Bits count everything that is stored. The variance is
that of a channel in the batch. Saved activations are neither Gaussian nor independent, so some are
coded below the limit.
"""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from rich.progress import track

import jaxcomp as jc
from experiments.bench.gradients import Subject, network, task_subject
from experiments.common.options import Out, usage_errors
from experiments.common.record import describe_environment, make_folder, write_json, write_table
from experiments.reproduce.tasks import TASKS
from jaxcomp.codecs import (
    AvgPool,
    BlockSparse,
    Codec,
    DualPrecision,
    Float8,
    Quantize,
    SignAware,
    noise,
)
from jaxcomp.codecs._codec import Seed
from jaxcomp.policies import Policy, Rule

MODELS = "resnet20", "vit", "lm", "diffusion"
KINDS = {  # roles of saved values
    "operand": "inputs of products",
    "derivative": "arguments of norms and activations",
}
SMALLEST = 2**14  # elements of an array
CODECS: tuple[Codec, ...] = (
    *(Quantize(bits) for bits in (1, 2, 3, 4, 8)),
    *(Quantize(bits, rounding="dither") for bits in (1, 2, 3, 4, 8)),
    Float8(),
    DualPrecision(),
    AvgPool(2),
    BlockSparse(),
)
Coded = tuple[Float[Array, "..."], float]
"""Decoded values, and the bits that are stored for each."""


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded(Codec):
    """Keeps arrays in float8, and adds them to a list as they are.

    A codec that takes no fewer bytes would not be used. None equals another one: what is traced for
    a codec is remembered.

    Attributes:
        role: The role of the arrays.
        found: The list, of roles and arrays.
    """

    role: str
    found: list[tuple[str, np.ndarray]]
    name: ClassVar[str] = "recorded"
    unbiased = True

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        def record(x: Array) -> np.ndarray:
            self.found.append((self.role, np.asarray(x)))
            return self.found[-1][1]

        return (jax.pure_callback(record, jax.typeof(x), x).astype(jnp.float8_e4m3fn),)

    def _decode(self, arrays: tuple[Array, ...], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return arrays[0].astype(dtype)


def saved_activations(subject: Subject) -> list[tuple[str, np.ndarray]]:
    """Returns the role and value of what the backward pass of a trained model saves, in float32."""
    found: list[tuple[str, np.ndarray]] = []
    rules = [
        Rule(Recorded(role, found), roles=(role,), min_size=SMALLEST, required=False)
        for role in KINDS
    ]
    model = jc.compress(subject.model("plain"), Policy(tuple(rules)))
    model.train()
    jax.block_until_ready(nnx.value_and_grad(subject.loss)(model, subject.batch))
    return found


def coded(x: Float[Array, "batch *rest"], seed: int) -> Iterator[tuple[str, Coded]]:
    """Encodes and decodes an array by each code, and yields the results by name."""
    for codec in CODECS:
        bits = 8 * codec.nbytes(x.shape, x.dtype) / x.size
        yield str(codec), (codec.decode(codec.encode(x, seed)), bits)
    for number in (2, 3, 4):
        yield f"levels of a norm, {number} bits", _by_levels(x, number, seed)
    for part in (16, 8):
        yield f"subspace, 1/{part} of the channels in 8 bits", _in_subspace(x, part, seed)


def _by_levels(x: Array, bits: int, seed: int) -> Coded:
    """Encodes with the statistics of each channel, which a norm has saved already."""
    mean, deviation = _statistics(x)
    codec = SignAware(bits)
    random = noise.indexed_words(x.shape, noise.salt(seed, x))
    code = codec.encode_normalized((x - mean) / deviation, random)
    return codec.decode_normalized(code, x.shape) * deviation + mean, float(bits)


def _in_subspace(x: Array, part: int, seed: int) -> Coded:
    """Encodes the products with some directions of the channels, without bias.

    Half of the directions are the principal ones, the others are drawn from the rest and scaled, as
    in PRAC ("principal subspace and random complement").
    """
    rows = x.reshape(-1, x.shape[-1])
    size = rows.shape[1]
    rank = max(2, size // part)
    others, principal = jnp.split(jnp.linalg.eigh(rows.T @ rows)[1], [size - rank // 2], axis=1)
    random = jax.random.normal(jax.random.key(seed), (others.shape[1], rank - rank // 2))
    drawn = others @ jnp.linalg.qr(random)[0]
    scale = others.shape[1] / drawn.shape[1]
    codec = Quantize(8)
    products = rows @ jnp.concatenate([principal, drawn], axis=1)
    kept = codec.decode(codec.encode(products, seed))
    decoded = kept @ jnp.concatenate([principal, scale * drawn], axis=1).T
    nbytes = codec.nbytes(products.shape, x.dtype) + 2 * rank * size  # the directions in bfloat16
    return decoded.reshape(x.shape), 8 * nbytes / x.size


def _statistics(x: Array) -> tuple[Array, Array]:
    axes = tuple(range(x.ndim - 1))
    deviation = jnp.std(x, axes, keepdims=True)
    return jnp.mean(x, axes, keepdims=True), jnp.where(deviation > 0, deviation, 1)


def distance(x: Float[Array, "batch *rest"], code: Coded) -> tuple[float, float, float]:
    """Returns a code's bits, its error in variances of a channel, and the error over the limit.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (1000, 100))
        >>> [round(figure, 2) for figure in distance(x, (x + 0.1, 2.0))]
        [2.0, 0.01, 0.15]
    """
    decoded, bits = code
    _, deviation = _statistics(x)
    error = float(jnp.mean(((decoded - x) / deviation) ** 2))
    return bits, error, error * (2 ** (2 * bits) - 1)


@usage_errors()
def main(
    out: Out,
    model: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}; repeatable. Default: all.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps before.", min=1)] = 60,
    batch: Annotated[int, typer.Option(help="Examples in a batch.", min=1)] = 32,
) -> None:
    """Train each model, encode what it saves by each codec; write limit.json and limit.md."""
    names = model or list(MODELS)
    unknown = set(names) - set(MODELS)
    if unknown:
        raise typer.BadParameter(f"model={sorted(unknown)}: expected of {list(MODELS)}")
    make_folder(out)
    rows: list[dict[str, Any]] = []
    for name in names:
        subject = (task_subject if name in TASKS else network)(name, [steps], batch)
        figures: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
        for role, array in track(saved_activations(subject), f"encoding {name}"):
            x = jnp.asarray(array, jnp.float32)
            for name_of_code, code in coded(x, seed=1):
                figures.setdefault((role, name_of_code), []).append(distance(x, code))
        for (role, row), found in figures.items():
            bits, error, above = np.mean(found, 0)
            named = {"model": name, "kind": KINDS[role], "row": row, "arrays": len(found)}
            rows.append(named | {"bits": bits, "error": error, "distance": above})
        content = describe_environment() | {"steps": steps, "batch": batch, "rows": rows}
        write_json(out / "limit.json", content)
    table = [["model", "values", "code", "bits", "error / variance", "/ limit"]]
    for of in rows:
        figures_of_row = f"{of['bits']:.2f}", f"{of['error']:.2e}", f"{of['distance']:,.1f}"
        table.append([of["model"], of["kind"], of["row"], *figures_of_row])
    title = f"Error of codes of saved activations after {steps} training steps, over the limit:"
    typer.echo(write_table(out / "limit.md", title, table, content["command"]))


if __name__ == "__main__":
    typer.run(main)
