"""Counts the bytes of collectives in the text of an optimized HLO module."""

import re

from jaxcomp.memory._hlo import Instruction, Module, parse
from jaxcomp.memory._traffic import total_over

_COLLECTIVES = {
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
}


def collective_traffic(hlo_text: str) -> int | None:
    """Counts the bytes of the results of collectives in one run of an optimized HLO module.

    These are all-reduce, all-gather, reduce-scatter and the like, on one device, alone or in a
    fusion. What the network carries depends on the algorithm: a ring sends up to twice as much.

    Args:
        hlo_text: the text of a compiled module, `compiled.as_text()`.

    Returns:
        The number of bytes; `None` if the trip count of a loop depends on data.

    Raises:
        ValueError: if `hlo_text` is not a compiled HLO module.
    """
    module = parse(hlo_text)
    channels: set[str] = set()
    return total_over(module, module.entry, lambda _, i: _received(module, i, channels))


def _received(module: Module, instruction: Instruction, channels: set[str]) -> int:
    """Returns the bytes of the results of a collective; those of a `-start` are of its `-done`.

    On a TPU, a collective that runs beside other work is in several fusions. `channels` has those
    that were counted.
    """
    if instruction.opcode.removesuffix("-done") in _COLLECTIVES:
        return sum(array.bytes for array in instruction.arrays)
    if instruction.opcode != "fusion":
        return 0
    count = 0
    for name in (name for names in instruction.called.values() for name in names):
        for inner in module.computations[name].instructions.values():
            found = re.search(r"channel_id=(\d+)", inner.attributes)
            if found is None or found.group(1) not in channels:
                count += _received(module, inner, channels)
            channels |= {found.group(1)} if found else set()
    return count
