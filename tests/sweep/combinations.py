"""What is combined: things that have codes, wrappers, policies and differentiated arguments."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

import jaxcomp as jc
from jaxcomp import ops
from tests.helpers import normal

CHANNELS = 16
# Weights, data and a scale: the arguments of every function here, whose result is shaped as `x`.
W = normal((CHANNELS, CHANNELS), seed=1) / 4
X = normal((16, 8, 8, CHANNELS), seed=2)
B = 1 + normal((CHANNELS,), seed=3) / 8
SETS = [s for size in (1, 2, 3) for s in itertools.combinations(range(3), size)]


@dataclasses.dataclass(frozen=True)
class Way:
    """A policy.

    Attributes:
        policy: What `checkpoint` and `compress` take.
        codec: What operations take; None if there is none that stands for the policy.
        error: Largest error of a gradient, relative to its norm.
    """

    policy: object
    codec: jc.Codec | None
    error: float


WAYS = {
    "exact": Way(jc.Exact(), jc.Exact(), 1e-5),
    "nothing_saveable": Way(jax.checkpoint_policies.nothing_saveable, None, 1e-5),
    "quantize": Way(jc.Quantize(4), jc.Quantize(4), 0.35),
    "automatic": Way("automatic", None, 0.35),
    "fused": Way("fused:bits=4", None, 0.35),
    "float8": Way(jc.Float8(), jc.Float8(), 0.15),
    "offload": Way(jc.Offload(jc.Quantize(4)), jc.Offload(jc.Quantize(4)), 0.35),
}


def _stock(w, x, b):
    """A product, a batch norm with ReLU, a product, a nonlinear step and a skip connection."""
    h = x @ w
    mean = h.mean((0, 1, 2), keepdims=True)
    variance = jnp.square(h).mean((0, 1, 2), keepdims=True) - jnp.square(mean)
    normalised = (h - mean) * lax.rsqrt(variance + 1e-3)
    y = jax.nn.relu(normalised * _as_features(b) + _as_features(0.1 * b))
    return jnp.tanh(y @ w) + 0.1 * x


def _as_features(v):
    return v[None, None, None]


class Model(nnx.Module):
    """The same in plain Flax NNX."""

    def __init__(self):
        self.w, self.b = nnx.Param(W), nnx.Param(B)

    def __call__(self, x):
        return _stock(self.w[...], x, self.b[...])


class Layers(nnx.Module):
    """The same in layers of `jaxcomp.nn`."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        options = {"use_bias": False, "rngs": rngs}
        self.first = jc.nn.Conv(CHANNELS, CHANNELS, (1, 1), **options)
        norm = jc.nn.BatchNorm(CHANNELS, use_running_average=False, epsilon=1e-3, rngs=rngs)
        self.norm = jc.nn.NormAct(norm)
        self.second = jc.nn.Conv(CHANNELS, CHANNELS, (1, 1), **options)

    def __call__(self, x):
        return jnp.tanh(self.second(self.norm(self.first(x)))) + 0.1 * x


def _by_operations(codec, w, x, b):
    """The same in operations of `jaxcomp.ops`, but for the norm."""
    dims = (((3,), (0,)), ((), ()))
    h = ops.dot_general(x, w, dims, codec=codec)
    y = ops.affine(h, b, 0.1 * b, codec=codec)
    y = ops.relu(y, codec=jc.Packed(1)) if codec is not None else jax.nn.relu(y)
    return jnp.tanh(ops.dot_general(y, w, dims, codec=codec)) + 0.1 * x


def _of_function(way):
    return _stock if way is None else jc.checkpoint(_stock, way.policy)


def _of_model(way):
    model = Model() if way is None else jc.compress(Model(), way.policy)
    graphdef, state = nnx.split(model)

    def call(w, x, b):
        model = nnx.merge(graphdef, state, copy=True)
        model.w[...], model.b[...] = w, b
        return model(x)

    return call


