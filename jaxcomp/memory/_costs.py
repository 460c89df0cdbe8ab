"""Lists what each instruction of a compiled program costs."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxcomp.memory._hlo import Computation, Instruction, Module, parse
from jaxcomp.memory._kernels import is_kernel
from jaxcomp.memory._loops import trip_count
from jaxcomp.memory._products import products_of
from jaxcomp.memory._traffic import CALLS, cycles_of, in_hbm, on_host, traffic_of
from jaxcomp.memory._vector import operations_of


class Cost(NamedTuple):
    """What one instruction of a compiled module costs in one run.

    Attributes:
        computation: The computation that holds it.
        instruction: The instruction.
        calls: The loops and other calls that it lies in, the outermost first. XLA merges equal
            computations, which then have the names of one of their callers.
        hbm: Its HBM traffic in bytes.
        host: Bytes that it copies to or from the host.
        cycles: XLA's estimate of its cycles.
        vector: Its elementwise operations.
        flops: The FLOPs of its products.
        kernels: Kernels that it starts.
    """

    computation: Computation
    instruction: Instruction
    calls: tuple[Instruction, ...]
    hbm: int
    host: int
    cycles: int
    vector: int
    flops: int
    kernels: int


def costs(hlo_text: str) -> Iterator[Cost]:
    """Lists what each instruction of a compiled module costs in one run.

    The instructions of a loop cost as often as it runs, or once if its trip count depends on data.
    Those of all branches of a conditional are listed.

    Args:
        hlo_text: the text of a compiled module, `compiled.as_text()`.
    """
    module = parse(hlo_text)
    yield from _costs(module, module.entry, 1, ())


def _costs(
    module: Module, computation: Computation, times: int, calls: tuple[Instruction, ...]
) -> Iterator[Cost]:
    for instruction in computation.instructions.values():
        called = [module.computations[c] for names in instruction.called.values() for c in names]
        if instruction.opcode == "while":
            count = trip_count(module, computation, instruction) or 1
            for inner in called:
                yield from _costs(module, inner, times * count, (*calls, instruction))
        elif instruction.opcode == "conditional" or instruction.opcode in CALLS:
            for inner in called:
                yield from _costs(module, inner, times, (*calls, instruction))
        else:
            hbm, host, cycles, vector, flops, started = (
                times * count
                for count in (
                    traffic_of(module, computation, instruction, in_hbm),
                    traffic_of(module, computation, instruction, on_host),
                    cycles_of(instruction) or 0,
                    operations_of(module, computation, instruction),
                    products_of(module, computation, instruction),
                    is_kernel(instruction),
                )
            )
            yield Cost(
                *(computation, instruction, calls, hbm, host, cycles, vector, flops, started)
            )
