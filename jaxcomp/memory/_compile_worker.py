"""Child process that compiles one exported program, for absent devices or its own CPUs.

The module runs as a script. It reads a pickled request from standard input and writes a pickled
answer to the file that its first argument names. The second is the id of the process that waits for
it. It imports nothing of jaxcomp, to start quickly.
"""

import ctypes
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding


def compile_request(request: dict[str, Any]) -> dict[str, Any]:
    """Compiles the exported program of a request for the topology of the request."""
    exported = request["exported"]
    devices = _devices(request["platform"], request["topology"])
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(
            exported.in_avals, _shardings(exported, devices, request["mesh"]), strict=True
        )
    ]
    lowered = jax.jit(exported.call, donate_argnums=request["donated"]).lower(*arguments)
    answer = compile_lowered(lowered, request["compiler_options"])
    return answer | {"hlo_text": _own_names(answer["hlo_text"], request["argument_names"])}


def compile_lowered(lowered: Any, compiler_options: dict[str, Any]) -> dict[str, Any]:
    """Compiles a lowered program.

    Returns:
        The optimized HLO text, XLA's byte counts by name, and the compilation time in seconds.
    """
    started = time.monotonic()
    compiled = lowered.compile(compiler_options=compiler_options)
    seconds = time.monotonic() - started
    stats = compiled.memory_analysis()
    figures = {name: getattr(stats, name) for name in dir(stats) if not name.startswith("_")}
    return {
        "hlo_text": _text(compiled, lowered, compiler_options),
        "memory": {name: value for name, value in figures.items() if isinstance(value, int)},
        "compile_seconds": seconds,
    }


def _text(compiled: Any, lowered: Any, compiler_options: dict[str, Any]) -> str:
    """Returns the optimized HLO text.

    JAX cannot read some asynchronous instructions of libtpu, such as gathers by the sparse cores of
    a v5p. The program is then compiled again, with a dump of its text.
    """
    try:
        text: str = compiled.as_text()
    except jax.errors.JaxRuntimeError:
        with tempfile.TemporaryDirectory() as folder:
            dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
            lowered.compile(compiler_options=compiler_options | dump)
            files = Path(folder).glob("*.after_codegen.txt")
            text = max(files, key=lambda path: path.stat().st_size).read_text()
    return text


def _own_names(hlo_text: str, argument_names: Sequence[str]) -> str:
    """Restores the names of scopes and arguments that the exported program had.

    The call of the exported program adds a scope and renames the arguments.
    """

    def own(match: re.Match[str]) -> str:
        return f'op_name="{argument_names[int(match[1])]}"'.replace("'", "\\'")

    plain = re.sub(r"jit\(call\)/call_exported/?", "", hlo_text)
    return re.sub(r'op_name="args\[(\d+)\]"', own, plain)


def _devices(platform: str, topology: dict[str, Any]) -> list[jax.Device]:
    """Returns the CPUs of this process, or the absent devices of a topology."""
    if platform == "cpu":
        return jax.devices("cpu")
    return list(topologies.get_topology_desc(platform=platform, **topology).devices)


def _shardings(exported: Any, devices: list[jax.Device], mesh: Any) -> list[jax.sharding.Sharding]:
    """Returns the sharding of each argument: the exported one, on the devices."""
    if mesh is None:
        return [SingleDeviceSharding(devices[0])] * len(exported.in_avals)
    arranged = mesh_utils.create_device_mesh(mesh.axis_sizes, devices[: mesh.size])
    placed = Mesh(arranged, mesh.axis_names, axis_types=mesh.axis_types)
    everywhere = NamedSharding(placed, PartitionSpec())
    return [sharding or everywhere for sharding in exported.in_shardings_jax(placed)]


def _end_with(parent: int) -> None:
    """Makes the kernel kill this process when the parent ends, however it ends.

    Linux has this call. The compilers for absent devices exist for Linux alone.
    """
    if sys.platform == "linux":
        death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # which has ended already
            sys.exit(1)


if __name__ == "__main__":
    _end_with(int(sys.argv[2]))
    task = pickle.load(sys.stdin.buffer)
    jax.config.update("jax_enable_x64", True)  # Keeps the dtypes of the traced program.
    jax.config.update("jax_compiler_enable_remat_pass", task["xla_remat"])
    # JAX can write a cache entry for an absent device, but cannot read it.
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        answer = compile_request(task)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    unfinished = Path(sys.argv[1] + ".unfinished")
    unfinished.write_bytes(pickle.dumps(answer))
    unfinished.replace(sys.argv[1])
