"""Targets of a compilation: the attached devices, and absent GPUs and TPUs.

A program is compiled ahead of time for an absent device, which is a device that is not attached.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from importlib import metadata

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxcomp.memory._gpus import GPUS, Gpu, target_config
from jaxcomp.memory._words import did_you_mean

# The fraction of GPU memory that JAX preallocates if XLA_CLIENT_MEM_FRACTION is not set.
_GPU_FRACTION = 0.75
_GPUS_PER_HOST = 8
_ALLOWANCE = 96 * 2**20  # of a GPU, docs/benchmarks/measured.md


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A TPU generation and the properties of one JAX device of it.

    Attributes:
        name: the target's name, which is also XLA's name of the accelerator.
        chip: the topology of one chip.
        memory_bytes: the published HBM of one device in bytes.
        usable_gib: the HBM that XLA's compiler lets a program use, in GiB. The compiler's
            out-of-memory message states it.
        bandwidth: the peak HBM bandwidth of one device in bytes per second.
        tensor_tflops: the peak throughput of bfloat16 matrix products of one device, in 10^12
            operations per second.
        devices_per_chip: the number of JAX devices on one chip.
        clock_ghz: the published clock rate in GHz; `None` if it is not known.
        link_bandwidth: the peak bandwidth of the link to the host, in bytes per second and
            direction (Austin et al., How to Scale Your Model, 2025, part 2); `None` if it is not
            known.
        options: further options of the topology.
    """

    name: str
    chip: str
    memory_bytes: int
    usable_gib: float
    bandwidth: int
    tensor_tflops: float
    devices_per_chip: int = 1
    clock_ghz: float | None = None
    link_bandwidth: int | None = None
    options: tuple[tuple[str, str], ...] = ()


