"""Compiler options for a jitted step."""

import jax


def compiler_options(*, triton_gemm: bool = True) -> dict[str, str | bool]:
    """Returns the options that make XLA preserve optimization barriers on the default backend.

    Compressed residuals and `jax.checkpoint` both depend on optimization barriers. In JAX before
    0.12, XLA for CPU removes the barriers before fusion, and then stores uncompressed arrays. The
    option turns this pass off. Other backends and versions need no option.

    Args:
        triton_gemm: `False` adds the option that computes matrix products by cuBLAS instead of
            Triton on NVIDIA GPUs. It is for programs that XLA rejects with "Couldn't find output
            tile sizes". `analyze` needs no option: it finds one itself.

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
    options: dict[str, str | bool] = {}
    if jax.default_backend() == "cpu" and jax.__version_info__ < (0, 12):
        options["xla_disable_hlo_passes"] = "cse_barrier_expander"
    if not triton_gemm:
        options["xla_gpu_enable_triton_gemm"] = False
    return options
