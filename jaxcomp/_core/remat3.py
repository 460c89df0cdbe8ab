"""JAX's option `jax_remat3`, another form of `jax.checkpoint` in programs."""

import contextlib
import threading
from collections.abc import Iterator

import jax

_lock = threading.RLock()


def is_on() -> bool:
    """Whether the option is on."""
    return bool(jax.config.values.get("jax_remat3"))


@contextlib.contextmanager
def traced_without() -> Iterator[None]:
    """Traces `jax.checkpoint` and `checkpoint_name` as they are traced with the option off.

    With the option, both are opaque equations without names and without an inner program. What is
    traced here runs with the option on, too. JAX's public interface has options of the whole
    process only: one thread traces at a time.
    """
    with _lock:
        if is_on():
            jax.config.update("jax_remat3", False)
            try:
                yield
            finally:
                jax.config.update("jax_remat3", True)
            return
    yield
