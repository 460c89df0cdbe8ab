"""What the table says of each primitive is what JAX computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from jaxcomp._core.made_cast import made_cast
from jaxcomp.transform._program.primitives import PRIMITIVES
from tests.helpers import normal

X, Y = normal((4, 6)), normal((4, 6), seed=1)
WITHIN = 0.9 * jnp.tanh(X)  # the domain of acos, atanh and erf_inv
POSITIVE = 1 + jnp.abs(X)
INTEGERS = jnp.arange(24, dtype=jnp.int32).reshape(4, 6)
MASK = X > 0
_PLACE = NamedSharding(jax.make_mesh((1,), ("a",)), PartitionSpec())

# Functions that call a primitive once, and operands; by default `lax.NAME` of `X`.
UNARY = {
    **dict.fromkeys(("acos", "asin", "atanh", "erf_inv"), WITHIN),
    **dict.fromkeys(("acosh", "digamma", "lgamma", "log", "log1p", "rsqrt", "sqrt"), POSITIVE),
    "not": INTEGERS,
}
EXAMPLES = {
    **{name: (getattr(lax, name), (X, Y)) for name in ("add", "sub", "mul", "max", "min", "atan2")},
    **{name: (getattr(lax, name), (X, POSITIVE)) for name in ("div", "rem", "nextafter")},
    **{name: (getattr(lax, name), (X, Y)) for name in ("eq", "ge", "gt", "le", "lt", "ne")},
    "and": (lax.bitwise_and, (INTEGERS, 3 + INTEGERS)),
    "or": (lax.bitwise_or, (INTEGERS, 3 + INTEGERS)),
    "xor": (lax.bitwise_xor, (INTEGERS, 3 + INTEGERS)),
    **{
        name: (getattr(lax, name), (INTEGERS, INTEGERS % 5))
        for name in ("shift_left", "shift_right_arithmetic", "shift_right_logical")
    },
    "add_any": (lambda x, y: jax.grad(lambda z: (z * x + z * y).sum())(x), (X, Y)),
    "argmax": (lambda x: lax.argmax(x, 1, jnp.int32), (X,)),
    "argmin": (lambda x: lax.argmin(x, 1, jnp.int32), (X,)),
    "bitcast_convert_type": (lambda x: lax.bitcast_convert_type(x, jnp.int32), (X,)),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (3, 4, 6), (1, 2)), (X,)),
    "clamp": (lambda low, x, high: lax.clamp(low, x, high), (X - 1, Y, X + 1)),
    "complex": (lax.complex, (X, Y)),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), (X, Y)),
    "conj": (lax.conj, (lax.complex(X, Y),)),
    "conv_general_dilated": (
        lambda x, w: lax.conv(x, w, (1, 1), "SAME"),
        (normal((2, 3, 5, 5)), normal((4, 3, 3, 3))),
    ),
    "convert_element_type": (lambda x: lax.convert_element_type(x, jnp.bfloat16), (X,)),
    "copy": (jnp.copy, (X,)),
    "dot_general": (lambda x, w: x @ w.T, (X, Y)),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (jnp.int32(1), jnp.int32(2)), (2, 3)), (X,)),
    "expand_dims": (lambda x: lax.expand_dims(x, (1,)), (X,)),
    "gather": (lambda x: x[jnp.array([2, 0])], (X,)),
    "imag": (lax.imag, (lax.complex(X, Y),)),
    "integer_pow": (lambda x: lax.integer_pow(x, 3), (X,)),
    "iota": (lambda: lax.iota(jnp.float32, 5), ()),
    "made_cast": (made_cast, (X.astype(jnp.bfloat16), X)),
    "name": (lambda x: checkpoint_name(x, "hidden"), (X,)),
    "pad": (lambda x: lax.pad(x, 1.0, [(1, 0, 0), (0, 2, 1)]), (X,)),
    "pow": (lax.pow, (POSITIVE, Y)),
    "ragged_dot_general": (
        lambda x, w: lax.ragged_dot(x, w, jnp.array([1, 3], jnp.int32)),
        (X, normal((2, 6, 3))),
    ),
    "real": (lax.real, (lax.complex(X, Y),)),
    "reduce": (lambda x: lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (1,)), (X,)),
    "reduce_and": (lambda x: jnp.all(x, 1), (MASK,)),
    "reduce_or": (lambda x: jnp.any(x, 1), (MASK,)),
    "reduce_max": (lambda x: jnp.max(x, 1), (X,)),
    "reduce_min": (lambda x: jnp.min(x, 1), (X,)),
    "reduce_prod": (lambda x: jnp.prod(x, 1), (X,)),
    "reduce_sum": (lambda x: jnp.sum(x, 1), (X,)),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 8, 7), (X,)),
    "reshape": (lambda x: lax.reshape(x, (6, 4)), (X,)),
    "rev": (lambda x: lax.rev(x, (1,)), (X,)),
    "round": (lax.round, (X,)),
    "select_n": (lambda x, y: lax.select_n(MASK, x, y), (X, Y)),
    "sharding_constraint": (lambda x: lax.with_sharding_constraint(x, _PLACE), (X,)),
    "slice": (lambda x: lax.slice(x, (1, 0), (3, 4)), (X,)),
    "split": (lambda x: lax.split(x, (2, 4), 1), (X,)),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), (X[:, None],)),
    "transpose": (lambda x: lax.transpose(x, (1, 0)), (X,)),
}  # fmt: skip
# Of other versions of JAX, or not made by any function of an array.
WITHOUT = {
    "empty", "empty2", "expand_dims", "one_minus_square", "polynomial", "stack", "stop_gradient",
    "unstack",
}  # fmt: skip


def _example(name):
    if name in EXAMPLES:
        return EXAMPLES[name]
    public = {"not": "bitwise_not"}.get(name, name)
    return getattr(lax, public), (UNARY.get(name, X),)


@pytest.mark.parametrize("name", sorted(PRIMITIVES.keys() - WITHOUT))
def test_the_table_says_what_a_primitive_does(name):
    function, operands = _example(name)
    primitive = PRIMITIVES[name]
    assert name in {e.primitive.name for e in _equations(jax.make_jaxpr(function)(*operands))}
    if primitive.is_pointwise and name != "select_n":
        order = np.random.default_rng(0).permutation(operands[0].size)
        shuffled = [x.reshape(-1)[order] for x in operands]
        expected = jnp.reshape(function(*operands), -1)[order]
        found = function(*shuffled) if name != "sharding_constraint" else expected
        np.testing.assert_array_equal(found, expected)
    together = {"all": [range(len(operands))], "one": [[i] for i in range(len(operands))]}
    together |= {"first": [[0]], "cases": [range(len(operands))], None: []}
    for positions in together[primitive.affine_in]:
        one = [x + 1 if i in positions else x for i, x in enumerate(operands)]
        other = [2 * x if i in positions else x for i, x in enumerate(operands)]
        mean = [(x + y) / 2 for x, y in zip(one, other, strict=True)]
        for at_mean, at_one, at_other in zip(
            *(jax.tree.leaves(function(*x)) for x in (mean, one, other)), strict=True
        ):
            np.testing.assert_allclose(at_mean, (at_one + at_other) / 2, rtol=0.02, atol=1e-5)


def _equations(program):
    for equation in getattr(program, "jaxpr", program).eqns:
        yield equation
        for parameter in equation.params.values():
            if hasattr(parameter, "jaxpr"):
                yield from _equations(parameter)
