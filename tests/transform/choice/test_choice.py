"""Which values wait for the backward pass: no fewer bytes at the price of a biased gradient."""

import jax
import jax.numpy as jnp
import pytest
from jax.core import ShapedArray

import jaxcomp as jc
from jaxcomp.codecs import Packed
from jaxcomp.transform._choice.choice import Demand, Stored, choose
from jaxcomp.transform._choice.decisions import Decision
from jaxcomp.transform._choice.graph import Graph
from jaxcomp.transform._program.program import Program

CODEC = jc.Quantize(bits=4)
X, W = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)


def chosen(fn, *, multiplied=(), exact=(), decisions=None, biased=False):
    """What is stored of a function of `X` and `W`, by the primitive that makes it.

    The values are named by their primitives; the arguments are held.
    """
    program = Program.trace(fn, X, W)
    graph = Graph(program, set(program.arguments))
    value = {e.primitive.name: e.outvars[0] for e in program.equations}
    all_decisions = dict.fromkeys([*program.arguments, *program.made_by], Decision())
    all_decisions |= {value[name]: d for name, d in (decisions or {}).items()}
    demand = Demand({value[n] for n in multiplied}, set(), {value[n] for n in exact}, {})
    stored = choose(graph, all_decisions, demand, biased=biased)
    return {name: stored[v] for name, v in value.items() if v in stored}


CODED = {"dot_general": Decision(codec=CODEC)}
KEPT = {"dot_general": Decision("keep")}


def test_an_affine_function_is_computed_again_from_the_code():
    stored = chosen(lambda x, w: 2 * (x @ w), multiplied=["mul"], decisions=CODED)
    assert stored == {"dot_general": Stored(CODEC)}


@pytest.mark.parametrize("biased", [False, True])
def test_another_function_is_computed_from_a_code_only_with_bias(biased):
    stored = chosen(lambda x, w: jnp.sin(x @ w), multiplied=["sin"], decisions=CODED, biased=biased)
    assert stored == ({"dot_general": Stored(CODEC)} if biased else {"sin": Stored()})


def test_what_is_read_exactly_has_no_code():
    stored = chosen(lambda x, w: 2 * (x @ w), exact=["mul"], decisions=CODED)
    assert not any(how.is_noisy for how in stored.values())
    assert len(stored) == 1


def test_what_follows_from_few_bytes_has_no_code():
    coded = Decision(codec=CODEC)

    def outer(x, w):
        return jnp.exp(jax.lax.broadcast_in_dim((x @ w).sum(1), (64, 64), (0,)))

    decisions = {"exp": coded, "reduce_sum": coded}
    (stored,) = chosen(outer, multiplied=["exp"], decisions=decisions).items()
    assert stored[0] == "reduce_sum" and stored[1].codec is None

    def affine(x, w):
        return 2 * jax.lax.broadcast_in_dim((x @ w).sum(1), (64, 64), (0,))

    decisions = {"mul": coded, "reduce_sum": coded}
    stored = chosen(affine, multiplied=["mul"], decisions=decisions)
    assert stored == {"reduce_sum": Stored(CODEC)}

    def whole(x, w):
        return jnp.exp(x @ w)

    assert chosen(whole, multiplied=["exp"], decisions={"exp": coded}) == {"exp": Stored(CODEC)}


def test_an_exact_value_that_is_needed_anyway_replaces_the_code():
    stored = chosen(
        lambda x, w: 2 * (x @ w), multiplied=["mul"], exact=["dot_general"], decisions=CODED
    )
    assert list(stored) == ["dot_general"] and not stored["dot_general"].is_noisy


def test_predicates_take_one_bit_per_element():
    stored = chosen(lambda x, w: x @ w > 0, exact=["gt"], decisions=KEPT)
    assert stored == {"gt": Stored(Packed(1))}
    assert stored["gt"].nbytes(ShapedArray((64, 64), jnp.bool)) == 64 * 64 // 8


def test_offloaded_and_recomputed_values_take_no_bytes_of_the_device():
    offloaded = chosen(
        lambda x, w: jnp.sin(x @ w), multiplied=["sin"], decisions={"sin": Decision("offload")}
    )
    assert offloaded == {"sin": Stored(offload=True)}
    again = {"dot_general": Decision("recompute"), "sin": Decision("recompute")}
    assert chosen(lambda x, w: jnp.sin(x @ w), multiplied=["sin"], decisions=again) == {}


def test_of_two_cuts_the_smaller_is_stored():
    stored = chosen(
        lambda x, w: jnp.exp((x @ w).sum(1)), multiplied=["exp", "reduce_sum"], decisions=KEPT
    )
    assert list(stored) == ["reduce_sum"]


def test_what_waits_in_the_memory_of_the_host():
    stored = [Stored(), Stored(CODEC), Stored(jc.Offload(CODEC)), Stored(offload=True)]
    assert [how.is_on_host for how in stored] == [False, False, True, True]


def test_sums_of_a_residual_stream_have_codes_in_between():
    """Else the sum of a layer would be made of the codes of all layers before it."""

    def normalized(x):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True))

    def stream(x, weights):
        for w in weights:
            x = x + normalized(jnp.tanh(x @ w))
        return x

    def lines(depth):
        x, w = (jax.ShapeDtypeStruct((rows, 128), jnp.bfloat16) for rows in (512, 128))
        coded = jc.checkpoint(stream, CODEC)
        gradient = jax.grad(lambda *arguments: coded(*arguments).astype(jnp.float32).sum(), (0, 1))
        return len(str(jax.make_jaxpr(gradient)(x, [w] * depth)).splitlines())

    few, more, most = map(lines, (4, 12, 20))
    assert most - more < 1.1 * (more - few)
