"""Several processes that train together, each with devices and a part of the data of its own."""

import hashlib
import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

HEARTBEAT_SECONDS = 30  # after which the others end if one does not answer


def join(coordinator: str | None, processes: int | None, process_id: int | None) -> None:
    """Joins the other processes of a run, before anything else asks for devices.

    Args:
        coordinator: Host and port of the first process, such as "10.0.0.1:9000"; "auto" for what
            the environment of a cluster says (SLURM, Open MPI, Kubernetes, a TPU pod). None for a
            single process.
        processes: Number of processes.
        process_id: The number of this one, from 0.

    Raises:
        ValueError: If only some are given, a number is outside its range, or there is no cluster.
        RuntimeError: If the processes do not find each other.
    """
    given = processes is not None, process_id is not None
    if coordinator in (None, "auto") and any(given):
        raise ValueError(
            f"coordinator={coordinator!r}: expected HOST:PORT with processes={processes} and "
            f"process_id={process_id}"
        )
    if coordinator is None:
        return
    if coordinator == "auto":
        try:
            jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
        except ValueError as error:
            raise ValueError(f"coordinator='auto': JAX knows no cluster here: {error}") from error
        return
    if processes is None or process_id is None:
        raise ValueError(
            f"processes={processes}, process_id={process_id}: expected both with "
            f"coordinator={coordinator!r}"
        )
    if not 0 <= process_id < processes:
        raise ValueError(f"process_id={process_id}: expected 0 to {processes - 1}")
    host, colon, port = coordinator.rpartition(":")
    if not (host and colon and port.isdecimal()):
        raise ValueError(f"coordinator={coordinator!r}: expected HOST:PORT")
    jax.distributed.initialize(
        coordinator, processes, process_id, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
    )


def is_first() -> bool:
    """Whether this process prints and logs."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Waits until all processes have called this with the same text."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def check_equal(arguments: dict[str, Any]) -> None:
    """Checks that all processes have the same arguments.

    Raises:
        ValueError: If not, on every process. The message names them.
    """
    if jax.process_count() == 1:
        return
    digests = [
        hashlib.sha256(f"{name}={json.dumps(value)}".encode()).digest()
        for name, value in sorted(arguments.items())
    ]
    mine = np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), -1)
    all_of = multihost_utils.process_allgather(mine)
    differ = (all_of != all_of[:1]).any((0, 2))
    names = [name for name, differs in zip(sorted(arguments), differ, strict=True) if differs]
    if names:
        listing = ", ".join(f"{name}={arguments[name]!r}" for name in names)
        raise ValueError(
            f"process {jax.process_index()} has {listing}: expected the same for all "
            f"{jax.process_count()} processes"
        )


def any_process(flag: bool) -> bool:
    """Whether a flag is set on some process. All processes have to call it."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())
