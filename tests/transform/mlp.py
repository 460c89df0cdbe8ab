"""Two products with a GELU between them, and their arguments."""

import jax

from jaxcomp import Quantize
from tests.helpers import normal

X = normal((32, 128))
W1, W2 = 0.1 * normal((128, 256), seed=1), 0.1 * normal((256, 128), seed=2)
CODEC = Quantize(bits=4)


def mlp(x, w1, w2):
    return jax.nn.gelu(x @ w1) @ w2
