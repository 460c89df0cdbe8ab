import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import Exact, Quantize, checkpoint, ops

W = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)


def coded_product(w):
    return ops.dot_general(w, w, (((1,), (0,)), ((), ())), codec=Quantize(bits=4))


@pytest.mark.parametrize(
    "of_weights", [checkpoint(jnp.tanh, Exact()), coded_product], ids=["checkpoint", "op"]
)
def test_what_a_vmap_does_not_map_stays_one_array(of_weights):
    def loss(w, rows):
        return jax.vmap(lambda x: jnp.sin(x @ of_weights(w)))(rows).sum()

    rows = jnp.ones((7, 4))
    kept = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(loss, *args)[1], W, rows))
    assert max(leaf.size for leaf in kept) <= 7 * 4


def test_forward_over_forward_mode_by_jacfwd():
    f = checkpoint(lambda w: jnp.tanh(w @ w).sum(0), Exact())
    found, expected = (jax.jacfwd(jax.jacfwd(g))(W) for g in (f, f.__wrapped__))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
