"""JAX's compilation cache, for as long as a command needs it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache


@contextmanager
def compilation_cache(directory: Path) -> Iterator[None]:
    """Within the context nothing is compiled twice: a step is measured, then trained."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(directory))
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        reset_cache()
