"""Compiler options that preserve the optimization barriers of a jitted step."""

import jax


def compiler_options() -> dict[str, str]:
    """Returns the options that make XLA preserve optimization barriers on the default backend.

    Compressed residuals and `jax.checkpoint` both depend on optimization barriers. In JAX before
    0.12, XLA for CPU removes the barriers before fusion, and then stores uncompressed arrays. The
    option turns this pass off. Other backends and versions need no option.

    Returns:
        Options for the argument `compiler_options` of `jax.jit`. The dictionary is empty if no
        option is needed.

    Example:
        >>> import jax
        >>> from jaxcomp import memory
        >>> step = jax.jit(lambda x: 2 * x, compiler_options=memory.compiler_options())
        >>> int(step(3))
        6
    """
    if jax.default_backend() == "cpu" and jax.__version_info__ < (0, 12):
        return {"xla_disable_hlo_passes": "cse_barrier_expander"}
    return {}
