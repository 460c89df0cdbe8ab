"""What the engine's own work takes, before XLA's begins: tracing and planning.

    python -m experiments.bench.engine --out experiments/results/engine

Seconds to trace a gradient of 200 layers, over those without `jaxcomp.checkpoint`: medians of three
rounds in turns. Each round has another batch, or the engine would remember the program. Seconds of
a plan, and how much more memory the process takes at most, for as many parameters as steps: in a
process of its own. Then the modules that run for the gradient of a small network, and counts of the
source, which `experiments.bench.source_counts` defines. Nothing is compiled or run. Seconds are of
the processor: other processes do not lengthen them.
"""

import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer

import jaxcomp as jc
from experiments.bench import source_counts
from experiments.common.options import Out, usage_errors
from experiments.common.record import describe_environment, make_folder, write_json, write_table

POLICIES: dict[str, Any] = {"automatic": "automatic", "4 bits": jc.Quantize(bits=4)}
WIDTH = 256
BATCH = 128

Params = list[dict[str, jax.Array]]
Network = Callable[[Params, jax.Array], jax.Array]


def stock(params: Params, x: jax.Array) -> jax.Array:
    """Layers of functions of `jax.nn`, of which JAX remembers what they trace to."""
    for p in params:
        x = jax.nn.standardize(jax.nn.gelu(x @ p["w"] + p["b"])) * p["scale"] + p["bias"]
    return x.sum()


def plain(params: Params, x: jax.Array) -> jax.Array:
    """The same layers, with the norm and the activation written in `jax.numpy`."""
    for p in params:
        y = x @ p["w"] + p["b"]
        y = 0.5 * y * (1 + jnp.tanh(0.797885 * (y + 0.044715 * y**3)))
        centred = y - y.mean(-1, keepdims=True)
        variance = (centred**2).mean(-1, keepdims=True)
        x = centred * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]
    return x.sum()


NETWORKS: dict[str, Network] = {"jax.nn": stock, "jax.numpy": plain}


def arguments(layers: int, batch: int) -> tuple[Any, ...]:
    """The types of parameters and input."""
    vector = jax.ShapeDtypeStruct((WIDTH,), jnp.float32)
    weights = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    layer = {"w": weights, "b": vector, "scale": vector, "bias": vector}
    return [layer] * layers, jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32)


def trace_seconds(network: Network, layers: int, rounds: int) -> dict[str, list[float]]:
    """Seconds to trace the network's gradient without a policy and with each, in each round."""
    gradients = {"none": jax.grad(network)}
    gradients |= {name: jax.grad(jc.checkpoint(network, p)) for name, p in POLICIES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in gradients}
    for number in range(rounds):
        for name, gradient in gradients.items():
            jax.clear_caches()
            start = time.process_time()
            jax.jit(gradient).trace(*arguments(layers, BATCH + number))
            seconds[name].append(time.process_time() - start)
    return seconds


def plan_of_steps(steps: int, policy: str) -> dict[str, float]:
    """Seconds and MiB that a plan takes of as many products and activations as parameters."""

    def chain(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.tanh(x @ w)
        return x.sum()

    params = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * steps
    x = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    before = _peak_mib()
    start = time.process_time()
    plan = jc.checkpoint(chain, POLICIES[policy]).plan(params, x)
    seconds = time.process_time() - start
    return {"seconds": seconds, "mib": _peak_mib() - before, "values": len(plan.values)}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def modules_run() -> list[str]:
    """The modules of the engine of which a function runs for a gradient of two layers."""
    root = str(source_counts.ENGINE)
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(root):
            files.add(code.co_filename.removeprefix(root + "/"))

    gradient = jax.jit(jax.grad(jc.checkpoint(stock)))
    sys.setprofile(note)
    try:
        gradient.trace(*arguments(2, BATCH))
    finally:
        sys.setprofile(None)
    return sorted(files)


@usage_errors()
def main(
    out: Out,
    layers: Annotated[int, typer.Option(help="Of the networks that are traced.")] = 200,
    steps: Annotated[int, typer.Option(help="Of the function that is planned.")] = 5000,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each gradient is traced.")] = 3,
) -> None:
    """Measure both, count, and write engine.json and engine.md."""
    make_folder(out)
    rows: dict[str, float] = {}
    files = modules_run()
    traces = {name: trace_seconds(f, layers, rounds) for name, f in NETWORKS.items()}
    for name, seconds in traces.items():
        medians = {policy: statistics.median(values) for policy, values in seconds.items()}
        rows[f"{name}: trace of {layers} layers, s"] = medians["none"]
        for policy in POLICIES:
            rows[f"{name}: trace for {policy} / trace"] = medians[policy] / medians["none"]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        plans = {policy: pool.apply(plan_of_steps, (steps, policy)) for policy in POLICIES}
    for policy, plan in plans.items():
        rows[f"plan of {steps:,} steps for {policy}, s"] = plan["seconds"]
        rows[f"plan of {steps:,} steps for {policy}, MiB"] = plan["mib"]
    rows["modules of transform that run"] = len(files)
    rows |= source_counts.counts()
    content = describe_environment() | {"rows": rows, "traces": traces}
    write_json(out / "engine.json", content | {"plans": plans, "modules": files})
    cells = [[name, f"{value:,.1f}".removesuffix(".0")] for name, value in rows.items()]
    header = ["measure", "value"]
    title = "The engine's own work:"
    typer.echo(write_table(out / "engine.md", title, [header, *cells], content["command"]))


if __name__ == "__main__":
    typer.run(main)
