"""Child process that compiles one exported program for devices that are not there.

Run as a script: it reads a pickled request on standard input and writes a pickled answer to the
file named by its argument. It imports nothing of jaxcomp, so that it starts as fast as JAX does.
"""

import pickle
import sys
import time
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

# The exported program is called by a new `jit`, which stands in front of each of its scopes.
_CALLER = "jit(call)/call_exported/"


def compile_request(request: dict[str, Any]) -> dict[str, Any]:
    """Compiles the request's exported program for the request's topology."""
    exported = request["exported"]
    topology = topologies.get_topology_desc(platform=request["platform"], **request["topology"])
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(
            exported.in_avals, _shardings(exported, topology, request["mesh"]), strict=True
        )
    ]
    lowered = jax.jit(exported.call, donate_argnums=request["donated"]).lower(*arguments)
    return compile_lowered(lowered, request["compiler_options"])


def compile_lowered(lowered: Any, compiler_options: dict[str, Any]) -> dict[str, Any]:
    """Compiles, and returns what is to be known of it: HLO text, XLA's byte counts, seconds."""
    started = time.monotonic()
    compiled = lowered.compile(compiler_options=compiler_options)
    seconds = time.monotonic() - started
    stats = compiled.memory_analysis()
    figures = {name: getattr(stats, name) for name in dir(stats) if not name.startswith("_")}
    return {
        "hlo_text": compiled.as_text().replace(_CALLER, ""),
        "memory": {name: value for name, value in figures.items() if isinstance(value, int)},
        "compile_seconds": seconds,
    }


def _shardings(exported: Any, topology: Any, mesh: Any) -> list[jax.sharding.Sharding]:
    """One sharding for each argument: the exported one, on the topology's devices."""
    if mesh is None:
        return [SingleDeviceSharding(topology.devices[0])] * len(exported.in_avals)
    devices = topologies.make_mesh(topology, mesh.axis_sizes, mesh.axis_names).devices
    placed = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
    everywhere = NamedSharding(placed, PartitionSpec())
    return [sharding or everywhere for sharding in exported.in_shardings_jax(placed)]


if __name__ == "__main__":
    task = pickle.load(sys.stdin.buffer)
    jax.config.update("jax_enable_x64", True)  # the program's types are settled, keep them
    jax.config.update("jax_compiler_enable_remat_pass", task["xla_remat"])
    jax.config.update("jax_compilation_cache_dir", task["cache_dir"])
    try:
        answer = compile_request(task)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    with open(sys.argv[1], "wb") as file:
        pickle.dump(answer, file)
