"""Turns on JAX's persistent compilation cache for one command."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache


@contextmanager
def compilation_cache(directory: Path) -> Iterator[None]:
    """Uses a folder as JAX's persistent compilation cache within the context.

    A command that first measures and then trains a step compiles it only once.

    Args:
        directory: the folder of the cache.
    """
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(directory))
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        reset_cache()
