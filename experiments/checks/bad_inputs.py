"""Bad inputs of the public functions: each is a ValueError or TypeError that names it."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx

import jaxcomp as jc
from jaxcomp.planning import Strategy

X = jnp.ones((8, 64))


class Call(NamedTuple):
    """A call with a bad input.

    Attributes:
        what: The function and the argument.
        given: The input.
        call: Calls the function.
        named: What the message has to name.
    """

    what: str
    given: object
    call: Callable[[], object]
    named: str


def _model() -> nnx.Module:
    return nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.sin)


def _make_step(transform: Any, batch: int) -> Any:
    model = transform(nnx.eval_shape(_model))
    step = nnx.grad(lambda model, x: model(x).sum())
    return step, (model, jax.ShapeDtypeStruct((batch, 64), jnp.float32))


# Of a codec's class, an option and values of it that are refused.
CODECS: tuple[tuple[Any, str, tuple[object, ...]], ...] = (
    (jc.Quantize, "bits", (0, 7, -1, 1.5, "4", None, True)),
    (jc.Quantize, "group", ("layer", None)),
    (jc.Quantize, "rounding", ("up", "")),
    (jc.SignAware, "bits", (1, 5, 8, "4", None)),
    (jc.SignAware, "scale_source", ("max", None)),
    (jc.AvgPool, "window", (0, -1, 1.5, "2", None, True)),
    (jc.DualPrecision, "window", (0, 2.5)),
    (jc.DualPrecision, "bits", (7, None)),
    (jc.DualPrecision, "along", ("batch",)),
    (jc.Float8, "axis", (0, 3, "last", None)),
    (jc.BlockSparse, "block", (0, (8,), (8, 0), "8", 1.5)),
    (jc.BlockSparse, "density", (0, 2, math.nan, True)),
    (jc.BlockSparse, "values", (4, "exact")),
    (jc.BlockSparse, "product", ("fast",)),
    (jc.PerSample, "bits", ((2, 4), (2,), [4, 2], (5, 4), 4)),
    (jc.Cast, "dtype", ("int8", "float99")),
    (jc.Packed, "bits", (7, 0)),
)
SPECS = (
    *("", " ", "quantize:", "quantize:4", "quantize:bits", "quantize:bits=", "quantize:bits=+4"),
    *("quantize:bits=\u0662", "quantize:bits=4.0", "quantize:bits=1e1", "quantise", "fused:bits=9"),
    *("plain", "remat", "accumulate:4", "offload:", "boundary:", "boundary:fused", "4 bits"),
    *("offload:offload:exact", "quantize:bits=4 @ (", "quantize:bits=4 @ (a+)*", "exact:bits=2"),
    *("quantize:bits=2,bits=4", "block_sparse:density=nan", "block_sparse:block=8x"),
)
STRATEGIES = (
    *("plane", "rematt", "remat:0", "remat:-1", "remat:dots:x", "remat:1+dots:0", "remat:\u0664"),
    *("accumulate:1", "accumulate:x", "accumulate:\u0664", "accumulate:2:plane", "boundary:fused"),
)
SIZES = (
    *("11", "11 gigs", "-1GiB", "0GiB", "GiB", "", "1e9B", "\u0663GiB", "11GiB of memory"),
    *(0, -1, 1.5, True, [1]),
)
TARGETS = ("h101", "rtx3060", "h100:0", "h100:x", "h100:9", "v5e:3", "v5e:0x1", "", "cuda")
RULES: tuple[tuple[str, object], ...] = (
    *(("action", value) for value in ("quantize:bits=2", "encode", 4, None, jc.Quantize)),
    *(("path", value) for value in ("(", "[", "([a-z_]+)*!", "((a|b)c)+", ".*" * 9, "(" * 500, 3)),
    *(("op", value) for value in ("[", 3)),
    *(("names", value) for value in ("hidden", 3, (3,))),
    *(("roles", value) for value in (("weights",), "operand")),
    *(("min_size", value) for value in (-1, "3", 1.5, True)),
    *(("required", value) for value in (1, None)),
)
TEXTS = (
    *("", "[]", "3", "null", '"fused"', "{", "{}", '{"version": 2}', "[" * 10**5, "1" * 10**5),
    *('{"version": 1, "rules": 3}', " " * 2**21, '{"version": 1, "rules": [{}]}', "NaN"),
)
CHECKPOINTS: tuple[tuple[str, object], ...] = (
    *(("seed", value) for value in ("a", 1.5, jnp.ones(2))),
    *(("coded_argnums", value) for value in ("x", 1.5)),
    *(("static_argnames", value) for value in ("y", ("y",))),
    *(("policy", value) for value in (3, None)),
    ("fn", 3),
)
FITS: tuple[tuple[str, object], ...] = (
    *(("budget", size) for size in SIZES),
    *(("allowance", size) for size in ("lots", -1)),
    *(("actions", value) for value in ("keep", ("guess",), ())),
    *(("bits", value) for value in ((5,), (4.0,), 4)),
    *(("compiles", value) for value in (0, 1.5, True)),
    *(("batch", value) for value in (0, -8, 1.5, "8")),
    *(("noise", value) for value in (0.1, -1)),
    *(("pin", value) for value in ({"tail": "keep"}, {"(": "keep"}, {".*": "drop"}, "keep")),
)


def calls() -> Iterator[Call]:
    """Returns all calls."""
    for codec, name, values in CODECS:
        for value in values:
            yield Call(codec.__name__, {name: value}, partial(codec, **{name: value}), f"{name}=")
    compress: Callable[..., object] = jc.compress
    for text in SPECS:
        yield Call("compress: policy", text, partial(compress, _model(), text), "spec=")
    for value in (3, None, jc.Quantize, [jc.Quantize(2)]):
        yield Call("compress: policy", str(value), partial(compress, _model(), value), "policy=")
    for value in (3, linen.Dense(3), jnp.sin, {}, nnx.Linear):
        yield Call("compress: model", str(value)[:40], partial(compress, value), "model")
    twice = jc.compress(_model())
    yield Call("compress: model", "twice", partial(compress, twice), "compressed already")
    for text in STRATEGIES:
        yield Call("Strategy.parse", text, partial(Strategy.parse, text), "strategy=")
    for size in SIZES:
        yield Call("analyze: capacity", size, partial(_analyze, capacity=size), "capacity=")
    for target in TARGETS:
        yield Call("analyze: target", target, partial(_analyze, target=target), "target=")
    for name, value in RULES:
        given = {"action": jc.Quantize(2)} | {name: value}
        yield Call("Rule", {name: value}, partial(jc.Rule, **given), name)  # type: ignore[arg-type]
    for text in TEXTS:
        yield Call("Policy.from_json", text[:40], partial(jc.Policy.from_json, text), "text")
    checkpoint: Callable[..., object] = jc.checkpoint
    for name, value in CHECKPOINTS:
        given = {"fn": jnp.sin} | {name: value}
        yield Call("checkpoint", {name: value}, partial(checkpoint, **given), f"{name}=")
    for name, value in FITS:
        yield Call("fit", {name: value}, partial(_fit, {name: value}), name)


def _analyze(**given: Any) -> object:
    return jc.memory.analyze(jnp.sin, X, **({"target": "cpu"} | given))


def _fit(given: dict[str, Any]) -> object:
    arguments: dict[str, Any] = {"batch": 8, "budget": "1GiB", "target": "cpu"} | given
    return jc.fit(_make_step, **arguments)


def told(call: Call) -> str:
    """Returns the message of a call; empty if it is no error, or one that names another input."""
    try:
        call.call()
    except (ValueError, TypeError) as error:
        return str(error) if call.named in str(error) else ""
    except ImportError as error:  # the compiler of a target is not installed
        return str(error)
    return ""


def run() -> list[dict[str, str]]:
    """Makes all calls.

    Returns:
        A row for each: what is called, what it is given, and what is told.
    """
    return [{"call": call.what, "given": repr(call.given), "told": told(call)} for call in calls()]
