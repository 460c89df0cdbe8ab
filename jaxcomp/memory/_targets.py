"""What a program is compiled for: this machine's devices, or a GPU or TPU that is not here."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from ._gpus import GPUS, Gpu, target_config

# What JAX preallocates of a GPU unless XLA_CLIENT_MEM_FRACTION says otherwise.
_GPU_FRACTION = 0.75
_GPUS_PER_HOST = 8


@dataclass(frozen=True)
class Tpu:
    """A TPU generation; what one JAX device of it has.

    Attributes:
        name: the target's name, XLA's accelerator name too.
        chip: the topology of one chip.
        memory_bytes: published HBM of one device in bytes.
        usable_gib: HBM that XLA's compiler lets a program use, in GiB, as its error message says.
        bandwidth: peak HBM bandwidth of one device in bytes per second.
        tensor_tflops: bfloat16 products of one device, in 10^12 operations per second.
        devices_per_chip: JAX devices on one chip.
        options: further options of the topology.
    """

    name: str
    chip: str
    memory_bytes: int
    usable_gib: float
    bandwidth: int
    tensor_tflops: float
    devices_per_chip: int = 1
    options: tuple[tuple[str, str], ...] = ()


TPUS = (
    Tpu(
        "v4",
        "1x1x1",
        32 * 2**30,
        30.75,
        1228 * 10**9,
        275.0,
        options=(("chip_config_name", "megacore"),),
    ),
    Tpu("v5e", "1x1", 16 * 2**30, 15.75, 819 * 10**9, 197.0),
    Tpu("v5p", "1x1x1", 96 * 2**30, 95.73, 2765 * 10**9, 459.0),
    Tpu("v6e", "1x1", 32 * 2**30, 31.24, 1640 * 10**9, 918.0),
    Tpu("tpu7x", "1x1x1", 96 * 2**30, 94.74, 3690 * 10**9, 1153.5, devices_per_chip=2),
)


@dataclass(frozen=True)
class Target:
    """One or several equal devices that a program is compiled for.

    Attributes:
        name: as it was asked for, such as `h100:8`.
        platform: JAX's name of the platform: `cpu`, `cuda`, `tpu`, or the attached backend's.
        attached: whether the devices are this process's own.
        devices: how many; 1 for attached targets, whose meshes are the caller's.
        topology_options: what `jax.experimental.topologies.get_topology_desc` needs.
        capacity_bytes: memory of one device in bytes; None where it is not known.
        usable_bytes: what JAX can use of it in bytes; None where it is not known.
        bandwidth: bytes that one device reads or writes per second at best; None if not known.
        flops_per_second: bfloat16 operations of one device's products at best; None if not known.
        device_kind: what the driver of an absent GPU would call it.
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
    device_kind: str | None = None


def targets() -> list[str]:
    """Names of the targets: `cpu`, the attached backend if it is another, GPUs and TPUs.

    Each is one device. A GPU takes a count (`h100:8`), a TPU a topology of chips (`v5e:4x4`);
    a chip of `tpu7x` is two devices.

    Example:
        >>> {"cpu", "h100", "rtx3060-12gb", "v5e"} <= set(targets())
        True
    """
    attached = dict.fromkeys(["cpu", jax.default_backend()])
    return [*attached, *(gpu.name for gpu in GPUS), *(tpu.name for tpu in TPUS)]


def resolve(name: str | None = None) -> Target:
    """The target of that name.

    Args:
        name: one of `targets()`, a GPU with a count (`h100:8`) or a TPU with a topology
            (`v5e:4x4`). None is the attached device.

    Returns:
        The target.

    Raises:
        ValueError: if there is no such target, or its count or topology is malformed.
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
        raise ValueError(f"target={name!r}: expected a name, such as 'h100'")
    kind, *size = name.split(":", maxsplit=1)
    for gpu in GPUS:
        if gpu.name == kind:
            return _gpu(name, gpu, *size)
    for tpu in TPUS:
        if tpu.name == kind:
            return _tpu(name, tpu, *size)
    raise ValueError(f"target={name!r} is unknown; expected one of {', '.join(targets())}")


def mesh(
    target: str,
    axis_shapes: Sequence[int],
    axis_names: Sequence[str],
    axis_types: Sequence[AxisType] | None = None,
) -> Mesh | AbstractMesh:
    """A mesh over a target's devices, to put `NamedSharding`s on a step's arguments.

    For devices that are not attached it is an abstract mesh: sizes and names, no devices.

    Args:
        target: the target's name, such as `h100:8`.
        axis_shapes: devices along each axis; their product is the target's device count, or,
            for attached devices, at most that.
        axis_names: one name for each axis.
        axis_types: one type for each axis; `AxisType.Auto` for all by default.

    Returns:
        The mesh.

    Raises:
        ValueError: if the target is unknown or does not have `axis_shapes`' devices.
        ImportError: if the wheel with the target's compiler is not installed.

    Example:
        >>> mesh("cpu", (1,), ("data",)).axis_names
        ('data',)
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
    device = jax.local_devices(backend=name)[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return Target(name, name, attached=True, devices=1, usable_bytes=limit)


def _gpu(name: str, gpu: Gpu, count: str = "1") -> Target:
    if not re.fullmatch("[1-9][0-9]*", count):
        raise ValueError(f"target={name!r}: expected {gpu.name}:<number of GPUs>")
    devices = int(count)
    hosts, rest = divmod(devices, _GPUS_PER_HOST)
    if rest and hosts:
        raise ValueError(f"target={name!r}: expected at most 8 GPUs, or a multiple of 8")
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
        device_kind=gpu.device_kind,
    )


def _tpu(name: str, tpu: Tpu, topology: str | None = None) -> Target:
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
    )


def _require(target: str, extra: str, *wheels: str) -> None:
    """Raises the error that names the extra to install, if none of the wheels is there."""
    if not any(is_installed(wheel) for wheel in wheels):
        raise ImportError(
            f"target={target!r} needs the compiler in the wheel {wheels[0]!r}; "
            f"install it with: pip install 'jaxcomp[{extra}]'"
        )


def is_installed(wheel: str) -> bool:
    """Whether a wheel of this name is installed."""
    try:
        metadata.distribution(wheel)
    except metadata.PackageNotFoundError:
        return False
    return True
