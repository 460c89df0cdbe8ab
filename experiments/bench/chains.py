"""Long chains through `jaxcomp.checkpoint`, beside `jax.checkpoint`: work grows with their length.

    python -m experiments.bench.chains --out experiments/results/chains

Each row is a function of so many steps. Equations are those of the traced gradient, calls included.
Times are measured on the attached device; compare them within one run only.
"""

import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from jax.extend.core import Jaxpr

import jaxcomp as jc
from experiments.common.options import Out, usage_errors
from experiments.common.record import describe_environment, make_folder, write_json, write_table
from experiments.comparison.measure import ratio

Fn = Callable[[jax.Array, jax.Array], jax.Array]


def elementwise(steps: int) -> Fn:
    """A chain of `x = sin(x * w) + x`."""

    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(steps):
            x = jnp.sin(x * w) + x
        return x.sum()

    return chain


def blocks(steps: int) -> Fn:
    """A chain of a norm, a product and a GELU."""

    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(steps):
            x = jax.nn.gelu(jax.nn.standardize(x) @ w)
        return x.sum()

    return chain


def count(jaxpr: Jaxpr) -> int:
    """Equations of a program, those of the programs that it calls included."""
    inner = [
        getattr(value, "jaxpr", value)
        for equation in jaxpr.eqns
        for value in equation.params.values()
        if isinstance(getattr(value, "jaxpr", value), Jaxpr)
    ]
    return len(jaxpr.eqns) + sum(map(count, inner))


def measured(fn: Fn, size: int, rounds: int) -> dict[str, Any]:
    """Equations, and seconds to trace, to compile, and for a step, of a gradient."""
    x, w = jnp.full((size, size), 0.5), jnp.full((size, size), 1 / size)
    gradient = jax.jit(jax.grad(fn, (0, 1)), compiler_options=jc.memory.compiler_options())
    start = time.perf_counter()
    traced = gradient.trace(x, w)
    between = time.perf_counter()
    compiled = traced.lower().compile()
    end = time.perf_counter()
    jax.block_until_ready(compiled(x, w))
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(x, w))
        seconds.append(time.perf_counter() - begin)
    return {
        "equations": count(traced.jaxpr.jaxpr),
        "trace_seconds": between - start,
        "compile_seconds": end - between,
        "step_seconds": seconds,
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


@usage_errors()
def main(
    out: Out,
    steps: Annotated[list[int] | None, typer.Option(help="Default: 10 to 800.")] = None,
    size: Annotated[int, typer.Option(help="Rows and columns of the arrays.")] = 256,
    rounds: int = 5,
) -> None:
    """Measures both chains by jax.checkpoint and jaxcomp.checkpoint; writes chains.json."""
    make_folder(out)
    rows: list[dict[str, Any]] = []
    for make in (elementwise, blocks):
        for number in steps or (10, 50, 100, 200, 400, 800):
            fn = make(number)
            plain = measured(jax.checkpoint(fn), size, rounds)
            ours = measured(jc.checkpoint(fn, jc.Quantize(bits=4)), size, rounds)
            step_ratio = ratio(ours.pop("step_seconds"), plain.pop("step_seconds"))
            rows.append(
                {"chain": make.__name__, "steps": number, "step_ratio": step_ratio}
                | {f"checkpoint_{k}": v for k, v in plain.items()}
                | ours
            )
            write_json(out / "chains.json", describe_environment() | {"size": size, "rows": rows})
            typer.echo(rows[-1])
    header = [
        "chain",
        "steps",
        "equations",
        "jax.checkpoint's",
        "trace and compile, s",
        "jax.checkpoint's",
        "step time / jax.checkpoint's",
    ]
    cells = [
        [
            row["chain"],
            str(row["steps"]),
            str(row["equations"]),
            str(row["checkpoint_equations"]),
            f"{row['trace_seconds'] + row['compile_seconds']:.1f}",
            f"{row['checkpoint_trace_seconds'] + row['checkpoint_compile_seconds']:.1f}",
            f"{row['step_ratio']:.2f}",
        ]
        for row in rows
    ]
    title = f"Gradients of chains of arrays of {size} x {size}, 4 bits, beside jax.checkpoint"
    write_table(out / "chains.md", title, [header, *cells], describe_environment()["command"])


if __name__ == "__main__":
    typer.run(main)