TPUS = (
    Tpu("v4", "1x1x1", 32 * 2**30, 30.75, 1228 * 10**9, 275.0, clock_ghz=1.05,
        link_bandwidth=16 * 10**9, options=(("chip_config_name", "megacore"),)),
    Tpu("v5e", "1x1", 16 * 2**30, 15.75, 819 * 10**9, 197.0, clock_ghz=1.5,
        link_bandwidth=16 * 10**9),
    Tpu("v5p", "1x1x1", 96 * 2**30, 95.73, 2765 * 10**9, 459.0, clock_ghz=1.75,
        link_bandwidth=16 * 10**9),
    Tpu("v6e", "1x1", 32 * 2**30, 31.24, 1640 * 10**9, 918.0, link_bandwidth=32 * 10**9),
    Tpu("tpu7x", "1x1x1", 96 * 2**30, 94.74, 3690 * 10**9, 1153.5, devices_per_chip=2),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Target:
    """One or several equal devices for which a program is compiled.

    Attributes:
        name: the name that the caller gave, for example `h100:8`.
        platform: JAX's name of the platform: `cpu`, `cuda`, `tpu`, or that of the attached
            backend.
        attached: whether the devices are attached to this process.
        devices: the number of devices. It is 1 for an attached target, for which the mesh of the
            arguments decides.
        topology_options: the options for `jax.experimental.topologies.get_topology_desc`.
        capacity_bytes: the memory of one device in bytes; `None` if it is not known.
        usable_bytes: the memory of one device that JAX can use, in bytes; `None` if it is not
            known.
        bandwidth: the peak memory bandwidth of one device in bytes per second; `None` if it is
            not known.
        flops_per_second: the peak throughput of bfloat16 matrix products of one device in FLOPs
            per second; `None` if it is not known.
        link_bandwidth: the peak bandwidth of the link of one device to the host, in bytes per
            second and direction; `None` if it is not known.
        device_kind: the name that the driver of an absent GPU would report.
        clock: the clock rate of an absent TPU in cycles per second; `None` if it is not known.
        allowance_bytes: what a step uses beside XLA's buffers: workspaces of libraries and
            fragmentation. On a GPU it is the most that was measured, on an H200. The compiler for
            TPUs counts all that a program uses.
        vector_operations_per_second: the peak throughput of elementwise float32 operations of one
            absent GPU: lanes times clock rate; `None` if it is not known.
    """

    name: str
    platform: str
    attached: bool
    devices: int
    topology_options: tuple[tuple[str, str], ...] = ()
    capacity_bytes: int | None = None
    usable_bytes: int | None = None
    bandwidth: int | None = None
    flops_per_second: float | None = None
    link_bandwidth: int | None = None
    device_kind: str | None = None
    clock: float | None = None
    allowance_bytes: int = 0
    vector_operations_per_second: float | None = None


def targets() -> list[str]:
    """Lists the names of the targets.

    The targets are `cpu`, the attached backend, and the GPUs and TPUs that need not be attached.
    Each name is one device. For several devices, add a count to the name of a GPU (`h100:8`), or a
    topology of chips to the name of a TPU (`v5e:4x4`). A chip of `tpu7x` has two devices.

    Returns:
        The names.

    Example:
        >>> from jaxcomp import memory
        >>> {"cpu", "h100", "rtx3060-12gb", "v5e"} <= set(memory.targets())
        True
    """
    attached = dict.fromkeys(["cpu", jax.default_backend()])
    return [*attached, *(gpu.name for gpu in GPUS), *(tpu.name for tpu in TPUS)]


def resolve(name: str | None = None) -> Target:
    """Finds a target by its name.

    Args:
        name: one of `targets()`, a GPU with a count (`h100:8`), or a TPU with a topology
            (`v5e:4x4`). `None` is the attached device.

    Returns:
        The target.

    Raises:
        ValueError: if the name is unknown, or if its count or topology is malformed.
        ImportError: if the wheel with the target's compiler is not installed.

    Example:
        >>> resolve("cpu").attached
        True
    """
    if name is None:
        name = jax.default_backend()
    if name in ("cpu", jax.default_backend()):
        return _attached(name)
    if not isinstance(name, str):
        raise ValueError(f"target={name!r}: expected the name of a target, such as 'h100'")
    kind, *size = name.split(":", maxsplit=1)
    for gpu in GPUS:
        if gpu.name == kind:
            return _gpu(name, gpu, *size)
    for tpu in TPUS:
        if tpu.name == kind:
            return _tpu(name, tpu, *size)
    raise ValueError(
        f"target={name!r} is unknown{did_you_mean(name, targets())}; expected one of "
        f"{', '.join(targets())}"
    )


def mesh(
    target: str,
    axis_shapes: Sequence[int],
    axis_names: Sequence[str],
    axis_types: Sequence[AxisType] | None = None,
) -> Mesh | AbstractMesh:
    """Makes a mesh over the devices of a target.

    The mesh is for the `NamedSharding`s of the arguments of `analyze`, `max_batch` and `timeline`.

    Args:
        target: the target's name, such as `h100:8`.
        axis_shapes: the number of devices along each axis. The product must equal the number of
            devices of an absent target. For an attached target, the product must not exceed it.
        axis_names: the name of each axis.
        axis_types: the type of each axis. The default is `AxisType.Auto` for all.

    Returns:
        A mesh of devices for an attached target; an abstract mesh for an absent one.

    Raises:
        ValueError: if the target is unknown, or if `axis_shapes` does not match its number of
            devices.
        ImportError: if the wheel with the target's compiler is not installed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> from jaxcomp import memory
        >>> sharding = NamedSharding(memory.mesh("cpu", (1,), ("data",)), PartitionSpec("data"))
        >>> x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)
        >>> memory.analyze(jnp.sin, x, target="cpu").argument_bytes
        128
    """
    where = resolve(target)
    here = jax.devices(where.platform) if where.attached else []
    count = math.prod(axis_shapes)
    if count > len(here) if where.attached else count != where.devices:
        raise ValueError(
            f"axis_shapes={tuple(axis_shapes)} needs {count} devices, but target={target!r} has "
            f"{len(here) or where.devices}"
        )
    shapes, names = tuple(axis_shapes), tuple(axis_names)
    types = tuple(axis_types or [AxisType.Auto] * len(names))
    if where.attached:
        return jax.make_mesh(shapes, names, types, devices=here[:count])
    return AbstractMesh(shapes, names, axis_types=types)


def _attached(name: str) -> Target:
    """Returns the target of an attached platform. JAX reports its memory limit, except on CPU."""
    device = jax.local_devices(backend=name)[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    allowance = _ALLOWANCE if device.platform == "gpu" else 0
    return Target(
        name, name, attached=True, devices=1, usable_bytes=limit, allowance_bytes=allowance
    )


def _gpu(name: str, gpu: Gpu, count: str = "1") -> Target:
    """Returns the target of absent GPUs. More than 8 form hosts of 8 GPUs each."""
    if not re.fullmatch("[1-9][0-9]*", count):
        raise ValueError(f"target={name!r}: expected {gpu.name}:COUNT, such as {gpu.name}:8")
    devices = int(count)
    hosts, rest = divmod(devices, _GPUS_PER_HOST)
    if rest and hosts:
        raise ValueError(f"target={name!r}: expected 1 to 8 GPUs, or a multiple of 8")
    _require(name, "gpu-aot", "jax-cuda13-pjrt", "jax-cuda12-pjrt")
    shape = f"1x{hosts}x{_GPUS_PER_HOST}" if hosts else f"1x1x{devices}"
    options = {
        "topology_name": shape,
        "topology": shape,
        "target_config": target_config(gpu),
    }
    return Target(
        name,
        "cuda",
        attached=False,
        devices=devices,
        topology_options=tuple(options.items()),
        capacity_bytes=gpu.memory_bytes,
        usable_bytes=int(gpu.memory_bytes * _GPU_FRACTION),
        bandwidth=gpu.bandwidth,
        flops_per_second=gpu.tensor_tflops * 1e12,
        link_bandwidth=gpu.link_bandwidth,
        device_kind=gpu.device_kind,
        allowance_bytes=_ALLOWANCE,
        vector_operations_per_second=gpu.cores * gpu.fpus_per_core * gpu.clock_ghz * 1e9,
    )


def _tpu(name: str, tpu: Tpu, topology: str | None = None) -> Target:
    """Returns the target of absent TPUs; without a topology, one device."""
    shape = tpu.chip if topology is None else topology
    if not re.fullmatch(tpu.chip.replace("1", "[1-9][0-9]*"), shape):
        example = tpu.chip.replace("1", "2")
        raise ValueError(f"target={name!r}: expected a topology such as {tpu.name}:{example}")
    _require(name, "tpu-aot", "libtpu")
    chips = math.prod(int(size) for size in shape.split("x"))
    devices = 1 if topology is None else chips * tpu.devices_per_chip
    return Target(
        name,
        "tpu",
        attached=False,
        devices=devices,
        topology_options=(("topology_name", f"{tpu.name}:{shape}"), *tpu.options),
        capacity_bytes=tpu.memory_bytes,
        usable_bytes=int(tpu.usable_gib * 2**30),
        bandwidth=tpu.bandwidth,
        flops_per_second=tpu.tensor_tflops * 1e12,
        link_bandwidth=tpu.link_bandwidth,
        clock=None if tpu.clock_ghz is None else tpu.clock_ghz * 1e9,
    )


def _require(target: str, extra: str, *wheels: str) -> None:
    """Raises an `ImportError` with the extra to install, if none of the wheels is installed."""
    if not any(is_installed(wheel) for wheel in wheels):
        raise ImportError(
            f"target={target!r} needs the compiler in the wheel {wheels[0]!r}; "
            f"install it with: pip install 'jaxcomp[{extra}]'"
        )


def is_installed(wheel: str) -> bool:
    """Returns whether a wheel is installed."""
    try:
        metadata.distribution(wheel)
    except metadata.PackageNotFoundError:
        return False
    return True
