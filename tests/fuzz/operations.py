"""The operations of random programs: each takes an array and makes its own weights.

An operation reads its shapes from the array, so that it also fits after another one is left out. It
has a generator of its own, so that its choices and weights stay, too.
"""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

Array = Any


class Unfit(Exception):
    """An operation or wrapper does not fit the array that it is given."""


class Weights:
    """What an operation reads besides its array.

    Attributes:
        values: All arguments of the program by name; `shape_of` adds what is missing.
        dtype: Dtype of the program; float64 where the program is its own reference.
        mixed: Whether weights are float32 and rounded where they are read.
        stack: Sizes of the axes that loops over layers add in front of weights.
        policy: Policy of calls of `jaxcomp.checkpoint` inside of the program; None leaves them out.
        seed: Of their noise.
    """

    def __init__(
        self,
        values: dict[str, Array],
        dtype: Any,
        mixed: bool,
        is_complete: bool = True,
        policy: Any = None,
        seed: Any = None,
    ) -> None:
        self.values = values
        self.dtype = jnp.dtype(dtype)
        self.mixed = mixed
        self.is_complete = is_complete
        self.policy = policy
        self.seed = seed
        self.stack: tuple[int, ...] = ()

    def of(self, values: dict[str, Array]) -> "Weights":
        """The same with some other values."""
        new = copy.copy(self)
        new.values = self.values | values
        return new

    def get(self, name: str, make: Callable[[tuple[int, ...]], np.ndarray]) -> Array:
        """The weight of a name, made where the program is only looked at."""
        if self.is_complete:
            return self.values[name]
        if name not in self.values:
            self.values[name] = make(self.stack)
        return jnp.asarray(self.values[name])[(0,) * len(self.stack)]


class Own:
    """The random choices and the weights of one operation."""

    def __init__(self, weights: Weights, seed: int) -> None:
        self.weights = weights
        self.seed = seed
        self.choices = np.random.default_rng(seed)
        self.count = 0

    def pick(self, *options: Any) -> Any:
        return options[self.choices.integers(len(options))]

    def _name(self) -> str:
        self.count += 1
        return f"{self.seed}.{self.count}"

    def weight(self, *shape: int, scale: float | None = None, mean: float = 0.0) -> Array:
        """A weight with normal values, of the deviation of a dense layer's if `scale` is None."""
        name = self._name()
        deviation = shape[-2] ** -0.5 if scale is None else scale

        def make(stack: tuple[int, ...]) -> np.ndarray:
            values = np.random.default_rng((self.seed, self.count))
            found = mean + deviation * values.normal(size=(*stack, *shape))
            dtype = jnp.float32 if self.weights.mixed else self.weights.dtype
            return found.astype(dtype)

        return self.weights.get(name, make).astype(self.weights.dtype)

    def integers(self, high: int, *shape: int) -> Array:
        """An argument of integers."""
        name = self._name()

        def make(stack: tuple[int, ...]) -> np.ndarray:
            values = np.random.default_rng((self.seed, self.count))
            return values.integers(0, high, (*stack, *shape), np.int32)

        return self.weights.get(name, make)

    def constant(self, *shape: int) -> Array:
        """Normal values that are part of the program."""
        values = np.random.default_rng((self.seed, 0)).normal(size=shape)
        return jnp.asarray(values, self.weights.dtype)

    def to(self, x: Array, dtype: Any) -> Array:
        """A cast, which the reference leaves out."""
        return x if self.weights.dtype == jnp.float64 else x.astype(dtype)

    def wide(self, x: Array) -> Array:
        return self.to(x, jnp.float32)

    def back(self, x: Array) -> Array:
        return x.astype(self.weights.dtype)

    def keep(self, rate: float, shape: tuple[int, ...]) -> Array:
        """A mask of dropout, the same in every dtype."""
        return jax.random.uniform(jax.random.key(self.seed), shape, jnp.float32) < rate


Operation = Callable[[Own, Array], Array]
OPERATIONS: dict[str, tuple[Operation, tuple[int, ...]]] = {}


def _over(*ranks: int) -> Callable[[Operation], Operation]:
    def register(function: Operation) -> Operation:
        OPERATIONS[function.__name__] = function, ranks or (2, 3, 4)
        return function

    return register


def _last(v: Array, x: Array) -> Array:
    """A vector of features that broadcasts with `x`."""
    return jnp.expand_dims(v, tuple(range(x.ndim - 1)))


def _center(x: Array, axes: Any) -> Array:
    return x - x.mean(axes, keepdims=True)


def _normalized(own: Own, x: Array, axes: Any) -> Array:
    """In one of the forms that people write."""
    form = own.pick("two passes", "moments", "var", "wide")
    if form == "wide":
        y = own.wide(x)
        d = _center(y, axes)
        return own.back(d * lax.rsqrt((d * d).mean(axes, keepdims=True) + 1e-5))
    mean = x.mean(axes, keepdims=True)
    if form == "moments":
        y = own.wide(x)
        m = y.mean(axes, keepdims=True)
        variance = jnp.maximum(0, (y * y).mean(axes, keepdims=True) - m * m)
        return own.back((y - m) * lax.rsqrt(variance + 1e-3))
    if form == "var":
        return (x - mean) / jnp.sqrt(x.var(axes, keepdims=True) + 1e-5)
    return (x - mean) * lax.rsqrt(jnp.square(x - mean).mean(axes, keepdims=True) + 1e-5)


