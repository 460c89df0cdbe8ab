"""JAX's option `jax_remat3`, another form of `jax.checkpoint` in programs."""

import contextlib
import threading
from collections.abc import Iterator

import jax

_lock = threading.RLock()


def is_on() -> bool:
    """Returns whether the option is on."""
    return bool(jax.config.values.get("jax_remat3"))


@contextlib.contextmanager
def traced_without() -> Iterator[None]:
    """Traces `jax.checkpoint` and `checkpoint_name` as they are traced with the option off.

    With the option, both are opaque equations without names and without an inner program. The
    traced program also runs with the option on. JAX's public interface sets options for the whole
    process: with the option on, one thread traces at a time, and other threads see it off.
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
