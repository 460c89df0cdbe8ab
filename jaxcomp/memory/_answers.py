"""What compilers said of programs for absent devices, kept for the next look.

JAX's persistent compilation cache does not serve devices that are not there; the figures and the
text of a program are kept in the same folder, if the user set one.
"""

import gzip
import hashlib
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from ._targets import is_installed

_WHEELS = ("jaxlib", "libtpu", "jax-cuda13-pjrt", "jax-cuda12-pjrt")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def answer_file(program: bytes, *rest: Any) -> Path | None:
    """Where the answer for a program is kept; None without a folder for JAX's compilation cache.

    Args:
        program: the program's bytes, source lines with them, for the compiler's text has them too.
        *rest: all else that the answer depends on, besides the compiler's versions and flags.
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
    """The answer that is kept there, if there is one."""
    if not path.exists():
        return None
    answer: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return answer


def write(path: Path, answer: dict[str, Any]) -> None:
    """Keeps an answer, at once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_bytes(gzip.compress(json.dumps(answer).encode(), compresslevel=3))
    unfinished.replace(path)
