"""A disk cache for the results of compilations in child processes.

JAX's persistent compilation cache does not serve absent devices. This cache stores the HLO text,
the byte counts and the dump of such programs. A file that cannot be read or written costs a
compilation and a warning, never the result.
"""

import contextlib
import gzip
import hashlib
import json
import os
import re
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
_FORMAT = 3  # of the files
_MOST_BYTES = 2**30  # of all files; the ones that were not read for the longest time are deleted

_ALIAS = re.compile(r'#(loc\d*) = loc\((?:"([^"]*)"(?!:\d))?.*\)')
_LOCATION = re.compile(r"loc\(#(loc\d*)\)")


def folder() -> Path | None:
    """Returns the folder of the cache; `None` if it is turned off.

    It is the folder of JAX's compilation cache, if the user has set one. Else it is `jaxcomp` in
    `$XDG_CACHE_HOME`, or in `~/.cache`. JAX's option `jax_enable_compilation_cache` turns it off.
    """
    if not jax.config.values["jax_enable_compilation_cache"]:
        return None
    if own := jax.config.values["jax_compilation_cache_dir"]:
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxcomp"
    except RuntimeError:  # the user has no home
        return None


def without_lines(text: str) -> str:
    r"""Returns the text of an MLIR module without its source lines; the names of scopes stay.

    Example:
        >>> without_lines('%0 = sine %a loc(#loc2)\n#loc1 = loc("f.py":7:1)\n'
        ...               '#loc2 = loc("jit(f)/sin"(#loc1))')
        '%0 = sine %a loc("jit(f)/sin")'
    """
    lines, names = [], {}
    for line in text.splitlines():
        if alias := _ALIAS.fullmatch(line):
            names[alias[1]] = alias[2] or ""
        else:
            lines.append(line)
    return _LOCATION.sub(lambda match: f'loc("{names[match[1]]}")', "\n".join(lines))


def answer_file(program: str, *rest: object) -> Path | None:
    """Returns the cache file of a program.

    Args:
        program: the text of the program. Source lines in it are part of the key.
        *rest: everything else that determines the result, except the compiler's versions and
            flags, which the function reads itself. The `repr` of each is part of the key.

    Returns:
        The path, which need not exist; `None` if the cache is turned off.
    """
    cache = folder()
    if cache is None:
        return None
    versions = [metadata.version(wheel) if is_installed(wheel) else None for wheel in _WHEELS]
    flags = [os.environ.get(name) for name in _FLAGS]
    key = hashlib.sha256(program.encode())
    key.update(repr((_FORMAT, jax.__version__, versions, flags, rest)).encode())
    return cache / f"jaxcomp-{key.hexdigest()}"


def read(path: Path) -> dict[str, Any] | None:
    """Reads a cached result.

    Returns:
        The result; `None` if the file does not exist, or is damaged, of which a warning tells.
    """
    try:
        answer: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        _check(answer)
        with contextlib.suppress(OSError):  # of a folder that may not be written
            path.touch()
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
        _delete_old(path.parent)
    except OSError as error:
        warnings.warn(f"the result of a compilation is not kept: {error}", stacklevel=2)


def _delete_old(cache: Path) -> None:
    """Deletes what was not read for the longest time, if all files together are too large."""
    files = sorted(
        ((f.stat(), f) for f in cache.glob("jaxcomp-*")), key=lambda pair: -pair[0].st_mtime
    )
    total = 0
    for stat, file in files:
        total += stat.st_size
        if total > _MOST_BYTES:
            file.unlink(missing_ok=True)


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
