r"""Counts the machine instructions of each kernel of training steps compiled for an absent GPU.

    pip install -e ".[machine-code]"
    python -m experiments.bench.instructions --network resnet50 --target h200 \
        --strategy plain --strategy fused:bits=4 --out experiments/results/instructions/resnet50

Nothing is run. A multiprocessor starts four instructions of 32 threads in each cycle, so the
instructions of a kernel take at least the "issue" time. Its bytes at the device's bandwidth take
the "bytes" time. The model of a kernel's time is the larger of both, each times a factor. Factors,
the rate of products and the time between kernels are those of a profile of ResNet-50 on an H200
(`results/archive/device/kernels-resnet50-h200`). Elements are those of the largest array of a
kernel. All paths through a kernel are counted, so one with many branches, such as the backward pass
of a max pool, takes less time than the model's.
"""

import dataclasses
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.bench import stage
from experiments.bench.kernels import KINDS, kind_of
from experiments.bench.transformers import CASES
from experiments.common.machine_code import CLASSES, MachineCode, disassemble, tool
from experiments.common.options import TARGET_HELP, Out, Strategies, usage_errors
from experiments.common.record import describe_environment, make_folder, write_json, write_table
from jaxcomp.memory._buffer_assignment import no_compilation_cache
from jaxcomp.memory._compiling import compile_step
from jaxcomp.memory._costs import Cost, costs
from jaxcomp.memory._flops import jaxpr_flops
from jaxcomp.memory._gpus import GPUS, Gpu
from jaxcomp.memory._hlo import parse
from jaxcomp.memory._targets import resolve
from jaxcomp.models import steps
from jaxcomp.planning import MakeStep, Strategy
from jaxcomp.planning._watched import trace_step

