"""Compiler options that make a jitted step keep what it declares."""

import jax


def compiler_options() -> dict[str, str]:
    """What `jax.jit(step, compiler_options=...)` needs for the barriers to hold on this device.

    XLA for CPU of JAX before 0.12 drops every optimisation barrier before it fuses, those of
    `jax.checkpoint` too, and then keeps the full arrays; nothing else needs an option.

    Returns:
        Options of the XLA compiler; none where none are needed.

    Example:
        >>> step = jax.jit(lambda x: 2 * x, compiler_options=compiler_options())
    """
    if jax.default_backend() == "cpu" and jax.__version_info__ < (0, 12):
        return {"xla_disable_hlo_passes": "cse_barrier_expander"}
    return {}
