"""`analyze`: what a JAX function needs of a device's memory, without running it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from ._compiling import CompiledStep, CompileError, compile_step
from ._declared import NotDifferentiableError, declared_residuals
from ._flops import jaxpr_flops
from ._live_bytes import Timeline, compile_with_timeline
from ._report import MemoryReport
from ._targets import Target, resolve
from ._tracing import TracedStep, trace
from ._traffic import estimated_cycles, hbm_traffic

# How a TPU's compiler says that a program does not fit; other compilers do not say so.
_OUT_OF_HBM = "CompileTimeHbmOom"
_POWERS = {"K": 10, "M": 20, "G": 30, "T": 40}


def analyze(
    fn: Callable[..., Any],
    *args: Any,
    target: str | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    capacity: int | None = None,
    xla_remat: bool = True,
) -> MemoryReport:
    """Compiles `fn` for a device, here or not, and reports the memory that it needs.

    Nothing is allocated or run. A program that does not fit is a report with `fits` False, also
    where the compiler itself refuses it (TPU).

    Arrays that `fn` closes over are constants of the program, and what XLA says of a GPU leaves
    constants out (`constant_bytes`): give parameters as arguments. Not in the figures either:
    workspace of cuDNN, the CUDA context, fragmentation, and NCCL's buffers.

    Args:
        fn: any function of arrays, plain or jitted by `jax.jit` or `nnx.jit`, whose
            `compiler_options` go to the target's compiler (those of `jaxcomp.compiler_options()`
            to the attached device's alone).
        *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, Flax NNX objects or pytrees of
            them. For several devices they carry `NamedSharding`s over `mesh(target, ...)`.
        target: one of `targets()`, such as `cpu`, `h100`, `h100:8`, `v5e:4x4`; the attached
            device by default.
        donate_argnums: which arguments the program may overwrite, as in `jax.jit`.
        static_argnums: which arguments are compile-time constants, as in `jax.jit`.
        capacity: bytes that the program may use. By default 75% of a GPU, which is what JAX
            preallocates, and of a TPU what its compiler allows.
        xla_remat: whether XLA may recompute values on its own where memory is short, as it does
            by default. Without it, figures of different programs compare cleanly.

    Returns:
        The report.

    Raises:
        ValueError: if the target is unknown, the arguments' mesh is not the target's, or
            `capacity` is not positive.
        ImportError: if the wheel with the target's compiler is not installed.
        CompileError: if the compiler fails for another reason than memory.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        >>> report = analyze(lambda x: x @ x + 1, x, target="cpu")
        >>> report.argument_bytes, report.output_bytes, report.flops
        (16384, 16384, 524288)
    """
    where = resolve(target)
    step = trace(
        fn,
        *args,
        donate_argnums=donate_argnums,
        static_argnums=static_argnums,
        target=where,
    )
    return analyze_step(step, where, capacity, xla_remat)[0]


def analyze_step(
    step: TracedStep,
    where: Target,
    capacity: int | None,
    xla_remat: bool,
    with_timeline: bool = False,
) -> tuple[MemoryReport, Timeline | None]:
    """`analyze` of a traced function, and of the same compilation its timeline.

    Without `with_timeline`, or where the compiler refuses the program, there is no timeline.
    """
    usable = usable_bytes(where, capacity)
    figures: dict[str, Any] = dict.fromkeys(field.name for field in fields(MemoryReport))
    figures |= {
        "target": where.name,
        "constant_bytes": step.constant_bytes,
        "declared_residual_bytes": _declared(step),
        "flops": jaxpr_flops(step.jaxpr, where.platform),
        "capacity_bytes": where.capacity_bytes,
        "usable_bytes": usable,
    }
    timeline = None
    try:
        if with_timeline:
            compiled, timeline = compile_with_timeline(step, where, xla_remat=xla_remat)
        else:
            compiled = compile_step(step, where, xla_remat=xla_remat)
        figures |= _compiled_figures(compiled, where)
        if usable is not None:
            headroom = usable - figures["total_bytes"]
            figures |= {"headroom_bytes": headroom, "fits": headroom >= 0}
    except CompileError as error:
        if _OUT_OF_HBM not in str(error):
            raise
        total = _bytes_needed(str(error))  # rounded, and what the compiler allows is its own affair
        short = None if total is None or usable is None or total <= usable else usable - total
        figures |= {"total_bytes": total, "headroom_bytes": short, "fits": False}
    figures["roofline_seconds"] = _roofline(figures["hbm_traffic_bytes"], figures["flops"], where)
    return MemoryReport(**figures), timeline


def usable_bytes(target: Target, capacity: int | None) -> int | None:
    """What a program may use: `capacity`, or else what is known of the target.

    Raises:
        ValueError: if `capacity` is not a positive whole number.
    """
    if capacity is None:
        return target.usable_bytes
    if not isinstance(capacity, int) or capacity <= 0:
        raise ValueError(f"capacity={capacity!r}: expected a positive number of bytes")
    return capacity


def _declared(step: TracedStep) -> int | None:
    try:
        return sum(residual.nbytes for residual in declared_residuals(step.traced.jaxpr))
    except NotDifferentiableError:
        return None


def _roofline(traffic: int | None, flops: int | None, target: Target) -> float | None:
    """Seconds of one run at the device's best; None where one of the figures is unknown."""
    if traffic is None or flops is None:
        return None
    if target.bandwidth is None or target.flops_per_second is None:
        return None
    return max(traffic / target.bandwidth, flops / target.devices / target.flops_per_second)


def _compiled_figures(compiled: CompiledStep, target: Target) -> dict[str, Any]:
    """What XLA says of a compiled program, under the report's names."""
    given = compiled.memory
    arguments, outputs, aliased, temp = (
        given[f"{kind}_size_in_bytes"] for kind in ("argument", "output", "alias", "temp")
    )
    total = given.get("total_allocation_bytes", arguments + outputs - aliased + temp)
    peak = given.get("peak_memory_in_bytes")
    # On a CPU the field is there, but is arguments + results whatever the program keeps. Where
    # arrays lie on the host, it may count those.
    if target.platform == "cpu" or (given["host_temp_size_in_bytes"] and (peak or 0) > total):
        peak = None
    return {
        "argument_bytes": arguments,
        "output_bytes": outputs,
        "alias_bytes": aliased,
        "temp_bytes": temp,
        "host_temp_bytes": given["host_temp_size_in_bytes"],
        "peak_bytes": peak,
        "total_bytes": total,
        "hbm_traffic_bytes": hbm_traffic(compiled.hlo_text),
        "estimated_cycles": estimated_cycles(compiled.hlo_text),
        "compile_seconds": compiled.compile_seconds,
    }


def _bytes_needed(message: str) -> int | None:
    """The size that XLA's error for lack of memory names, such as `(17.31G)`."""
    found = re.search(r"required for .*?\(([0-9.]+)([KMGT])\)", message)
    return found and round(float(found[1]) * 2 ** _POWERS[found[2]])
