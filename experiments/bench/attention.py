"""Compares attentions of transformers: XLA's, in chunks or not, cuDNN's and tokamax's kernels.

    python -m experiments.bench.attention --out experiments/results/attention-h100

The steps are compiled ahead of time. XLA compiles a call of cuDNN without cuDNN, so its scratch
memory and its time are not known: the estimated time counts neither its FLOPs nor its kernels.
tokamax (`pip install tokamax`) is asked for its kernel for Hopper GPUs, in Mosaic.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple
from unittest import mock

import jax
import typer
from jax.extend import backend

import jaxcomp as jc
from experiments.common.options import TARGET_HELP, Out, Strategies, usage_errors
from experiments.common.record import describe_environment, make_folder, write_json, write_table
from experiments.zoo.transformers import vit_b16
from jaxcomp.models._lm import lm
from jaxcomp.planning import MakeStep

STRATEGIES = "plain", "remat", "transformer:bits=4", "transformer:bits=2"
LENGTHS = {1024: 8, 8192: 1}  # tokens of a sequence, and sequences of a batch
IN_CHUNKS = "XLA, in chunks"  # of 512 queries


@contextlib.contextmanager
def attention_is(attention: Callable[..., jax.Array]) -> Iterator[None]:
    """Takes another function for each attention.

    What was traced before has XLA's attention, so JAX's caches are cleared.
    """
    jax.clear_caches()
    try:
        with mock.patch.object(jax.nn, "dot_product_attention", attention):
            yield
    finally:
        jax.clear_caches()


@contextlib.contextmanager
def cudnn() -> Iterator[None]:
    """Takes cuDNN for each attention; JAX would ask for its version, and it is not there."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    by_cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    with mock.patch.object(fused, "check_cudnn_version", lambda: 91000), attention_is(by_cudnn):
        yield


class Hopper(NamedTuple):
    """What tokamax asks of a device."""

    device_kind: str = "NVIDIA H100 80GB HBM3"
    platform: str = "gpu"
    compute_capability: str = "9.0"


@contextlib.contextmanager
def tokamax() -> Iterator[None]:
    """Takes tokamax for each attention, which asks for a device; an H100 is described to it."""
    from absl import flags
    from tokamax import dot_product_attention

    flags.FLAGS.mark_as_parsed()  # else tokamax takes the options of this command for its own
    by_kernel = functools.partial(dot_product_attention, implementation="mosaic")
    with mock.patch.object(backend, "get_default_device", Hopper), attention_is(by_kernel):
        yield


FORMS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    IN_CHUNKS: contextlib.nullcontext,
    "XLA": contextlib.nullcontext,
    "cuDNN": cudnn,
    "tokamax": tokamax,
}


def cases() -> Iterator[tuple[str, str, MakeStep, int]]:
    """Yields each network with each attention: its factory of steps, and its batch."""
    for length, batch in LENGTHS.items():
        for form in FORMS:
            queries = 512 if form == IN_CHUNKS else length
            make_step = functools.partial(lm, length=length, queries=queries)
            yield f"LM, {length} tokens", form, make_step, batch
    for form in ("XLA", "cuDNN"):  # tokamax's kernel takes multiples of 8 tokens, and these are 196
        yield "ViT-B/16", form, vit_b16, 128


@usage_errors()
def main(
    out: Out,
    strategy: Strategies = None,
    target: Annotated[str, typer.Option(help=TARGET_HELP)] = "h100",
) -> None:
    """Compile the steps; write attention.json and attention.md."""
    make_folder(out)
    rows: list[dict[str, Any]] = []
    for network, form, make_step, batch in cases():
        with FORMS[form]():
            table = jc.compare(make_step, strategy or list(STRATEGIES), batch=batch, target=target)
        rows += [{"network": network, "attention": form} | r.to_dict() for r in table.rows]
        write_json(out / "attention.json", describe_environment() | {"rows": rows})
    print(write(out, rows))


def write(out: Any, rows: list[dict[str, Any]]) -> str:
    """Writes the table and returns it."""
    table = [["network", "attention", "row", "needs, MiB", "HBM traffic, MiB", "kernels"]]
    for row in rows:
        figures = (f"{row[name] / 2**20:,.0f}" for name in ("total_bytes", "hbm_traffic_bytes"))
        named = row["network"], row["attention"], f"`{row['row']}`"
        table.append([*named, *figures, f"{row['kernels']:,}"])
    command = describe_environment()["command"]
    return write_table(out / "attention.md", "Transformers by their attentions:", table, command)


if __name__ == "__main__":
    typer.run(main)
