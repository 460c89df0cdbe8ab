"""The estimated time of one run of a compiled program, whole and by instruction."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from jaxcomp.memory._costs import costs
from jaxcomp.memory._targets import Target

_KERNEL_SECONDS = 2e-6


def estimated_seconds(figures: Mapping[str, Any], target: Target) -> float | None:
    """Adds the times of a program's traffic, its arithmetic, and its copies to the host.

    Each takes its count over the peak rate of the target. They add up: elementwise kernels wait for
    memory while matrix units are idle, and no copy is taken to overlap with other work. The
    arithmetic is the FLOPs of products and, on a GPU, the elementwise operations. Each kernel of a
    GPU takes 2 microseconds more, as measured on an H200. On a TPU whose clock is known, XLA's
    estimate of the cycles stands for the traffic and the arithmetic. Collectives cost their HBM
    traffic only, not their time on the links between devices.

    Args:
        figures: the figures of a `MemoryReport` by name.
        target: the target.

    Returns:
        Seconds; `None` if a count, the bandwidth or the matrix units' rate is not known.
    """
    copying = host_seconds(figures["host_traffic_bytes"], target)
    if figures["estimated_cycles"] is not None and target.clock is not None:
        return copying + figures["estimated_cycles"] / target.clock
    traffic, flops = figures["hbm_traffic_bytes"], figures["flops"]
    if traffic is None or flops is None:
        return None
    if target.bandwidth is None or target.flops_per_second is None:
        return None
    products = flops / target.devices / target.flops_per_second
    rest = kernel_seconds(figures["vector_operations"], figures["kernels"], target)
    return copying + traffic / target.bandwidth + products + rest


def seconds_by_instruction(hlo_text: str, target: Target) -> dict[str, float] | None:
    """Returns the estimated seconds of each instruction of a compiled program, by name.

    They are those of `estimated_seconds`, with the FLOPs of the products that XLA kept. An
    instruction in a loop has the seconds of all iterations.

    Args:
        hlo_text: the text of a compiled module, `compiled.as_text()`.
        target: the target that it was compiled for.

    Returns:
        The seconds; `None` where the rates of the target are not known.
    """
    seconds: dict[str, float] = defaultdict(float)
    for cost in costs(hlo_text):
        figures = {
            "hbm_traffic_bytes": cost.hbm,
            "host_traffic_bytes": cost.host,
            "flops": cost.flops * target.devices,
            "vector_operations": cost.vector,
            "kernels": cost.kernels,
            "estimated_cycles": cost.cycles if target.platform == "tpu" else None,
        }
        estimate = estimated_seconds(figures, target)
        if estimate is None:
            return None
        seconds[cost.instruction.name] += estimate
    return dict(seconds)


def host_seconds(nbytes: int | None, target: Target) -> float:
    """Returns the estimated time of copies to and from the host; 0 where its link is not known."""
    return 0.0 if target.link_bandwidth is None else (nbytes or 0) / target.link_bandwidth


def kernel_seconds(operations: int | None, kernels: int | None, target: Target) -> float:
    """Returns the estimated time of elementwise operations and kernel launches on a GPU.

    It is 0 on other devices, and without operations where their rate is not known.
    """
    if target.platform != "cuda":
        return 0.0
    rate = target.vector_operations_per_second
    computing = 0.0 if rate is None else (operations or 0) / rate
    return computing + _KERNEL_SECONDS * (kernels or 0)