STRATEGIES = "plain", "fused:bits=4"
NETWORKS: dict[str, tuple[MakeStep, int]] = {
    "bottlenecks": (stage.step_factory(blocks=2), 128),
    "resnet50": (steps.classifier("resnet50"), 128),
    **{name: case[:2] for name, case in CASES.items()},
}
# Measured time over issue time and over bytes time, by the start of a kernel's name.
FACTORS = {"input_scatter": (1.5, 5.2), "input_": (1.9, 1.7), "": (1.5, 1.11)}
LEAST = 2.2e-6  # seconds of a kernel with hardly any instructions
BETWEEN = 1e-6  # seconds from one kernel to the next
PRODUCTS = 0.34  # part of the peak rate at which products ran
SLOTS = 4  # instructions of 32 threads that a multiprocessor starts in a cycle
SHOWN = 24  # kernels in the table, those with the longest times
_THUNK = re.compile(
    r"^( *)\d+: k(\w+)\s*\[[^\]]*\]\s*(\S*)(?: grid: (\S+ \S+ \S+) threads: (\S+ \S+ \S+))?"
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """All runs of a kernel in a step that have equal sizes.

    Attributes:
        name: XLA's name.
        kind: One of `KINDS`.
        runs: How often it runs.
        nbytes: HBM traffic of one run in bytes.
        elements: Elements of the largest array that it reads or writes.
        registers: Registers of a thread.
        classes: Instructions for each element, by class.
        loads: Instructions that read HBM, by their bytes.
        issue: Seconds in which its instructions can start.
        bandwidth: Seconds in which its bytes can be moved.
        seconds: The model's time of one run.
    """

    name: str
    kind: str
    runs: int
    nbytes: int
    elements: int
    registers: int
    classes: dict[str, float]
    loads: dict[int, int]
    issue: float
    bandwidth: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Launch:
    """A step of the program: what runs, and its threads; 0 threads for calls of libraries."""

    kind: str
    name: str
    threads: int


def launches(text: str) -> list[_Launch]:
    """Reads the list of what a program runs, in its order, from XLA's dump."""
    found: list[_Launch] = []
    inside: int | None = None  # the indentation of a copy whose parts are lines of their own
    for line in text.splitlines():
        thunk = _THUNK.match(line)
        if thunk is None:
            continue
        indentation, kind, name, *sizes = thunk.groups()
        if inside is not None and len(indentation) > inside:
            continue
        inside = len(indentation) if kind == "DynamicSliceFusion" else None
        if kind not in ("While", "Conditional", "Sequential"):
            threads = 1
            for size in re.findall(r"\d+", " ".join(filter(None, sizes))):
                threads *= int(size)
            found.append(_Launch(kind, name, threads if sizes[0] else 0))
    return found


def kernels(hlo_text: str, dump: Path, gpu: Gpu) -> list[Kernel]:
    """Joins the instructions of a compiled program with their machine code, slowest first.

    Args:
        hlo_text: Text of the compiled program.
        dump: Folder to which XLA dumped it.
        gpu: The GPU that it was compiled for.

    Raises:
        ValueError: if the program and its dump differ.
    """
    module = parse(hlo_text)
    started = [cost for cost in costs(hlo_text) if cost.kernels]
    (listed,) = dump.glob("*thunk_sequence.txt")
    found = launches(listed.read_text())
    if len(found) != len(started):
        raise ValueError(f"{listed}: {len(found)} launches, expected {len(started)} kernels")
    codes = disassemble(dump)
    runs: Counter[tuple[str, int, int]] = Counter()
    made: dict[tuple[str, int, int], Kernel] = {}
    for cost, launch in zip(started, found, strict=True):
        kind = kind_of(module, cost)
        if launch.name in codes and kind != KINDS[0]:
            key = launch.name, cost.hbm // cost.kernels, launch.threads
            runs[key] += cost.kernels
            made[key] = _kernel(cost, launch, codes[launch.name], kind, gpu)
    rows = [dataclasses.replace(kernel, runs=runs[key]) for key, kernel in made.items()]
    return sorted(rows, key=lambda kernel: -kernel.runs * kernel.seconds)


def _kernel(cost: Cost, launch: _Launch, code: MachineCode, kind: str, gpu: Gpu) -> Kernel:
    nbytes = cost.hbm // cost.kernels
    elements = max(array.elements for array in _arrays(cost))
    counts: Counter[str] = Counter()
    for operation, times in zip(
        code.operations, code.weights(nbytes / launch.threads), strict=True
    ):
        counts[operation.kind] += times  # type: ignore[assignment]
    issue = counts.total() * launch.threads / 32 / (SLOTS * gpu.cores * gpu.clock_ghz * 1e9)
    bandwidth = nbytes / gpu.bandwidth
    of_issue, of_bandwidth = next(f for name, f in FACTORS.items() if launch.name.startswith(name))
    return Kernel(
        name=launch.name,
        kind=kind,
        runs=0,
        nbytes=nbytes,
        elements=elements,
        registers=code.registers,
        classes={name: counts[name] * launch.threads / max(1, elements) for name in CLASSES},
        loads=dict(sorted(code.loads().items())),
        issue=issue,
        bandwidth=bandwidth,
        seconds=max(of_issue * issue, of_bandwidth * bandwidth, LEAST),
    )


def _arrays(cost: Cost) -> Iterator[Any]:
    """The arrays that an instruction reads and writes."""
    operands = (cost.computation.instructions.get(name) for name in cost.instruction.operands)
    for value in (cost.instruction, *filter(None, operands)):
        yield from value.arrays


def measure(network: str, spec: str, target: str) -> dict[str, Any]:
    """Compiles a row and returns its kernels, the sums over the step and the compile time."""
    make_step, batch = NETWORKS[network]
    where = resolve(target)
    (gpu,) = (gpu for gpu in GPUS if gpu.name == target)
    traced, _ = trace_step(make_step, Strategy.parse(spec), batch, where)
    with tempfile.TemporaryDirectory() as folder, no_compilation_cache():
        compiled = compile_step(traced, where, dump_dir=folder)
        found = kernels(compiled.hlo_text, Path(folder), gpu)
    flops = jaxpr_flops(traced.jaxpr, where.platform) or 0
    products = flops / (PRODUCTS * gpu.tensor_tflops * 1e12)
    others = sum(kernel.runs * (kernel.seconds + BETWEEN) for kernel in found)
    return {
        "row": spec,
        "compile_seconds": compiled.compile_seconds,
        "hlo_instructions": sum(
            len(c.instructions) for c in parse(compiled.hlo_text).computations.values()
        ),
        "runs": sum(kernel.runs for kernel in found),
        "distinct": len({kernel.name for kernel in found}),
        "products_seconds": products,
        "seconds": products + others,
        "kernels": [dataclasses.asdict(kernel) for kernel in found if kernel.seconds > LEAST],
        "kinds": {
            kind: sum(kernel.runs * kernel.seconds for kernel in found if kernel.kind == kind)
            for kind in KINDS[1:]
        },
    }


@usage_errors()
def main(
    out: Out,
    network: Annotated[str, typer.Option(help="One of NETWORKS.")] = "bottlenecks",
    strategy: Strategies = None,
    target: Annotated[str, typer.Option(help=f"{TARGET_HELP} A GPU.")] = "h200",
) -> None:
    """Compile each strategy; write instructions.json and instructions.md."""
    if network not in NETWORKS:
        raise ValueError(f"network={network!r}: expected one of {list(NETWORKS)}")
    if target not in (names := [gpu.name for gpu in GPUS]):
        raise ValueError(f"target={target!r}: expected one of {names}")
    for name in ("ptxas", "nvdisasm"):
        tool(name)
    make_folder(out)
    content = describe_environment() | {"network": network, "target": target}
    rows = []
    for spec in strategy or STRATEGIES:
        rows.append(measure(network, spec, target))
        write_json(out / "instructions.json", content | {"rows": rows})
    title = f"{network} on {target}, steps compiled ahead of time:"
    text = write_table(out / "instructions.md", title, sums(rows), content["command"])
    for row in rows:
        text += "\n" + write_table(
            out / f"{row['row'].replace(':', '-')}.md",
            f"{network} by {row['row']} on {target}, the kernels that take the most time:",
            slowest(row),
            content["command"],
        )
    typer.echo(text)


def sums(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The table of the rows: kernels, compile time, and milliseconds by kind."""
    table = [["row", "kernels", "distinct", "HLO", "compile, s", *KINDS, "step, ms", "/ first"]]
    for row in rows:
        times = [row["products_seconds"], *row["kinds"].values(), row["seconds"]]
        counts = [f"{row[name]:,}" for name in ("runs", "distinct", "hlo_instructions")]
        ratio = f"{row['seconds'] / rows[0]['seconds']:.3f}"
        seconds = [f"{row['compile_seconds']:.1f}", *(f"{1e3 * time:.2f}" for time in times)]
        table.append([row["row"], *counts, *seconds, ratio])
    return table


def slowest(row: dict[str, Any]) -> list[list[str]]:
    """The table of a row's kernels: counts for each element, microseconds of one run."""
    header = ["kernel", "runs", "MB", "registers", "loads", "instructions", *CLASSES]
    table = [[*header, "issue, us", "bytes, us", "model, us"]]
    for kernel in row["kernels"][:SHOWN]:
        classes = kernel["classes"].values()
        loads = ", ".join(f"{count} of {nbytes} B" for nbytes, count in kernel["loads"].items())
        table.append(
            [
                kernel["name"],
                str(kernel["runs"]),
                f"{kernel['nbytes'] / 1e6:.0f}",
                str(kernel["registers"]),
                loads,
                *(f"{count:.1f}" for count in (sum(classes), *classes)),
                *(f"{1e6 * kernel[of]:.1f}" for of in ("issue", "bandwidth", "seconds")),
            ]
        )
    return table


if __name__ == "__main__":
    typer.run(main)
