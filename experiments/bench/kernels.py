"""The kernels of profiled steps on a GPU: their time beside that of their bytes.

`experiments.bench.device --profile` makes the profiles. A kernel that waits for memory takes as
long as its bytes at the device's bandwidth. One that takes longer waits for its instructions, or
has too few bytes under way. The bytes are read from the compiled program, the times from a profile
of `STEPS` steps.
"""

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from experiments.common.record import write_json, write_table
from jaxcomp.memory._costs import Cost, costs
from jaxcomp.memory._hlo import Computation, Instruction, Module, parse
from jaxcomp.memory._targets import resolve
from jaxcomp.planning._probe import bandwidth_of

STEPS = 5  # steps of a profile
SLOWEST = 60  # kernels of a step that kernels.json lists
CODES = {"s4", "u2", "u4", "s8", "u8", "u16", "u32"}
KERNELS_OF_ROWS = "rows"  # how the names of `by_row_kernel` begin, which are not of instructions
KINDS = "products", "kernels that read or write codes", "other fused kernels"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The runs of a kernel in one step. Equal instructions share the kernel of one of them.

    Attributes:
        name: XLA's name of the kernel.
        kind: One of `KINDS`.
        runs: How often it runs.
        milliseconds: The time of all runs.
        nbytes: Bytes that they read and write; 0 for kernels of a library and those of Pallas,
            whose names are not those of instructions.
    """

    name: str
    kind: str
    runs: float
    milliseconds: float
    nbytes: int


def durations(trace: bytes) -> dict[str, tuple[int, float]]:
    """Returns how often each kernel of a GPU ran in a profile, and its nanoseconds."""
    runs: Counter[str] = Counter()
    nanoseconds: Counter[str] = Counter()
    for plane in ProfileData.from_serialized_xspace(trace).planes:
        for line in plane.lines if plane.name.startswith("/device:GPU") else ():
            if line.name.startswith("Stream"):
                for event in line.events:
                    runs[event.name] += 1
                    nanoseconds[event.name] += event.duration_ns
    return {name: (runs[name], nanoseconds[name]) for name in runs}


def kernels(
    hlo_text: str, profile: Mapping[str, tuple[int, float]], steps: int = STEPS
) -> list[Kernel]:
    """Joins the kernels of a profile with the instructions of the program, slowest first.

    Args:
        hlo_text: Text of the compiled program.
        profile: Runs and nanoseconds of each kernel, as `durations`.
        steps: Steps of the profile.
    """
    module = parse(hlo_text)
    known = {c.instruction.name.replace(".", "_"): c for c in costs(hlo_text) if c.kernels}
    found = []
    for name, (runs, nanoseconds) in profile.items():
        cost, nbytes = known.get(name), 0
        kind = KINDS[1] if name.startswith(KERNELS_OF_ROWS) else KINDS[0]
        if cost is not None:
            nbytes, kind = round(cost.hbm / cost.kernels * runs / steps), kind_of(module, cost)
        found.append(Kernel(name, kind, runs / steps, nanoseconds / steps / 1e6, nbytes))
    return sorted(found, key=lambda kernel: -kernel.milliseconds)


def kind_of(module: Module, cost: Cost) -> str:
    """Returns the one of `KINDS` that the kernel of an instruction is of."""
    if _multiplies(module.computations, cost.instruction):
        return KINDS[0]
    dtypes = {*_dtypes(cost.computation, cost.instruction)}
    return KINDS[2] if dtypes.isdisjoint(CODES) else KINDS[1]


def profiled(step: Callable[..., Any], state: Any, arrays: Sequence[Any]) -> bytes:
    """Runs a compiled step `STEPS` times after three others, and returns the profile."""
    for _ in range(3):
        state = step(state, *arrays)[0]
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                state = step(state, *arrays)[0]
            jax.block_until_ready(state)
        (path,) = Path(folder).rglob("*.xplane.pb")
        return path.read_bytes()


def write(out: Path, rows: Mapping[str, list[Kernel]], content: dict[str, Any]) -> str:
    """Writes the slowest kernels and the table of all kinds, and returns the table."""
    bandwidth = bandwidth_of(resolve()) / 1e12
    slowest = {n: [*map(dataclasses.asdict, found[:SLOWEST])] for n, found in rows.items()}
    found = [*totals(rows, bandwidth)]
    described = {"bandwidth": bandwidth, "totals": found, "rows": slowest}
    write_json(out / "kernels.json", content | described)
    header = ["row", "kind", "kernels", "ms", "ms of the bytes", "ms / ms of the bytes"]
    table = [header, *map(_cells, found)]
    title = f"{content['model']}, kernels of one step on one {content['devices'][0]}:"
    return write_table(out / "kernels.md", title, table, content["command"])


def totals(rows: Mapping[str, list[Kernel]], bandwidth: float) -> Iterator[dict[str, Any]]:
    """Yields the kernels of each kind: their number, their time, and that of their bytes."""
    for name, found in rows.items():
        for kind in KINDS:
            of_kind = [kernel for kernel in found if kernel.kind == kind]
            if not of_kind:
                continue
            nbytes = sum(kernel.nbytes for kernel in of_kind)
            yield {
                "row": name,
                "kind": kind,
                "kernels": sum(kernel.runs for kernel in of_kind),
                "milliseconds": sum(kernel.milliseconds for kernel in of_kind),
                # The bytes of kernels of libraries and of Pallas are not known.
                "milliseconds_of_bytes": (
                    nbytes / bandwidth / 1e9 if all(kernel.nbytes for kernel in of_kind) else None
                ),
            }


def _cells(total: dict[str, Any]) -> list[str]:
    milliseconds, least = total["milliseconds"], total["milliseconds_of_bytes"]
    return [
        total["row"],
        total["kind"],
        f"{total['kernels']:,.0f}",
        f"{milliseconds:.2f}",
        "" if least is None else f"{least:.2f}",
        f"{milliseconds / least:.2f}" if least else "",
    ]


def _multiplies(computations: Mapping[str, Computation], instruction: Instruction) -> bool:
    """Whether an instruction is a product or a call of a library, which Pallas kernels are not."""
    called = [computations[c] for names in instruction.called.values() for c in names]
    inner = [i for c in called for i in c.instructions.values()]
    opcodes = {i.opcode for i in (instruction, *inner) if "gpu.triton" not in i.attributes}
    return not opcodes.isdisjoint(("dot", "convolution", "custom-call"))


def _dtypes(computation: Computation, instruction: Instruction) -> Iterator[str]:
    """The dtypes of large arrays that an instruction reads and writes."""
    operands = (computation.instructions.get(name) for name in instruction.operands)
    for value in (instruction, *filter(None, operands)):
        yield from (array.dtype for array in value.arrays if array.elements > 2**16)