def _scaled(own: Own, y: Array) -> Array:
    n = y.shape[-1]
    form = own.pick("scale and bias", "scale", "none")
    if form == "none":
        return y
    y = y * _last(own.weight(n, scale=0.2, mean=1.0), y)
    return y if form == "scale" else y + _last(own.weight(n, scale=0.2), y)


def _heads(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


# Norms.


@_over()
def layer_norm(own: Own, x: Array) -> Array:
    return _scaled(own, _normalized(own, x, -1))


@_over()
def rms_norm(own: Own, x: Array) -> Array:
    y = own.wide(x)
    y = own.back(y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6))
    return y * _last(own.weight(x.shape[-1], scale=0.2, mean=1.0), x)


@_over()
def batch_norm(own: Own, x: Array) -> Array:
    return _scaled(own, _normalized(own, x, tuple(range(x.ndim - 1))))


@_over(4)
def batch_norm_relu_skip(own: Own, x: Array) -> Array:
    y = lax.conv_general_dilated(
        x, own.weight(3, 3, x.shape[-1], x.shape[-1], scale=(9 * x.shape[-1]) ** -0.5),
        (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    y = _scaled(own, _normalized(own, y, (0, 1, 2)))
    return own.pick(jax.nn.relu, jax.nn.silu, jax.nn.hard_swish)(y + x if own.pick(0, 1) else y)


@_over(3, 4)
def instance_norm(own: Own, x: Array) -> Array:
    return _scaled(own, _normalized(own, x, tuple(range(1, x.ndim - 1))))


@_over()
def group_norm(own: Own, x: Array) -> Array:
    if x.shape[-1] % 2:
        raise Unfit
    y = _heads(x, 2)
    axes = (*range(1, y.ndim - 2), y.ndim - 1)
    return _scaled(own, _normalized(own, y, axes).reshape(x.shape))


@_over()
def l2_norm(own: Own, x: Array) -> Array:
    if own.pick(0, 1):
        return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-2)
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-2) * own.weight(scale=0.1, mean=2)


@_over()
def weight_standardised(own: Own, x: Array) -> Array:
    w = own.weight(x.shape[-1], own.pick(8, 16))
    d = _center(w, 0)
    return x @ (d * lax.rsqrt((d * d).mean(0, keepdims=True) + 1e-4)) * x.shape[-1] ** -0.5


@_over()
def spectral_scale(own: Own, x: Array) -> Array:
    w = own.weight(x.shape[-1], x.shape[-1])
    u = own.constant(x.shape[-1])
    v = lax.stop_gradient(w @ u)
    v = v / (jnp.linalg.norm(v) + 1e-3)
    return x @ (w / (jnp.abs(v @ (w @ u)) + 0.5))


@_over()
def standardize(own: Own, x: Array) -> Array:
    return jax.nn.standardize(x, axis=own.pick(-1, 0))


# Products.


def _dense(own: Own, x: Array, size: int) -> Array:
    return x @ own.weight(x.shape[-1], size)


@_over()
def dense(own: Own, x: Array) -> Array:
    y = _dense(own, x, own.pick(8, 12, 16))
    return y + _last(own.weight(y.shape[-1], scale=0.1), y) if own.pick(0, 1) else y


@_over()
def dense_scaled(own: Own, x: Array) -> Array:
    y = _dense(own, x, x.shape[-1])
    y = y + _last(own.weight(y.shape[-1], scale=0.1), y)
    return x + y * _last(own.weight(y.shape[-1], scale=0.1, mean=0.3), y)


@_over()
def tied(own: Own, x: Array) -> Array:
    w = own.weight(x.shape[-1], own.pick(8, 16))
    return own.pick(jnp.tanh, jax.nn.gelu, jnp.sin, jax.nn.relu)(x @ w) @ w.T


@_over()
def called_twice(own: Own, x: Array) -> Array:
    w, b = own.weight(x.shape[-1], x.shape[-1]), own.weight(x.shape[-1], scale=0.1)
    act = own.pick(jnp.tanh, jax.nn.silu, jax.nn.gelu)

    def layer(x: Array) -> Array:
        return act(x @ w + _last(b, x))

    return layer(layer(x))


@_over()
def mlp(own: Own, x: Array) -> Array:
    act = own.pick(jax.nn.gelu, jax.nn.silu, jax.nn.relu, jnp.tanh)
    return x + _dense(own, act(_dense(own, x, 16)), x.shape[-1])


@_over()
def lora(own: Own, x: Array) -> Array:
    n = x.shape[-1]
    frozen = lax.stop_gradient(own.weight(n, n))
    return x @ frozen + (x @ own.weight(n, 2)) @ own.weight(2, n) * own.pick(0.5, 2.0)


@_over()
def repeated_axis(own: Own, x: Array) -> Array:
    n = x.shape[-1]
    w = own.weight(n, n, n, scale=1 / n)
    return jnp.einsum(own.pick("...i,iij->...j", "...i,jii->...j", "...j,iji->...j"), x, w)


