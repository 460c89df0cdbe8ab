"""Compiles a traced function for any target, without running it.

For an attached target, the compiler runs in this process; within `apart`, for a CPU it does not.
For an absent device, the traced program is exported by `jax.export`, which keeps scopes, source
lines and optimization barriers. A child process compiles it. A compiler that aborts then ends only
the child. The start-up of a plugin, the lock of libtpu and the changed environment are confined to
the child too. The byte counts do not depend on where the compiler runs.
"""

import contextlib
import contextvars
import dataclasses
import hashlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax import export
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, NamedSharding

from jaxcomp.memory import _answers as answers
from jaxcomp.memory import _compile_worker as compile_worker
from jaxcomp.memory._buffer_assignment import (
    dump_options,
    no_compilation_cache,
    read_dump,
    write_dump,
)
from jaxcomp.memory._options import compiler_options
from jaxcomp.memory._targets import Target
from jaxcomp.memory._tracing import TracedStep, inner_jaxprs

# For an absent GPU, XLA takes the first tile sizes of its list for each matrix product and raises
# this error if they do not fit. With the first flag it takes the best that fit by its cost model,
# and cuBLAS if none fit; other products have the same operands and results as without the flag.
# The second flag takes cuBLAS for all products.
_NO_TILE_SIZES = "Couldn't find output tile sizes"
_NO_PTXAS = "No PTX compilation provider is available"
_TILE_FLAGS = (
    "--xla_gpu_experimental_cost_model_gemm_tiling_options=top=1,top_from_default=1",
    "--xla_gpu_enable_triton_gemm=false",
)

# The format of these calls may change between JAX versions. The child has the same JAX. Those of
# cuDNN are attentions by `jax.nn.dot_product_attention(..., implementation="cudnn")`.
_OF_ONE_VERSION = (
    *("__gpu$xla.gpu.triton", "LayoutConstraint"),
    *("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"),
    *("__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"),
)


_apart: contextvars.ContextVar[bool] = contextvars.ContextVar("apart", default=False)


class CompileError(RuntimeError):
    """The compilation of a program failed.

    The message is that of XLA. If the compiler's process aborted, the message has its exit status
    and the end of its log.

    Example:
        >>> import jax
        >>> from jaxcomp import memory
        >>> step = jax.jit(lambda x: 2 * x, compiler_options={"xla_no_such_option": "1"})
        >>> try:
        ...     memory.analyze(step, 1.0, target="cpu")
        ... except memory.CompileError as error:
        ...     print("xla_no_such_option" in str(error))
        True
    """


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled function.

    Attributes:
        hlo_text: the text of the optimized, scheduled HLO module.
        memory: the fields of XLA's `CompiledMemoryStats` in bytes. The set of fields depends on
            the version of jaxlib.
        compile_seconds: wall time of the compilation alone, in seconds.
        xla_flag: the flag without which XLA rejects the program, as in `MemoryReport`.
    """

    hlo_text: str
    memory: dict[str, int]
    compile_seconds: float
    xla_flag: str | None = None


def compile_step(
    step: TracedStep,
    target: Target,
    *,
    xla_remat: bool = True,
    dump_dir: str | os.PathLike[str] | None = None,
    with_lines: bool = False,
) -> CompiledStep:
    """Compiles a traced function for a target.

    Args:
        step: the traced function.
        target: the target to compile for.
        xla_remat: whether XLA may recompute values on its own to save memory.
        dump_dir: folder to which XLA dumps the buffer assignment and the live ranges.
        with_lines: whether the source lines of the HLO text are needed. Else a cached result of an
            equal program may have those of other lines.

    Returns:
        The compiled program's HLO text and byte counts.

    Raises:
        ValueError: if the mesh of the arguments does not match the target, or if the target is
            attached and an argument lies on a device of another platform.
        CompileError: if the compilation fails, also for lack of memory on a TPU.
        OSError: if `dump_dir` cannot be written.
    """
    if dump_dir is not None:
        Path(dump_dir).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=dump_dir).close()
    folder = None if dump_dir is None else os.fspath(dump_dir)
    if target.attached:
        _check_places(step, target)
    if target.attached and not (target.platform == "cpu" and _apart.get()):
        return _compile_here(step, target, xla_remat, folder)
    return _compile_in_child(step, target, xla_remat, folder, with_lines)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Compiles steps for an attached CPU in a child process, too, within the context.

    An aborted compiler, or Ctrl-C while it works, then leaves this process alone.
    """
    token = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(token)


