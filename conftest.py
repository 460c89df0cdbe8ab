"""How JAX and Hypothesis are set for every test and doctest."""

import hypothesis
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compilation makes a first example slow; a failure must come back on the next run.
hypothesis.settings.register_profile(
    "jaxcomp", deadline=None, derandomize=True, max_examples=25, database=None
)
hypothesis.settings.load_profile("jaxcomp")