@_over()
def bilinear(own: Own, x: Array) -> Array:
    w = own.weight(x.shape[-1], x.shape[-1], x.shape[-1], scale=1 / x.shape[-1])
    return jnp.einsum("...i,ijk,...j->...k", x, w, jnp.tanh(x))


@_over()
def gram(own: Own, x: Array) -> Array:
    y = jnp.einsum("b...i,b...j->bij", x, x) / math.prod(x.shape[1:-1])
    return own.pick(lambda y: y, jnp.tanh)(y * 0.3).reshape(x.shape[0], -1)[:, :16]


@_over()
def factorization_machine(own: Own, x: Array) -> Array:
    v = own.weight(x.shape[-1], 8)
    return 0.5 * ((x @ v) ** 2 - (x * x) @ (v * v))


@_over()
def distances(own: Own, x: Array) -> Array:
    c = own.weight(8, x.shape[-1], scale=1.0)
    d = (x * x).sum(-1, keepdims=True) - 2 * x @ c.T + _last((c * c).sum(-1), x)
    return own.pick(lambda d: jnp.exp(-0.05 * d), lambda d: jnp.sqrt(jnp.abs(d) + 1))(d)


# Attentions.


def _project(own: Own, x: Array, heads: int, kv_heads: int, size: int) -> tuple[Array, ...]:
    return (
        _heads(_dense(own, x, heads * size), heads),
        _heads(_dense(own, x, kv_heads * size), kv_heads),
        _heads(_dense(own, x, kv_heads * size), kv_heads),
    )


