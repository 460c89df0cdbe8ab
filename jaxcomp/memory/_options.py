"""Compiler options for a jitted step."""

import os
from collections.abc import Mapping

import jax

_NAME, _PASS = "xla_disable_hlo_passes", "cse_barrier_expander"


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
        options[_NAME] = _PASS
    if not triton_gemm:
        options["xla_gpu_enable_triton_gemm"] = False
    return options


def removed_barriers(options: Mapping[str, object]) -> str:
    """Returns what to do where XLA removes the optimization barriers of a step for the CPU.

    Args:
        options: the compiler options of the step.

    Returns:
        A sentence; "" where XLA keeps the barriers.

    Example:
        >>> removed_barriers(compiler_options())
        ''
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if not compiler_options() or _PASS in f"{options.get(_NAME, '')} {flags}":
        return ""
    return (
        f"XLA for CPU in JAX {jax.__version__} removes optimization barriers, and then stores full "
        f"arrays: set XLA_FLAGS=--{_NAME}={_PASS}, or pass "
        "compiler_options=jc.memory.compiler_options() to jax.jit"
    )
