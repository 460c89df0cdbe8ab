"""A disk cache for the results of compilations for absent devices.

JAX's persistent compilation cache does not serve absent devices. This cache stores the HLO text,
the byte counts and the dump of such programs in the folder of JAX's cache, if the user has set one.
"""

import gzip
import hashlib
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxcomp.memory._targets import is_installed

_WHEELS = ("jaxlib", "libtpu", "jax-cuda13-pjrt", "jax-cuda12-pjrt")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def answer_file(program: bytes, *rest: object) -> Path | None:
    """Returns the cache file of a program.

    Args:
        program: the serialized program with its source lines, which the HLO text contains too.
        *rest: everything else that determines the result, except the compiler's versions and
            flags, which the function reads itself. The `repr` of each is part of the key.

    Returns:
        The path, which need not exist; `None` if JAX's compilation cache has no folder.
    """
    folder = jax.config.values["jax_compilation_cache_dir"]
    if folder is None or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    versions = [metadata.version(wheel) if is_installed(wheel) else None for wheel in _WHEELS]
    flags = [os.environ.get(name) for name in _FLAGS]
    key = hashlib.sha256(program)
    key.update(repr((jax.__version__, versions, flags, rest)).encode())
    return Path(folder) / f"jaxcomp-{key.hexdigest()}"


def read(path: Path) -> dict[str, Any] | None:
    """Reads a cached result; returns `None` if the file does not exist."""
    if not path.exists():
        return None
    answer: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return answer


def write(path: Path, answer: dict[str, Any]) -> None:
    """Writes a result atomically, and creates the folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_bytes(gzip.compress(json.dumps(answer).encode(), compresslevel=3))
    unfinished.replace(path)
