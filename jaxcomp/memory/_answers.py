"""A disk cache for the results of compilations for absent devices.

JAX's persistent compilation cache does not serve absent devices. This cache stores the HLO text,
the byte counts and the dump of such programs in the folder of JAX's cache, if the user has set one.
A file that cannot be read or written costs a compilation and a warning, never the result.
"""

import gzip
import hashlib
import json
import os
import tempfile
import warnings
import zlib
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxcomp.memory._buffer_assignment import DUMPED
from jaxcomp.memory._targets import is_installed

_WHEELS = ("jaxlib", "libtpu", "jax-cuda13-pjrt", "jax-cuda12-pjrt")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_FORMAT = 2  # of the files


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
    key.update(repr((_FORMAT, jax.__version__, versions, flags, rest)).encode())
    return Path(folder) / f"jaxcomp-{key.hexdigest()}"


def read(path: Path) -> dict[str, Any] | None:
    """Reads a cached result.

    Returns:
        The result; `None` if the file does not exist, or is damaged, of which a warning tells.
    """
    try:
        answer: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        _check(answer)
    except FileNotFoundError:
        return None
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        warnings.warn(f"{path} is damaged ({error!r}); the step is compiled anew", stacklevel=2)
        return None
    return answer


def write(path: Path, answer: dict[str, Any]) -> None:
    """Writes a result atomically, and creates the folder if necessary.

    A folder that is full or may not be written is told by a warning.
    """
    content = gzip.compress(json.dumps(answer).encode(), compresslevel=3)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            unfinished = Path(folder) / path.name
            unfinished.write_bytes(content)
            unfinished.replace(path)
    except OSError as error:
        warnings.warn(f"the result of a compilation is not kept: {error}", stacklevel=2)


def _check(answer: Any) -> None:
    """Raises a ValueError if something else than a result was read."""
    kinds = {"hlo_text": str, "memory": dict, "compile_seconds": float, "dump": dict}
    if not isinstance(answer, dict) or not kinds.keys() <= answer.keys() <= {*kinds, "xla_flag"}:
        raise ValueError("other fields")
    for name, kind in kinds.items():
        if not isinstance(answer[name], kind):
            raise ValueError(f"{name} is no {kind.__name__}")
    memory, dump = answer["memory"], answer["dump"]
    if not all(isinstance(count, int) for count in memory.values()):
        raise ValueError("memory has other values than integers")
    if dump and (dump.keys() != set(DUMPED) or not all(isinstance(t, str) for t in dump.values())):
        raise ValueError("dump has other texts")
