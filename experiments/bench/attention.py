"""Compares attentions of a language model: XLA's, in chunks or not, and cuDNN's flash attention.

    python -m experiments.bench.attention --out experiments/results/attention-h100

The steps are compiled ahead of time. XLA compiles a call of cuDNN without cuDNN, so its scratch
memory and its time are not known: the estimated time counts neither its FLOPs nor its kernels.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import typer

import jaxcomp as jc
from experiments.common.options import TARGET_HELP, Out, Strategies, usage_errors
from experiments.common.record import describe_environment, make_folder, write_json, write_table
from jaxcomp.models._lm import lm

STRATEGIES = "plain", "remat", "transformer:bits=4", "transformer:bits=2"
LENGTHS = {1024: 8, 8192: 1}  # tokens of a sequence, and sequences of a batch
CUDNN = "cuDNN"
FORMS = {"XLA, in chunks": 512, "XLA": None, CUDNN: None}  # queries of a chunk


@contextlib.contextmanager
def cudnn_attention() -> Iterator[None]:
    """Takes cuDNN for each attention; JAX would ask for its version, and it is not there.

    What was traced before has XLA's attention, so JAX's caches are cleared.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    attention, version = jax.nn.dot_product_attention, fused.check_cudnn_version
    by_cudnn = functools.partial(attention, implementation="cudnn")
    jax.nn.dot_product_attention = by_cudnn  # type: ignore[assignment]
    fused.check_cudnn_version = lambda: 91000
    jax.clear_caches()
    try:
        yield
    finally:
        jax.nn.dot_product_attention, fused.check_cudnn_version = attention, version
        jax.clear_caches()


@usage_errors()
def main(
    out: Out,
    strategy: Strategies = None,
    target: Annotated[str, typer.Option(help=TARGET_HELP)] = "h100",
) -> None:
    """Compile the steps; write attention.json and attention.md."""
    make_folder(out)
    rows: list[dict[str, Any]] = []
    for length, batch in LENGTHS.items():
        for form, queries in FORMS.items():
            make_step = functools.partial(lm, length=length, queries=queries or length)
            with cudnn_attention() if form == CUDNN else contextlib.nullcontext():
                table = jc.compare(
                    make_step, strategy or list(STRATEGIES), batch=batch, target=target
                )
            rows += [{"length": length, "attention": form} | r.to_dict() for r in table.rows]
            write_json(out / "attention.json", describe_environment() | {"rows": rows})
    print(write(out, rows))


def write(out: Any, rows: list[dict[str, Any]]) -> str:
    """Writes the table and returns it."""
    table = [["tokens", "attention", "row", "needs, MiB", "HBM traffic, MiB", "kernels"]]
    for row in rows:
        figures = (f"{row[name] / 2**20:,.0f}" for name in ("total_bytes", "hbm_traffic_bytes"))
        named = str(row["length"]), row["attention"], f"`{row['row']}`"
        table.append([*named, *figures, f"{row['kernels']:,}"])
    command = describe_environment()["command"]
    return write_table(out / "attention.md", "Language model, 6 x 768, bfloat16:", table, command)


if __name__ == "__main__":
    typer.run(main)
