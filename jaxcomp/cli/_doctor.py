"""`jaxcomp doctor`: what is installed, and what to do about what is not."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import textwrap
from collections.abc import Sequence

import jax

from jaxcomp.memory import _answers as answers
from jaxcomp.memory._live_bytes import format_bytes
from jaxcomp.memory._options import removed_barriers
from jaxcomp.memory._targets import is_installed

_PACKAGES = ("jaxcomp", "jax", "jaxlib", "flax", "optax", "numpy")
_COMPILERS = {
    "GPUs": ("gpu-aot", "jax-cuda13-pjrt", "jax-cuda12-pjrt"),
    "TPUs": ("tpu-aot", "libtpu"),
}
_ASSEMBLERS = "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12"  # the wheels with ptxas
_EXTRAS = {"plot": "matplotlib", "train": "orbax"}


def doctor() -> None:
    """Print versions, devices, compilers for absent devices, and what is missing."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
    lines = [("versions", ", ".join([f"Python {platform.python_version()}", *versions]))]
    try:
        lines.append(("devices", ", ".join(device.device_kind for device in jax.devices())))
    except RuntimeError as error:
        lines.append(("devices", f"none: {error}"))
    for devices, (extra, *wheels) in _COMPILERS.items():
        missing = f"not installed: pip install 'jaxcomp[{extra}]'"
        lines.append((f"compiler for {devices}", _found(wheels) or missing))
    missing = "not installed: pip install 'jaxcomp[gpu-aot]'"
    lines.append(("ptxas for GPUs", _found(_ASSEMBLERS) or shutil.which("ptxas") or missing))
    lines += [
        ("optimization barriers", removed_barriers({}) or "kept"),
        ("cache of compilations", _cache()),
    ]
    for extra, package in _EXTRAS.items():
        is_there = importlib.util.find_spec(package) is not None
        missing = f"not installed: pip install 'jaxcomp[{extra}]'"
        lines.append((f"extra {extra}", "installed" if is_there else missing))
    width = max(len(name) for name, _ in lines) + 2
    wrap = textwrap.TextWrapper(
        shutil.get_terminal_size().columns,
        subsequent_indent=" " * width,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for name, text in lines:
        print(wrap.fill(f"{name:<{width}}{text}"))


def _found(wheels: Sequence[str]) -> str:
    return ", ".join(f"{w} {importlib.metadata.version(w)}" for w in wheels if is_installed(w))


def _cache() -> str:
    folder = answers.folder()
    if folder is None:
        return "off (JAX_ENABLE_COMPILATION_CACHE)"
    if folder.is_dir() and not os.access(folder, os.W_OK):
        return f"{folder}, which cannot be written"
    size = sum(file.stat().st_size for file in folder.glob("jaxcomp-*"))
    return f"{folder}, {format_bytes(size)} (JAX_COMPILATION_CACHE_DIR sets another one)"