def _of_layers(way):
    model = Layers() if way is None else jc.compress(Layers(), way.policy)
    graphdef, state = nnx.split(model)

    def call(w, x, b):
        model = nnx.merge(graphdef, state, copy=True)
        model.first.kernel[...] = model.second.kernel[...] = w[None, None]
        model.norm.norm.scale[...], model.norm.norm.bias[...] = b, 0.1 * b
        return model(x)

    return call


def _of_operations(way):
    return functools.partial(_by_operations, None if way is None else way.codec)


# Makes a function of `(w, x, b)`, for None the stock one.
SUBJECTS: dict[str, Callable[[Way | None], Callable]] = {
    "function": _of_function,
    "model": _of_model,
    "layers": _of_layers,
    "operations": _of_operations,
}


def _nnx_jit(f):
    return nnx.jit(lambda *arguments: f(*arguments))


def _nnx_remat(f):
    return nnx.remat(lambda *arguments: f(*arguments))


def _scan(f):
    return lambda w, x, b: lax.scan(lambda x, _: (f(w, x, b), None), x, None, length=2)[0]


def _map(f):
    return lambda w, x, b: lax.map(lambda x: f(w, x, b), jnp.stack([x, 2 * x])).sum(0)


def _cond(f):
    def call(w, x, b):
        return lax.cond(x[0, 0, 0, 0] < 1e9, f, lambda w, x, b: x * b[0] + w[0, 0], w, x, b)

    return call


def _vmap(f):
    mapped = jax.vmap(f, (None, 0, None))
    return lambda w, x, b: mapped(w, jnp.stack([x, 2 * x]), b).sum(0)


def _shard_map(f):
    def call(w, x, b):
        kinds = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((2,), ("data",), axis_types=kinds, devices=jax.devices()[:2])
        batch, whole = PartitionSpec("data"), PartitionSpec()
        specs = {"in_specs": (whole, batch, whole), "out_specs": batch}
        return jax.shard_map(f, mesh=mesh, **specs)(w, x, b)

    return call


def _equinox_loop(f):
    def call(w, x, b):
        def step(carry):
            return carry[0] + 1, f(w, carry[1], b)

        start = jnp.int32(0), x
        options = {"max_steps": 2, "kind": "checkpointed"}
        return eqxi.while_loop(lambda carry: carry[0] < 2, step, start, **options)[1]

    return call


def _custom_vjp(f):
    @jax.custom_vjp
    def call(w, x, b):
        return f(w, x, b)

    call.defvjp(lambda *arguments: jax.vjp(f, *arguments), lambda pull, cotangent: pull(cotangent))
    return call


WRAPPERS = {
    "none": lambda f: f,
    "jit": jax.jit,
    "nnx.jit": _nnx_jit,
    "checkpoint": jax.checkpoint,
    "nnx.remat": _nnx_remat,
    "scan": _scan,
    "map": _map,
    "cond": _cond,
    "vmap": _vmap,
    "shard_map": _shard_map,
    "equinox loop": _equinox_loop,
    "custom_vjp": _custom_vjp,
}


@dataclasses.dataclass(frozen=True)
class Combination:
    """One row of the sweep.

    Attributes:
        subject: What has codes.
        way: The policy.
        wrappers: Around it, the outer one first.
    """

    subject: str
    way: str
    wrappers: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((*self.wrappers, self.subject, self.way)).replace(" ", "-")

    @property
    def error(self) -> float:
        """Largest error of a gradient, relative to its norm."""
        return WAYS[self.way].error

    def functions(self) -> tuple[Callable, Callable]:
        """The stock function and the one with codes, both wrapped."""
        made = [SUBJECTS[self.subject](way) for way in (None, WAYS[self.way])]
        for name in reversed(self.wrappers):
            made = [WRAPPERS[name](f) for f in made]
        return made[0], made[1]


def combinations(depth: int) -> list[Combination]:
    """All combinations with so many wrappers around each thing; JAX nests no `shard_map`."""
    names = [n for n in WRAPPERS if n != "none" or depth == 1]
    return [
        Combination(subject, way, wrappers)
        for wrappers in itertools.product(names, repeat=depth)
        if wrappers.count("shard_map") < 2
        for subject in SUBJECTS
        for way in WAYS
        if subject != "operations" or WAYS[way].codec is not None
    ]
