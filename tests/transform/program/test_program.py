"""Programs keep constants and arguments apart, as jaxprs do not from JAX 0.12 on."""

import jax.numpy as jnp
import numpy as np

from jaxcomp.transform._program.builder import flat
from jaxcomp.transform._program.program import Program
from tests.helpers import assert_same_bits


def test_constants_are_no_arguments():
    constant, x = np.arange(4.0, dtype=np.float32), jnp.ones(4)
    for program in (traced := Program.trace(lambda x: x * constant, x), flat(traced)):
        assert len(program.constants) == len(program.consts) == len(program.arguments) == 1
        assert_same_bits(program(x), [x * constant])
