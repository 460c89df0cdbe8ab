"""Counts the kernels of a compiled program from the text of its HLO module."""

from jaxcomp.memory._hlo import Instruction, parse
from jaxcomp.memory._traffic import is_free, total_over


def kernels(hlo_text: str) -> int | None:
    """Counts the kernels that one run of an optimized HLO module starts.

    Each instruction that computes or copies an array is a kernel: a fusion, a call of a library, a
    copy. The body of a loop counts once per iteration. A conditional counts its largest branch.

    Args:
        hlo_text: the text of a compiled module, `compiled.as_text()`.

    Returns:
        The number of kernels; `None` if the trip count of a loop depends on data.

    Raises:
        ValueError: if `hlo_text` is not a compiled HLO module.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.ones((256, 256))
        >>> kernels(jax.jit(lambda x: x + 1).lower(x).compile().as_text())
        1
    """
    module = parse(hlo_text)
    return total_over(module, module.entry, lambda _, i: is_kernel(i))


def is_kernel(instruction: Instruction) -> int:
    """Returns 1 if the instruction starts a kernel, else 0."""
    return int(not (is_free(instruction) or instruction.opcode.endswith("-done")))