def fingerprint(step: TracedStep, target: Target) -> str:
    """Returns a text that is equal for steps that a compiler makes the same program of.

    Raises:
        CompileError: if the program calls back to Python and the target is not attached.
    """
    if target.attached:
        program = step.traced.lower().as_text().encode()
    else:
        program = _export(step, target.platform).mlir_module_serialized
    parts = (program, repr(sorted(step.compiler_options.items())).encode(), repr(target).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _compile_here(
    step: TracedStep, target: Target, xla_remat: bool, dump_dir: str | None
) -> CompiledStep:
    previous = jax.config.values["jax_compiler_enable_remat_pass"]
    jax.config.update("jax_compiler_enable_remat_pass", xla_remat)
    try:
        with jax.default_device(jax.local_devices(backend=target.platform)[0]):
            lowered = step.traced.lower()
            if dump_dir is None:
                return CompiledStep(**compile_worker.compile_lowered(lowered, {}))
            with no_compilation_cache():
                options = dump_options(dump_dir, target.platform)
                return CompiledStep(**compile_worker.compile_lowered(lowered, options))
    except jax.errors.JaxRuntimeError as error:
        raise CompileError(str(error)) from error
    finally:
        jax.config.update("jax_compiler_enable_remat_pass", previous)


def _compile_in_child(
    step: TracedStep, target: Target, xla_remat: bool, dump_dir: str | None, with_lines: bool
) -> CompiledStep:
    exported = _export(step, target.platform)
    for_this_device = {} if target.attached else compiler_options()
    own = {n: v for n, v in step.compiler_options.items() if n not in for_this_device}
    request = {
        "exported": exported,
        "platform": target.platform,
        "topology": dict(target.topology_options),
        "mesh": _mesh(step, exported.nr_devices, target),
        "donated": step.donated,
        "argument_names": step.jaxpr.debug_info.arg_names,
        "compiler_options": own,
        "xla_remat": xla_remat,
    }
    rest = {name: part for name, part in request.items() if name != "exported"}
    program = exported.mlir_module()
    program = program if with_lines else answers.without_lines(program)
    kept = answers.answer_file(program, rest, dump_dir is not None)
    answer = answers.read(kept) if kept else None
    if answer is None:
        dump = {} if dump_dir is None else dump_options(dump_dir, target.platform)
        answer = _with_tile_sizes(request | {"compiler_options": own | dump}, target)
        if kept:
            answers.write(kept, answer | {"dump": read_dump(dump_dir) if dump_dir else {}})
    else:
        dump = answer.pop("dump")
        if dump_dir is not None:
            write_dump(dump_dir, dump)
    return CompiledStep(**answer)


def _with_tile_sizes(request: dict[str, Any], target: Target) -> dict[str, Any]:
    """Compiles a program, with another flag if XLA's first tile sizes do not fit a product of it.

    Returns:
        The fields of a `CompiledStep`.

    Raises:
        CompileError: if the compilation fails; that without flags, if it fails with flags too.
    """
    try:
        return _ask_child(request, target)
    except CompileError as error:
        if _NO_TILE_SIZES not in str(error):
            raise
        for flag in _TILE_FLAGS:
            with contextlib.suppress(CompileError):
                return _ask_child(request, target, flag) | {"xla_flag": flag}
        raise


def _ask_child(request: dict[str, Any], target: Target, flag: str = "") -> dict[str, Any]:
    """Compiles a program in a child process, with one more of XLA's flags."""
    flags = [*os.environ.get("XLA_FLAGS", "").split(), flag]
    if not target.attached:  # an option of this compiler may break another: barriers in particular
        flags = [f for f in flags if not f.startswith("--xla_disable_hlo_passes")]
    environment = {
        **os.environ,
        "XLA_FLAGS": " ".join(flags),
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        answer_file = Path(folder) / "answer"
        child = subprocess.run(
            [sys.executable, "-P", compile_worker.__file__, answer_file, str(os.getpid())],
            input=pickle.dumps(request),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            check=False,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the child
        )
        if not answer_file.exists():
            log = child.stdout.decode(errors="replace")[-2000:]
            raise CompileError(
                f"the compiler for {target.name} ended with status {child.returncode}:\n{log}"
            )
        answer: dict[str, Any] = pickle.loads(answer_file.read_bytes())
    if "error" in answer:
        raise CompileError(_explained(answer["error"]))
    return answer


def _explained(error: str) -> str:
    """Returns an error of XLA, or what to do about it."""
    if _NO_PTXAS not in error:
        return error
    return (
        "XLA found no ptxas, the assembler for NVIDIA GPUs; install it with: pip install "
        "'jaxcomp[gpu-aot]', or put that of a CUDA toolkit into PATH"
    )


def _check_places(step: TracedStep, target: Target) -> None:
    """Raises a ValueError if an argument lies on a device of another platform."""
    for leaf in step.arguments:
        place = _place(leaf)
        if place not in (None, target.platform):
            raise ValueError(f"target={target.name!r}: an argument lies on {place} devices")


def _place(leaf: Any) -> str | None:
    """Returns the platform of an argument's devices.

    It is `None` if the argument is not committed to any.
    """
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not getattr(leaf, "committed", True):
        return None
    if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        return "an abstract mesh's"
    return next(iter(sharding.device_set)).platform


class _TracedFunction(jax.stages.Wrapped):
    """Presents a traced function to `jax.export` as a jitted one."""

    def __init__(self, traced: jax.stages.Traced) -> None:
        self._traced = traced

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        return self._traced


def _export(step: TracedStep, platform: str) -> export.Exported:
    """Exports a program with flat arguments and results, so that it can be pickled.

    `Exported.serialize` supports neither 2-bit dtypes nor unregistered pytrees, so it is not used.

    Raises:
        CompileError: if the program calls back to Python.
    """
    for name in _callbacks(step.jaxpr):
        raise CompileError(
            f"the program calls back to Python ({name}), which cannot be compiled for a device "
            "that is not attached; remove the callback (jax.debug.print is also one)"
        )
    function = _TracedFunction(step.traced)  # type: ignore[abstract]  # only traced
    calls = [export.DisabledSafetyCheck.custom_call(name) for name in _OF_ONE_VERSION]
    exported = export.export(function, platforms=[platform], disabled_checks=calls)()
    return dataclasses.replace(
        exported,
        _get_vjp=None,
        in_tree=jax.tree.structure((tuple(exported.in_avals), {})),
        out_tree=jax.tree.structure(list(exported.out_avals)),
    )


def _callbacks(jaxpr: Jaxpr) -> Iterator[str]:
    """Returns names of the primitives that call back to Python."""
    for equation in jaxpr.eqns:
        if "callback" in equation.primitive.name or equation.primitive.name == "debug_print":
            yield equation.primitive.name
        for inner in inner_jaxprs(equation):
            yield from _callbacks(inner)


def _mesh(step: TracedStep, devices: int, target: Target) -> AbstractMesh | None:
    """Returns the mesh of the arguments' shardings; `None` for a single device.

    Args:
        step: the traced function.
        devices: the number of devices that the program was exported for.
        target: the target.

    Raises:
        ValueError: if the shardings have no mesh, several meshes, or a mesh of another size.
    """
    shardings = [getattr(leaf, "sharding", None) for leaf in step.arguments]
    meshes = {s.mesh.abstract_mesh for s in shardings if isinstance(s, NamedSharding)}
    if not meshes and devices > 1:
        raise ValueError(
            f"target={target.name!r}: fn is compiled for {devices} devices, but no argument has a "
            "sharding; expected arguments with NamedShardings over jaxcomp.memory.mesh(target, "
            "...), not only jax.jit(in_shardings=...)"
        )
    if not meshes and target.devices == 1:
        return None
    if target.attached and len(meshes) == 1:  # of which the target has no number
        return meshes.pop()
    if len(meshes) != 1 or next(iter(meshes)).size != target.devices:
        found = ", ".join(str(dict(mesh.shape)) for mesh in meshes) or "none"
        raise ValueError(
            f"target={target.name!r} has {target.devices} devices; the arguments' shardings have "
            f"these meshes: {found}; expected NamedShardings over jaxcomp.memory.mesh(target, ...)"
        )
    return meshes.pop()
