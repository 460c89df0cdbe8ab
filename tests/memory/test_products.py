"""Products and seconds of a compiled program's instructions, against those of the whole."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxcomp.memory._analyze import analyze_step
from jaxcomp.memory._costs import costs
from jaxcomp.memory._targets import resolve
from jaxcomp.memory._tracing import trace

NHWC = ("NHWC", "HWIO", "NHWC")


def loss(weights, x):
    """Convolutions without padding, with strides and groups; products, batched and in a loop."""
    x = jnp.sin(
        lax.conv_general_dilated(x, weights["first"], (2, 2), "VALID", dimension_numbers=NHWC)
    )
    x = lax.conv_general_dilated(
        x, weights["groups"], (1, 1), "VALID", dimension_numbers=NHWC, feature_group_count=8
    )
    x = jnp.tanh(x).reshape(x.shape[0], -1, 64)
    scores = jnp.sin(jnp.einsum("bic,bjc->bij", x, x))
    rows = lax.scan(lambda rows, w: (jnp.sin(rows @ w), None), x, weights["loop"])[0]
    return jnp.sum(jnp.sin(scores @ rows).astype(jnp.float32))


def test_the_products_of_a_library_call_are_counted():
    """As XLA writes them for an attached GPU, of which none is needed here."""
    numbers = '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"]}}'
    call = f'custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={numbers}'
    text = f"""
ENTRY %main (a: f32[16,8], b: f32[16,4]) -> (f32[8,4], s8[4]) {{
  %a = f32[16,8]{{1,0}} parameter(0)
  %b = f32[16,4]{{1,0}} parameter(1)
  ROOT %gemm = (f32[8,4]{{1,0}}, s8[4]{{0}}) {call}
}}"""
    assert sum(cost.flops for cost in costs(text)) == 2 * 8 * 4 * 16


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.bfloat16)


def test_the_seconds_of_instructions_add_up_and_their_products_are_those_of_the_program():
    weights = {"first": shape(3, 3, 32, 64), "groups": shape(2, 2, 8, 64), "loop": shape(5, 64, 64)}
    try:
        h100 = resolve("h100")
    except ImportError as error:
        pytest.skip(str(error))
    step = trace(jax.grad(loss, argnums=(0, 1)), weights, shape(16, 35, 35, 32), target=h100)
    report, timeline, text = analyze_step(step, h100, None, True, with_timeline=True)
    # A compiled convolution counts its padding, which only some gradients have here.
    assert sum(cost.flops for cost in costs(text)) == pytest.approx(report.flops, rel=0.03)
    assert sum(timeline.seconds) == pytest.approx(report.estimated_seconds, rel=0.01)
    loops = {s for s, n in zip(timeline.seconds, timeline.points, strict=True) if "while" in n}
    assert loops == {0.0}  # their bodies have the time of all iterations
