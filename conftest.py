"""How JAX and Hypothesis are set for every test and doctest."""

import atexit
import gc
import os
import shutil
import tempfile

import hypothesis
import jax
import pytest

PLATFORM = os.environ.get("JAX_PLATFORMS", "cpu")  # "cuda" runs them on an attached GPU

jax.config.update("jax_platforms", PLATFORM)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# XLA compiles for the CPU without optimization, which nearly halves the time of the tests. If
# XLA_FLAGS is set, as in `make nightly`, it compiles as that says. Child processes get no flags:
# the compilers for other devices do not know all of these.
if "XLA_FLAGS" not in os.environ and PLATFORM == "cpu":
    flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    if jax.__version_info__ < (0, 11):  # later ones do not know it
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join(flags)
    jax.devices()  # reads them
    del os.environ["XLA_FLAGS"]

# What several tests compile is compiled once: workers have the environment of who starts them.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxcomp-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

# Compilation makes a first example slow; a failure must come back on the next run.
hypothesis.settings.register_profile(
    "jaxcomp", deadline=None, derandomize=True, max_examples=25, database=None
)
hypothesis.settings.load_profile("jaxcomp")


def pytest_collection_finish() -> None:
    """What is imported stays, and a collection that leaves it out and is rare takes little time."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture
def launched_kernels(monkeypatch):
    """Returns the kernels of rows that were launched; without a GPU they are interpreted."""
    from jaxcomp._core import row_kernels  # after the import hook of type checks

    found = []
    launch = row_kernels.Kernel._launch

    def counted(kernel, given):
        found.append(kernel)
        return launch(kernel, given)

    if PLATFORM != "cuda":
        monkeypatch.setattr(row_kernels, "INTERPRET", True)
        monkeypatch.setattr(row_kernels, "on_one", lambda _, form, portable: form)
    monkeypatch.setattr(row_kernels.Kernel, "_launch", counted)
    return found
