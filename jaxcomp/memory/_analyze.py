"""`analyze`: reports the device memory that a JAX function needs, without running it."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxcomp.memory._collectives import collective_traffic
from jaxcomp.memory._compiling import CompiledStep, CompileError, compile_step
from jaxcomp.memory._declared import NotDifferentiableError, declared_residuals
from jaxcomp.memory._estimate import estimated_seconds
from jaxcomp.memory._flops import jaxpr_flops
from jaxcomp.memory._kernels import kernels
from jaxcomp.memory._live_bytes import Timeline, compile_with_timeline
from jaxcomp.memory._report import MemoryReport
from jaxcomp.memory._sizes import bytes_of
from jaxcomp.memory._targets import Target, resolve
from jaxcomp.memory._tracing import TracedStep, trace
from jaxcomp.memory._traffic import estimated_cycles, hbm_traffic, host_traffic
from jaxcomp.memory._vector import vector_operations

# The TPU compiler's error for a program that does not fit. Other compilers do not raise one.
_OUT_OF_HBM = "CompileTimeHbmOom"
# XLA's rematerialization pass gives its copy of an instruction such a name.
_RECOMPUTED = re.compile(r"^\s*(ROOT )?%\S+\.remat\S* = ", re.MULTILINE)
_POWERS = {"K": 10, "M": 20, "G": 30, "T": 40}


def analyze(
    fn: Callable[..., object],
    *args: object,
    target: str | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    capacity: int | str | None = None,
    xla_remat: bool = True,
) -> MemoryReport:
    """Compiles a function for a target and reports the memory that it needs.

    The function is traced and compiled. It is not run, and no device memory is allocated. The
    target need not be attached: the program is then compiled ahead of time for an absent device.

    A program that does not fit gives a report with `fits=False`. A program that the TPU compiler
    rejects for lack of memory gives such a report too. If XLA rejects a program for an absent GPU
    because its first tile sizes do not fit a matrix product, the program is compiled with the flag
    that the report's `xla_flag` names.

    The report excludes the workspace of cuDNN, the CUDA context, memory fragmentation and the
    buffers of NCCL. Arrays that `fn` closes over are constants of the program. XLA for GPU may
    exclude constants from its byte counts, so pass parameters as arguments instead. The size of
    the constants is `constant_bytes`.

    What was compiled for an absent device is kept in `~/.cache/jaxcomp`, or in the folder of JAX's
    compilation cache if that is set, up to 1 GiB. JAX's `jax_enable_compilation_cache=False` turns
    it off.

    Args:
        fn: a function of arrays. It may already be jitted by `jax.jit` or `nnx.jit`. Its jit's
            `compiler_options` are passed to the target's compiler. For an absent device, the
            options that `compiler_options()` returns are removed from them.
        *args: the arguments of `fn`: arrays, `jax.ShapeDtypeStruct`s, Flax NNX objects, or
            pytrees of them, of any shape and dtype. For a target of several devices, the arrays
            need a `NamedSharding` over `mesh(target, ...)`.
        target: a target's name, such as `cpu`, `h100`, `h100:8` or `v5e:4x4`. `targets()` lists
            the names. The default is the attached device.
        donate_argnums: positions of the arguments that the program may overwrite, as in
            `jax.jit`.
        static_argnums: positions of the arguments that are compile-time constants, as in
            `jax.jit`.
        capacity: what the program may use per device: bytes, or text such as "11GiB". The default
            is 75% of an absent
            GPU's memory (the fraction that JAX preallocates), the limit of the compiler for an
            absent TPU, and the memory limit that JAX reports for an attached device.
        xla_remat: whether XLA may recompute values on its own to save memory, which is its
            default. Pass `False` to compare programs without this effect.

    Returns:
        A report. Its byte counts are per device, unless the attribute says otherwise.

    Raises:
        ValueError: if `target` is unknown, if the mesh of the arguments does not match the
            target, if `capacity` is not a positive integer, or if `fn` is already jitted and
            `donate_argnums` or `static_argnums` is given.
        ImportError: if the wheel with the target's compiler is not installed.
        CompileError: if the compilation fails for a reason other than lack of memory.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxcomp import memory
        >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        >>> report = memory.analyze(lambda x: x @ x + 1, x, target="cpu", capacity=10**6)
        >>> report.argument_bytes, report.output_bytes, report.flops, report.fits
        (16384, 16384, 524288, True)
    """
    where = resolve(target)
    step = trace(
        fn,
        *args,
        donate_argnums=donate_argnums,
        static_argnums=static_argnums,
        target=where,
    )
    return analyze_step(step, where, capacity, xla_remat).report


class Analysis(NamedTuple):
    """What `analyze_step` finds.

    Attributes:
        report: the report.
        timeline: the timeline, if it was asked for; `None` where the compiler rejects the program
            for lack of memory.
        hlo_text: the text of the compiled module; "" where the compiler rejects the program.
    """

    report: MemoryReport
    timeline: Timeline | None
    hlo_text: str


def analyze_step(
    step: TracedStep,
    where: Target,
    capacity: int | str | None,
    xla_remat: bool,
    with_timeline: bool = False,
    with_lines: bool = True,
) -> Analysis:
    """Analyzes a traced function, and reads its timeline from the same compilation.

    Args:
        step: the traced function.
        where: the target to compile for.
        capacity: bytes per device that the program may use; `None` for the target's default.
        xla_remat: whether XLA may recompute values on its own to save memory.
        with_timeline: whether to read the timeline.
        with_lines: whether the source lines of the timeline are needed.

    Returns:
        The report, the timeline and the text of the compiled module.

    Raises:
        ValueError: if `capacity` is not a positive integer, or if the arguments do not match
            the target.
        CompileError: if the compilation fails for a reason other than lack of memory.
    """
    usable = usable_bytes(where, capacity)
    figures: dict[str, Any] = dict.fromkeys(
        field.name for field in dataclasses.fields(MemoryReport)
    )
    figures |= {
        "target": where.name,
        "constant_bytes": step.constant_bytes,
        "declared_residual_bytes": _declared(step),
        "flops": jaxpr_flops(step.jaxpr, where.platform),
        "capacity_bytes": where.capacity_bytes,
        "usable_bytes": usable,
    }
    timeline, hlo_text = None, ""
    try:
        if with_timeline:
            compiled, timeline = compile_with_timeline(
                step, where, xla_remat=xla_remat, with_lines=with_lines
            )
        else:
            compiled = compile_step(step, where, xla_remat=xla_remat)
        hlo_text = compiled.hlo_text
        figures |= _compiled_figures(compiled, where)
        if usable is not None:
            headroom = usable - figures["total_bytes"]
            figures |= {"headroom_bytes": headroom, "fits": headroom >= 0}
    except CompileError as error:
        if _OUT_OF_HBM not in str(error):
            raise
        # The message rounds the total, so it may not exceed the usable bytes of a rejected program.
        total = _bytes_needed(str(error))
        short = None if total is None or usable is None or total <= usable else usable - total
        figures |= {"total_bytes": total, "headroom_bytes": short, "fits": False}
    figures["estimated_seconds"] = estimated_seconds(figures, where)
    return Analysis(MemoryReport(**figures), timeline, hlo_text)


def usable_bytes(target: Target, capacity: int | str | None) -> int | None:
    """Returns the bytes per device that a program may use.

    Args:
        target: the target.
        capacity: the caller's limit, bytes or text such as "11GiB", or `None` for the target's own
            limit.

    Returns:
        `capacity` if it is given, else the target's limit; `None` if that is not known.

    Raises:
        TypeError: if `capacity` is neither an integer nor text.
        ValueError: if it is not positive, or is text without a known unit.
    """
    return target.usable_bytes if capacity is None else bytes_of("capacity", capacity)


def _declared(step: TracedStep) -> int | None:
    """Returns declared residual bytes; `None` if the function is not differentiable."""
    try:
        return sum(residual.nbytes for residual in declared_residuals(step.traced.jaxpr))
    except NotDifferentiableError:
        return None


def _compiled_figures(compiled: CompiledStep, target: Target) -> dict[str, Any]:
    """Returns XLA's figures of a compiled program, by the names of the report's attributes."""
    given = compiled.memory
    arguments, outputs, aliased, temp = (
        given[f"{kind}_size_in_bytes"] for kind in ("argument", "output", "alias", "temp")
    )
    total = given.get("total_allocation_bytes", arguments + outputs - aliased + temp)
    peak = given.get("peak_memory_in_bytes")
    # XLA for CPU sets the field to arguments + outputs. With arrays in host memory, the field may
    # include them.
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
        "host_traffic_bytes": host_traffic(compiled.hlo_text),
        "collective_bytes": collective_traffic(compiled.hlo_text),
        "estimated_cycles": estimated_cycles(compiled.hlo_text),
        "vector_operations": vector_operations(compiled.hlo_text),
        "kernels": kernels(compiled.hlo_text),
        "compile_seconds": compiled.compile_seconds,
        "xla_flag": compiled.xla_flag,
        "xla_recomputes": bool(_RECOMPUTED.search(compiled.hlo_text)),
    }


def _bytes_needed(message: str) -> int | None:
    """Returns the bytes that XLA's out-of-memory message states, for example as `(17.31G)`."""
    found = re.search(r"required for .*?\(([0-9.]+)([KMGT])\)", message)
    return found and round(float(found[1]) * 2 ** _POWERS[found[2]])
