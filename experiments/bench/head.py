r"""Cross-entropy of a language model's head, with whole logits and with parts of them.

    python -m experiments.bench.head --target h100 --out experiments/results/head-h100
    python -m experiments.bench.head --target v5e --tokens 4096 --features 1152 --classes 262144 \
        --log-probs --out experiments/results/head-v5e-log-probs

The gradient of the mean loss of 8192 tokens with 768 features and 50,257 classes in bfloat16, as
of GPT-2, compiled ahead of time. With `--log-probs`, the loss is a policy's, of log-probabilities
and entropies of the tokens. Nothing is run.
"""

import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import typer

import jaxcomp as jc
from experiments.common.options import TARGET_HELP, Out, usage_errors
from experiments.common.record import describe_environment, write_json, write_table
from jaxcomp.ops import linear_cross_entropy, linear_log_probs

CHUNKS = (1024, 2048, 4096, 8192, 16384)
Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def whole(x: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss as most people write it."""
    logits = (x @ kernel).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def whole_of_policy(x: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    """A policy's loss as most people write it."""
    log_probs = jax.nn.log_softmax((x @ kernel).astype(jnp.float32))
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
    return -jnp.take_along_axis(log_probs, labels[:, None], -1)[:, 0] - 0.01 * entropy


def of_policy(x: jax.Array, kernel: jax.Array, labels: jax.Array, *, chunk_size: int) -> jax.Array:
    """The same loss."""
    found = linear_log_probs(x, kernel, labels, chunk_size=chunk_size)
    return -found.log_probs - 0.01 * found.entropy


def gradient(loss: Loss) -> Callable[..., Any]:
    """The gradient of the mean loss; the kernel is a float32 parameter."""

    def of(x: jax.Array, kernel: jax.Array, labels: jax.Array) -> Any:
        def mean(x: jax.Array, kernel: jax.Array) -> jax.Array:
            return loss(x, kernel.astype(x.dtype), labels).mean()

        return jax.grad(mean, (0, 1))(x, kernel)

    return of


@usage_errors()
def main(
    out: Out,
    target: Annotated[str, typer.Option(help=TARGET_HELP)] = "h100",
    tokens: Annotated[int, typer.Option(help="Tokens in a batch.")] = 8192,
    features: Annotated[int, typer.Option(help="Features of a hidden state.")] = 768,
    classes: Annotated[int, typer.Option(help="Size of the vocabulary.")] = 50_257,
    log_probs: Annotated[bool, typer.Option(help="A policy's loss.")] = False,
) -> None:
    """Compile each form and write a table."""
    inputs = (
        jax.ShapeDtypeStruct((tokens, features), jnp.bfloat16),
        jax.ShapeDtypeStruct((features, classes), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    losses: dict[str, Loss] = {"whole logits": whole_of_policy if log_probs else whole}
    in_chunks = of_policy if log_probs else linear_cross_entropy
    for size in CHUNKS:
        part = functools.partial(in_chunks, chunk_size=size)
        losses[f"chunk_size={size}"] = part
    rows, table = {}, [["loss", "temporaries, MiB", "HBM traffic, GiB", "TFLOP", "estimate, ms"]]
    for name, loss in losses.items():
        report = jc.memory.analyze(gradient(loss), *inputs, target=target)
        rows[name] = report.to_dict()
        temp, traffic, flops = report.temp_bytes, report.hbm_traffic_bytes, report.flops
        cells = [
            f"{temp / 2**20:,.0f}" if temp is not None else "",
            f"{traffic / 2**30:.2f}" if traffic is not None else "",
            f"{flops / 1e12:.2f}" if flops is not None else "",
            f"{1e3 * report.estimated_seconds:.2f}" if report.estimated_seconds else "",
        ]
        table.append([name, *cells])
        content = describe_environment() | {"target": target, "rows": rows}
        write_json(out / "head.json", content)
    of = "Log-probabilities and entropies" if log_probs else "Cross-entropy"
    title = (
        f"{of} of {tokens} tokens, {features} features, {classes} classes, compiled for {target}:"
    )
    typer.echo(write_table(out / "head.md", title, table, content["command"]))


if __name__ == "__main__":
    typer.run(main)