def _rope(x: Array) -> Array:
    angles = jnp.arange(x.shape[1])[:, None] * 10.0 ** -jnp.arange(x.shape[-1] // 2)[None]
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = jnp.split(x, 2, -1)
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _mask(own: Own, length: int) -> Array:
    rows, columns = jnp.arange(length)[:, None], jnp.arange(length)[None]
    causal = rows >= columns
    window = jnp.abs(rows - columns) < 3
    return own.pick(causal, window, causal & window)


@_over(3)
def attention(own: Own, x: Array) -> Array:
    """Written out, with a mask of some kind, grouped queries and rotated keys."""
    heads, size = own.pick((2, 4), (4, 4), (2, 8))
    kv_heads = own.pick(heads, heads // 2)
    q, k, v = _project(own, x, heads, kv_heads, size)
    if own.pick(0, 1):
        q, k = _rope(q), _rope(k)
    if own.pick(0, 0, 1):
        q, k = (t * lax.rsqrt(jnp.square(t).mean(-1, keepdims=True) + 1e-5) for t in (q, k))
    k, v = (jnp.repeat(t, heads // kv_heads, 2) for t in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * size**-0.5, k)
    if own.pick(0, 0, 1):
        scores = 5 * jnp.tanh(scores / 5)
    if own.pick(0, 1):
        scores = own.wide(scores)
    form = own.pick("none", "-1e9", "-inf", "least", "values", "relative", "argument")
    mask = _mask(own, x.shape[1])[None, None]
    if form == "values":
        scores = scores + jnp.where(mask, 0, -3e4).astype(scores.dtype)
    elif form == "relative":
        bias = own.weight(heads, x.shape[1], x.shape[1], scale=0.5)
        scores = scores + bias[None].astype(scores.dtype)
    elif form == "argument":
        seen = own.integers(3, x.shape[0], 1, 1, x.shape[1]).at[..., 0].set(1) > 0
        scores = jnp.where(seen, scores, jnp.asarray(-3e4, scores.dtype))
    elif form != "none":
        smallest = float(jnp.finfo(scores.dtype).min)
        least = {"-1e9": max(-1e9, smallest), "-inf": -jnp.inf}.get(form, smallest)
        scores = jnp.where(mask, scores, jnp.asarray(least, scores.dtype))
    weights = own.back(jax.nn.softmax(scores, -1))
    if own.pick(0, 0, 1):
        keep = own.keep(0.8, weights.shape)
        weights = jnp.where(keep, weights / 0.8, 0)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return _dense(own, mixed.reshape(*x.shape[:2], -1), x.shape[-1])


@_over(3)
def library_attention(own: Own, x: Array) -> Array:
    wide = jnp.float32 if x.dtype == jnp.float16 else x.dtype  # a CPU has no product of float16
    q, k, v = (a.astype(wide) for a in _project(own, x, 4, own.pick(4, 2), 4))
    form = own.pick("causal", "mask", "bias", "window")
    options: dict[str, Any] = {
        "causal": {"is_causal": True},
        "mask": {"mask": _mask(own, x.shape[1])[None, None]},
        "bias": {"bias": own.weight(1, 4, x.shape[1], x.shape[1], scale=0.5).astype(wide)},
        "window": {"local_window_size": (2, 1)},
    }[form]
    mixed = jax.nn.dot_product_attention(q, k, v, **options).astype(x.dtype)
    return x + _dense(own, mixed.reshape(*x.shape[:2], -1), x.shape[-1])


@_over(3)
def linear_attention(own: Own, x: Array) -> Array:
    q, k, v = _project(own, x, 2, 2, 4)
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    state = jnp.einsum("bkhd,bkhe->bhde", k, v)
    total = jnp.einsum("bqhd,bhd->bqh", q, k.sum(1))
    mixed = jnp.einsum("bqhd,bhde->bqhe", q, state) / (total[..., None] + 0.1)
    return mixed.reshape(*x.shape[:2], -1)


@_over(2, 3)
def attention_over_examples(own: Own, x: Array) -> Array:
    flat = x.reshape(x.shape[0], -1)
    scores = flat @ flat.T * flat.shape[1] ** -0.5
    return (jax.nn.softmax(scores, -1) @ flat).reshape(x.shape)


@_over(3)
def pooled_by_attention(own: Own, x: Array) -> Array:
    weights = jax.nn.softmax(jnp.tanh(_dense(own, x, 4)) @ own.weight(4, 2), 1)
    return jnp.einsum("bsh,bsf->bhf", weights, x)


# Gates.


@_over()
def gated_unit(own: Own, x: Array) -> Array:
    act = own.pick(jax.nn.silu, jax.nn.gelu, jax.nn.sigmoid, jax.nn.relu, jnp.tanh)
    up, gate = _dense(own, x, 16), _dense(own, x, 16)
    return _dense(own, act(gate) * up, x.shape[-1])


@_over()
def glu(own: Own, x: Array) -> Array:
    if x.shape[-1] % 2:
        raise Unfit
    return jax.nn.glu(x) if own.pick(0, 1) else jax.nn.glu(_dense(own, x, 16))


@_over()
def sigmoid_gate(own: Own, x: Array) -> Array:
    return x * jax.nn.sigmoid(_dense(own, x, x.shape[-1]))


@_over()
def highway(own: Own, x: Array) -> Array:
    t = jax.nn.sigmoid(_dense(own, x, x.shape[-1]) - 1)
    return t * jnp.tanh(_dense(own, x, x.shape[-1])) + (1 - t) * x


@_over(4)
def squeeze_excite(own: Own, x: Array) -> Array:
    y = jax.nn.relu(_dense(own, x.mean((1, 2)), 4))
    gate = own.pick(jax.nn.sigmoid, jax.nn.hard_sigmoid)(_dense(own, y, x.shape[-1]))
    return x * gate[:, None, None]


@_over(2, 3)
def mixture_of_experts(own: Own, x: Array) -> Array:
    probabilities = jax.nn.softmax(_dense(own, x, 3), -1)
    best, chosen = lax.top_k(probabilities, own.pick(1, 2))
    gates = jax.nn.one_hot(chosen, 3, dtype=x.dtype) * best[..., None]
    h = jax.nn.gelu(jnp.einsum("...i,eij->...ej", x, own.weight(3, x.shape[-1], 8)))
    y = jnp.einsum("...ej,eji->...ei", h, own.weight(3, 8, x.shape[-1]))
    return jnp.einsum("...ei,...e->...i", y, gates.sum(-2))


# Convolutions and pools.


def _conv(own: Own, x: Array, window: int, out: int, groups: int = 1, **options: Any) -> Array:
    n = x.shape[-1] // groups
    kernel = own.weight(window, window, n, out, scale=(window * window * n) ** -0.5)
    strides = options.pop("strides", (1, 1))
    return lax.conv_general_dilated(
        x,
        kernel,
        strides,
        options.pop("padding", "SAME"),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
        **options,
    )


@_over(4)
def conv(own: Own, x: Array) -> Array:
    return _conv(own, x, own.pick(1, 3), own.pick(4, 8), padding=own.pick("SAME", "VALID"))


@_over(4)
def conv_strided(own: Own, x: Array) -> Array:
    return _conv(own, x, own.pick(2, 3), 8, strides=own.pick((2, 2), (2, 1)))


@_over(4)
def conv_dilated(own: Own, x: Array) -> Array:
    return _conv(own, x, 3, own.pick(4, 8), rhs_dilation=own.pick((2, 2), (1, 2)))


@_over(4)
def conv_transposed(own: Own, x: Array) -> Array:
    if own.pick(0, 1):
        return _conv(own, x, 3, 4, padding=((2, 1), (1, 2)), lhs_dilation=(2, 2))
    kernel = own.weight(2, 2, x.shape[-1], 4, scale=x.shape[-1] ** -0.5)
    return lax.conv_transpose(x, kernel, (2, 2), own.pick("SAME", "VALID"))


@_over(4)
def depthwise(own: Own, x: Array) -> Array:
    return _conv(own, x, 3, x.shape[-1], groups=x.shape[-1])


@_over(4)
def conv_grouped(own: Own, x: Array) -> Array:
    if x.shape[-1] % 2:
        raise Unfit
    return _conv(own, x, 3, 8, groups=2)


@_over(4)
def conv_channels_first(own: Own, x: Array) -> Array:
    kernel = own.weight(4, x.shape[-1], 3, 3, scale=(9 * x.shape[-1]) ** -0.5)
    y = lax.conv_general_dilated(jnp.moveaxis(x, -1, 1), kernel, (1, 1), "SAME")
    y = y + own.weight(4, scale=0.1)[None, :, None, None]
    return jnp.moveaxis(own.pick(jax.nn.relu, jnp.tanh)(y), 1, -1)


@_over(3)
def conv_causal(own: Own, x: Array) -> Array:
    n = x.shape[-1]
    return lax.conv_general_dilated(
        x, own.weight(3, 1, n, scale=0.6), (1,), [(2, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=n,
    )  # fmt: skip


def _pool_shape(own: Own, x: Array) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    window, stride, padding = own.pick(
        (2, 2, "VALID"), (3, 2, "SAME"), (3, 1, "SAME"), (3, 2, "VALID"), (2, 1, "VALID")
    )
    if min(x.shape[1:3]) < 3:
        raise Unfit
    return (1, window, window, 1), (1, stride, stride, 1), padding


def _number(value: float, x: Array) -> Any:
    """Where a pool starts: a number that is known when it is traced."""
    return np.asarray(value, x.dtype)


@_over(4)
def max_pool(own: Own, x: Array) -> Array:
    return lax.reduce_window(x, _number(-jnp.inf, x), lax.max, *_pool_shape(own, x))


@_over(4)
def min_pool(own: Own, x: Array) -> Array:
    return lax.reduce_window(x, _number(jnp.inf, x), lax.min, *_pool_shape(own, x))


@_over(4)
def avg_pool(own: Own, x: Array) -> Array:
    zero = _number(0, x)
    window, strides, padding = _pool_shape(own, x)
    total = lax.reduce_window(x, zero, lax.add, window, strides, padding)
    if own.pick(0, 1):
        return total / math.prod(window)
    ones = jnp.ones((1, *x.shape[1:3], 1), x.dtype)
    return total / lax.reduce_window(ones, zero, lax.add, window, strides, padding)


@_over(3)
def pool_tokens(own: Own, x: Array) -> Array:
    if x.shape[1] < 3:
        raise Unfit
    return lax.reduce_window(
        x, _number(-jnp.inf, x), lax.max, (1, 3, 1), (1, 2, 1), own.pick("SAME", "VALID")
    )


@_over(4)
def resize(own: Own, x: Array) -> Array:
    shape = (x.shape[0], *own.pick((8, 8), (4, 5), (3, 3)), x.shape[-1])
    return jax.image.resize(x, shape, own.pick("bilinear", "nearest", "cubic"))


@_over(4)
def pixel_shuffle(own: Own, x: Array) -> Array:
    b, h, w, c = x.shape
    if c % 4:
        raise Unfit
    y = x.reshape(b, h, w, 2, 2, c // 4).transpose(0, 1, 3, 2, 4, 5)
    return y.reshape(b, 2 * h, 2 * w, c // 4)


@_over(4)
def patches(own: Own, x: Array) -> Array:
    b, h, w, c = x.shape
    if h % 2 or w % 2:
        raise Unfit
    y = x.reshape(b, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 2, 4, 5)
    return _dense(own, y.reshape(b, h * w // 4, 4 * c), 8)


@_over(4)
def pooled(own: Own, x: Array) -> Array:
    return own.pick(x.mean((1, 2)), x.max((1, 2)), x.reshape(x.shape[0], -1, x.shape[-1]))


# Indices.


@_over(2, 3)
def embedding(own: Own, x: Array) -> Array:
    table = own.weight(7, x.shape[-1], scale=1.0)
    ids = own.integers(7, *x.shape[:-1])
    found = own.pick(lambda: table[ids], lambda: jnp.take(table, ids, axis=0))()
    return own.pick(lambda y: x + y, lambda y: x * y, lambda y: jnp.sin(y) * x)(found)


@_over(2, 3)
def tied_embedding(own: Own, x: Array) -> Array:
    table = own.weight(9, x.shape[-1], scale=0.5)
    return (x + table[own.integers(9, *x.shape[:-1])]) @ table.T


@_over()
def gather(own: Own, x: Array) -> Array:
    axis = own.pick(0, 1)
    size = x.shape[axis]
    ids = own.integers(size, size)
    y = jnp.take(x, ids, axis=axis)
    return own.pick(lambda: y, lambda: y * jnp.tanh(x))()


@_over()
def take_along(own: Own, x: Array) -> Array:
    ids = own.integers(x.shape[-1], *x.shape[:-1], own.pick(4, x.shape[-1]))
    return jnp.take_along_axis(x, ids, -1)


@_over()
def scatter_add(own: Own, x: Array) -> Array:
    ids = own.integers(x.shape[0], x.shape[0])
    start = own.pick(jnp.zeros_like(x), jnp.tanh(x))
    return start.at[ids].add(own.pick(x, jnp.sin(x)))


@_over()
def scatter_set(own: Own, x: Array) -> Array:
    return jnp.tanh(x).at[..., :2].set(jnp.exp(-jnp.abs(x[..., -2:])))


@_over()
def scatter_multiply(own: Own, x: Array) -> Array:
    return x.at[..., 0].multiply(jnp.cos(x[..., 1]))


@_over()
def segment_sum(own: Own, x: Array) -> Array:
    ids = own.integers(4, x.shape[0])
    total = jax.ops.segment_sum(jnp.sin(x), ids, 4)
    return own.pick(lambda: total[ids] * x, lambda: x + total[ids])()


@_over()
def segment_softmax(own: Own, x: Array) -> Array:
    ids = own.integers(3, x.shape[0])
    top = lax.stop_gradient(jax.ops.segment_max(x, ids, 3))
    e = jnp.exp(x - top[ids])
    return x * e / jax.ops.segment_sum(e, ids, 3)[ids]


@_over(2)
def graph_messages(own: Own, x: Array) -> Array:
    senders, receivers = own.integers(x.shape[0], 12), own.integers(x.shape[0], 12)
    pair = jnp.concatenate([x[senders], x[receivers]], -1)
    messages = own.pick(jax.nn.relu, jnp.tanh)(_dense(own, pair, x.shape[-1]))
    return x + jax.ops.segment_sum(messages, receivers, x.shape[0])


@_over()
def sort(own: Own, x: Array) -> Array:
    y = jnp.sort(x, axis=own.pick(-1, 0))
    return own.pick(lambda: y, lambda: y * x, lambda: jnp.tanh(y))()


@_over()
def argsort(own: Own, x: Array) -> Array:
    order = jnp.argsort(x.reshape(x.shape[0], -1)[:, 0])
    return x[order] * own.pick(1.0, 0.5)


@_over()
def top_k(own: Own, x: Array) -> Array:
    values, _ = lax.top_k(x, min(8, x.shape[-1]))
    return values


@_over()
def one_hot(own: Own, x: Array) -> Array:
    chosen = jax.nn.one_hot(jnp.argmax(x, -1), x.shape[-1], dtype=x.dtype)
    return x * (chosen + 0.5)


@_over()
def roll(own: Own, x: Array) -> Array:
    return own.pick(jnp.roll(x, 1, -1) * x, jnp.flip(x, -1), x - jnp.roll(x, 2, 0))


@_over()
def slices(own: Own, x: Array) -> Array:
    half = x.shape[-1] // 2
    if half < 2:
        raise Unfit
    a, b = x[..., :half], x[..., half : 2 * half]
    return own.pick(
        lambda: a * b,
        lambda: jnp.concatenate([a, jnp.sin(b)], -1),
        lambda: jnp.stack([a, b], -1).reshape(*x.shape[:-1], -1),
        lambda: x[..., ::2],
    )()


@_over()
def dynamic_slice(own: Own, x: Array) -> Array:
    start = own.integers(2).reshape(())
    y = lax.dynamic_slice_in_dim(x, start, x.shape[-1] - 1, -1)
    return lax.dynamic_update_slice_in_dim(jnp.cos(x), y, start, -1)


@_over()
def pad(own: Own, x: Array) -> Array:
    width = [(0, 0)] * (x.ndim - 1) + [(1, 1)]
    return jnp.pad(x, width, mode=own.pick("constant", "edge", "reflect"))


@_over(3)
def transposed(own: Own, x: Array) -> Array:
    y = jnp.swapaxes(x, 1, 2)
    y = y + jax.nn.gelu(_dense(own, y, 8)) @ own.weight(8, y.shape[-1])
    return jnp.swapaxes(y, 1, 2)


# Sums along axes, transforms, loops.


@_over()
def cumulative(own: Own, x: Array) -> Array:
    axis = own.pick(-1, 0)
    return own.pick(
        lambda: jnp.cumsum(x, axis) * 0.3,
        lambda: jnp.cumprod(1 + 0.1 * jnp.tanh(x), axis),
        lambda: lax.cummax(x, axis % x.ndim),
        lambda: lax.cumlogsumexp(x, axis % x.ndim),
        lambda: lax.associative_scan(lambda a, b: 0.9 * a + b, x, axis=axis % x.ndim) * 0.3,
    )()


@_over()
def fft(own: Own, x: Array) -> Array:
    y = own.wide(x)
    if own.pick(0, 1):
        z = jnp.fft.fft(y, axis=-1)
        filtered = jnp.fft.ifft(z * (1 + 0.5 * jnp.abs(z)) / (1 + jnp.abs(z)), axis=-1).real
    else:
        z = jnp.fft.rfft(y, axis=-1)
        w = own.wide(own.weight(z.shape[-1], scale=0.3, mean=1.0))
        filtered = jnp.fft.irfft(z * _last(w, z), n=x.shape[-1], axis=-1)
    return own.back(filtered)


@_over(3)
def recurrent(own: Own, x: Array) -> Array:
    n = x.shape[-1]
    w, u = own.weight(n, n), own.weight(n, n)
    gated = own.pick(False, True)

    def step(h: Array, x: Array) -> tuple[Array, Array]:
        if gated:
            z = jax.nn.sigmoid(x @ w + h @ u)
            h = (1 - z) * h + z * jnp.tanh(x)
        else:
            h = jnp.tanh(x @ w + h @ u)
        return h, h

    start = jnp.zeros_like(x[:, 0])
    return jnp.swapaxes(lax.scan(step, start, jnp.swapaxes(x, 0, 1))[1], 0, 1)


@_over(3)
def selective_scan(own: Own, x: Array) -> Array:
    decay = jnp.exp(-jax.nn.softplus(_dense(own, x, x.shape[-1])))

    def step(h: Array, given: tuple[Array, Array]) -> tuple[Array, Array]:
        a, b = given
        h = a * h + (1 - a) * b
        return h, h

    moved = (jnp.swapaxes(decay, 0, 1), jnp.swapaxes(x, 0, 1))
    return jnp.swapaxes(lax.scan(step, jnp.zeros_like(x[:, 0]), moved)[1], 0, 1)


@_over()
def fixed_loop(own: Own, x: Array) -> Array:
    w = own.weight(x.shape[-1], x.shape[-1])
    return lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ w) + 0.1 * i * h, x)


@_over()
def data_loop(own: Own, x: Array) -> Array:
    """A `while` of constants alone: nothing differentiated passes through it."""
    size = lax.while_loop(lambda n: n < 5, lambda n: n * 1.5 + 0.5, lax.stop_gradient(x).sum() * 0)
    return x * (own.back(size) * 0.2)


# Elementwise functions.

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "maximum": lambda x: jnp.maximum(x, 0),
    "where": lambda x: jnp.where(x > 0, x, 0.1 * x),
    "leaky_relu": jax.nn.leaky_relu,
    "elu": jax.nn.elu,
    "selu": jax.nn.selu,
    "celu": jax.nn.celu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "mish": jax.nn.mish,
    "softplus": jax.nn.softplus,
    "sparse_plus": jax.nn.sparse_plus,
    "sparse_sigmoid": jax.nn.sparse_sigmoid,
    "squareplus": jax.nn.squareplus,
    "sigmoid": jax.nn.sigmoid,
    "log_sigmoid": jax.nn.log_sigmoid,
    "soft_sign": jax.nn.soft_sign,
    "hard_tanh": jax.nn.hard_tanh,
    "hard_sigmoid": jax.nn.hard_sigmoid,
    "hard_silu": jax.nn.hard_silu,
    "softmax": jax.nn.softmax,
    "softmax_0": lambda x: jax.nn.softmax(x, axis=0) * 4,
    "log_softmax": jax.nn.log_softmax,
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "arctan": jnp.arctan,
    "erf": jax.scipy.special.erf,
    "exp": lambda x: jnp.exp(jnp.minimum(x, 1.5)),
    "expm1": lambda x: jnp.expm1(-jnp.abs(x)),
    "log1p": lambda x: jnp.log1p(x * x),
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x) + 0.3),
    "square": lambda x: 0.5 * jnp.square(jnp.clip(x, -3, 3)),
    "square_relu": lambda x: 0.5 * jnp.square(jax.nn.relu(x)),
    "cube": lambda x: 0.2 * x**3,
    "power": lambda x: (jnp.abs(x) + 0.5) ** 1.3,
    "abs": jnp.abs,
    "clip": lambda x: jnp.clip(x, -0.8, 1.1),
    "reciprocal": lambda x: 1 / (1 + jnp.abs(x)),
    "divided_by_itself": lambda x: x / (1 + x * x),
    "logaddexp": lambda x: jnp.logaddexp(x, 0.5 * x + 0.1),
    "sinc": jnp.sinc,
    "normal_cdf": jax.scipy.stats.norm.cdf,
    "rounded_through": lambda x: x + lax.stop_gradient(jnp.round(x) - x),
    "floor": lambda x: x - 0.5 * jnp.floor(x),
    "sign": lambda x: x * jnp.sign(x) + 0.1 * x,
    "where_safe": lambda x: jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1)), x),
    "select": lambda x: lax.select_n((x > 0).astype(jnp.int32) + (x > 1), x, 2 * x, jnp.sin(x)),
}


@_over()
def activation(own: Own, x: Array) -> Array:
    return ACTIVATIONS[own.pick(*ACTIVATIONS)](x)


@_over()
def activation_between(own: Own, x: Array) -> Array:
    """Between products, where codes serve a derivative and a weight's gradient."""
    y = _dense(own, x, 16)
    return _dense(own, ACTIVATIONS[own.pick(*ACTIVATIONS)](y), x.shape[-1])


@_over()
def parametric_relu(own: Own, x: Array) -> Array:
    slope = own.weight(x.shape[-1], scale=0.1, mean=0.25)
    return jnp.where(x >= 0, x, _last(slope, x) * x)


@_over()
def learned_threshold(own: Own, x: Array) -> Array:
    limit = _last(own.weight(x.shape[-1], scale=0.2, mean=0.8), x)
    return own.pick(jnp.minimum, jnp.maximum)(x, jnp.broadcast_to(limit, x.shape))


@_over()
def learned_scale(own: Own, x: Array) -> Array:
    return x * own.weight(scale=0.2, mean=1.0) + own.weight(scale=0.2)


@_over()
def learned_power(own: Own, x: Array) -> Array:
    return (jnp.abs(x) + 0.5) ** own.weight(scale=0.1, mean=1.2)


@_over()
def snake(own: Own, x: Array) -> Array:
    a = _last(own.weight(x.shape[-1], scale=0.2, mean=1.0), x)
    return x + jnp.square(jnp.sin(a * x)) / (jnp.abs(a) + 0.1)


@_over()
def scale(own: Own, x: Array) -> Array:
    return own.pick(lambda x: 0.7 * x, lambda x: x / 1.3, lambda x: -x, lambda x: 2 * x + 1)(x)


@_over()
def constant(own: Own, x: Array) -> Array:
    c = own.constant(*x.shape[1:])[None]
    return own.pick(lambda: x + c, lambda: x * (1 + 0.3 * c), lambda: jnp.sin(x + c) * c)()


@_over()
def dropout(own: Own, x: Array) -> Array:
    keep = own.keep(0.9, x.shape)
    return own.pick(jnp.where(keep, x / 0.9, 0), x * keep.astype(x.dtype) / 0.9)


@_over()
def noise(own: Own, x: Array) -> Array:
    return x + 0.3 * own.constant(*x.shape) * jnp.tanh(x)


@_over()
def cast(own: Own, x: Array) -> Array:
    """Through another dtype, with a function between the casts or without."""
    y = own.to(x, own.pick(jnp.bfloat16, jnp.float16, jnp.float32))
    return own.back(own.pick(lambda y: y, jnp.tanh, lambda y: y * 1.5, jax.nn.gelu)(y))


@_over()
def narrow_activation(own: Own, x: Array) -> Array:
    """A factor in float32 between a product and a nonlinear step in fewer bits."""
    y = own.wide(_dense(own, x, 16)) * own.pick(
        1.0039, 0.7, own.wide(own.weight(mean=1, scale=0.1))
    )
    act = own.pick(jax.nn.gelu, jnp.tanh, jax.nn.silu)
    return own.back(act(own.to(y, jnp.bfloat16)))


@_over()
def wide_sum(own: Own, x: Array) -> Array:
    y = own.wide(x)
    return own.back(y / (1 + jnp.abs(y).sum(-1, keepdims=True) / x.shape[-1]))


@_over()
def stopped(own: Own, x: Array) -> Array:
    s = lax.stop_gradient(x)
    return own.pick(lambda: x * jnp.tanh(s), lambda: x + s, lambda: jnp.sin(x) - 0.5 * s)()


@_over()
def own_derivative(own: Own, x: Array) -> Array:
    """A function with a rule of the user's."""
    if own.pick(0, 1):
        clipped = jax.custom_jvp(lambda x: jnp.clip(x, -1, 1))
        clipped.defjvp(lambda x, t: (clipped(*x), t[0] * jnp.exp(-(x[0] ** 2))))
        return clipped(x)

    reversed_ = jax.custom_vjp(lambda x: jnp.tanh(x))
    reversed_.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (-0.5 * g * jnp.cos(x),))
    return reversed_(x)


@_over()
def named(own: Own, x: Array) -> Array:
    with jax.named_scope("part"):
        return checkpoint_name(jnp.sin(x), "sine") * x


@_over()
def barrier(own: Own, x: Array) -> Array:
    return lax.optimization_barrier(jnp.tanh(x)) * x


@_over()
def product_with_itself(own: Own, x: Array) -> Array:
    return own.pick(
        lambda: x * jnp.sin(x),
        lambda: jnp.tanh(x) * jax.nn.sigmoid(x),
        lambda: jnp.tanh(x) * jnp.tanh(_dense(own, x, x.shape[-1])),
        lambda: x * jnp.exp(-x * x),
    )()


@_over()
def two_branches(own: Own, x: Array) -> Array:
    a, b = _dense(own, jnp.tanh(x), 8), _dense(own, jax.nn.relu(x), 8)
    return own.pick(
        lambda: a + b,
        lambda: a * b,
        lambda: jnp.concatenate([a, b], -1),
        lambda: jnp.where(a > b, a, b),
        lambda: jnp.maximum(a, b),
        lambda: a / (1 + b * b),
        lambda: jnp.hypot(a, b + 2),
        lambda: jnp.arctan2(a, b + 3),
    )()


@_over()
def reduction(own: Own, x: Array) -> Array:
    axis = own.pick(-1, 0)

    def against(y: Array) -> Array:
        return x - y

    return against(
        own.pick(
            lambda: x.mean(axis, keepdims=True),
            lambda: x.max(axis, keepdims=True),
            lambda: x.min(axis, keepdims=True),
            lambda: x.std(axis, keepdims=True),
            lambda: (1 + 0.1 * jnp.tanh(x)).prod(axis, keepdims=True),
            lambda: jax.nn.logsumexp(x, axis, keepdims=True),
            lambda: jnp.median(x, axis, keepdims=True),
            lambda: jnp.linalg.norm(x + 0.01, axis=axis, keepdims=True),
        )()
    )


@_over()
def cross_entropy(own: Own, x: Array) -> Array:
    """The loss of each example, behind which a program goes on."""
    logits = own.wide(_dense(own, x, 8))
    form = own.pick("one hot", "labels", "soft")
    log_p = jax.nn.log_softmax(logits)
    if form == "labels":
        found = jnp.take_along_axis(log_p, own.integers(8, *x.shape[:-1], 1), -1)
    else:
        target = jax.nn.one_hot(own.integers(8, *x.shape[:-1]), 8, dtype=logits.dtype)
        target = 0.9 * target + 0.0125 if form == "soft" else target
        found = (log_p * target).sum(-1, keepdims=True)
    return x * own.back(found)


@_over()
def entropy(own: Own, x: Array) -> Array:
    p = jax.nn.softmax(x, -1)
    return x + (p * jnp.log(p + 1e-6)).sum(-1, keepdims=True)


@functools.cache
def fitting(rank: int) -> Sequence[str]:
    """Names of the operations for arrays of a rank."""
    return [name for name, (_, ranks) in OPERATIONS.items() if rank in ranks]
