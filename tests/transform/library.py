"""Small functions of every family that has a derivative, with their arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.helpers import normal

X, Y, Z = (normal((4, 8), seed=i) for i in range(3))
W, V = (0.4 * normal((8, 8), seed=i) for i in (3, 4))
INDEX = jnp.array([2, 0, 3, 3, 1])


def _elementwise(names, low, high):
    """Primitives at values that are intermediate and lie in their domain."""

    def run(x, w):
        inner = low + (high - low) * jax.nn.sigmoid(x @ w)
        return [getattr(lax, name)(inner) @ w for name in names.split()]

    return run


_DOMAINS = {
    (-0.9, 0.9): "abs acos asin atan atanh erf_inv",
    (1.1, 3.0): "acosh cbrt digamma lgamma log log1p rsqrt sqrt",
    (-2.0, 2.0): "asinh cos cosh erf erfc exp exp2 expm1 floor logistic neg round sign sin sinh "
    "square tanh",
    (-1.2, 1.2): "tan",
}
UNARY = {names: (_elementwise(names, *domain), (X, W)) for domain, names in _DOMAINS.items()}


def _layer_norm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-3) * scale + bias


def _batch_norm(h):
    mean = h.mean((0, 1, 2), keepdims=True)
    variance = jnp.square(h).mean((0, 1, 2), keepdims=True) - jnp.square(mean)
    return (h - mean) * lax.rsqrt(variance + 1e-3)


def _conv(x, kernel):
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)


def _conv_net(x, kernel, other):
    h = jax.nn.relu(_batch_norm(_conv(x, kernel)))
    return jax.nn.relu(_batch_norm(_conv(h, other)))


def _attention(x, w):
    q, k, v = x @ w, jnp.sin(x) @ w, x * 2 @ w
    return jax.nn.softmax(q @ k.T) @ v


def _linear_attention(x, w):
    q = jnp.sin(x @ w)
    return q @ (q.T @ (q @ w))


def _swiglu(x, w, v):
    return (jax.nn.silu(x @ w) * (x @ v)) @ w


def _recurrence(x, w):
    return lax.scan(lambda c, t: (jnp.tanh(c @ w + t), jnp.sin(c)), x, jnp.stack([x, 2 * x]))


@jax.custom_vjp
def _own_gate(gate, up):
    return jax.nn.silu(gate) * up


def _of_own_gate(saved, g):
    gate, up = saved
    of_gate = jax.vjp(jax.nn.silu, gate)[1](g * up)[0]
    return of_gate, jax.nn.silu(gate) * g


_own_gate.defvjp(lambda gate, up: (_own_gate(gate, up), (gate, up)), _of_own_gate)


@jax.custom_vjp
def _own_vjp(x):
    return jnp.sin(x)


_own_vjp.defvjp(lambda x: (jnp.sin(x), (jnp.cos(x), x > 0)), lambda r, g: (g * r[0] * r[1],))


@jax.custom_jvp
def _own_jvp(x):
    return jnp.exp(x)


_own_jvp.defjvp(lambda p, t: (jnp.exp(p[0]), 2 * t[0] * jnp.cos(p[0])))


def _spd(x):
    return x.T @ x + 2 * jnp.eye(8)


def _solve(x, w):
    return jnp.linalg.solve(_spd(jnp.sin(x)), w)


def _nested(tree, flag, count):
    x = tree["x"] @ tree["deep"][1]
    return {"y": jnp.where(flag, jnp.sin(x), x) * count, "count": count + 1, "none": None}


def _dropout(key, x, w):
    kept = jax.random.bernoulli(key, 0.7, x.shape)
    return jnp.where(kept, jnp.tanh(x @ w) / 0.7, 0) @ w


def _complex(x, w):
    z = lax.complex(x @ w, jnp.sin(x))
    return jnp.abs(jnp.fft.fft(z * jnp.exp(1j * z)))


def _branches(x, w):
    branches = [lambda h: jnp.sin(h @ w), lambda h: h * h, lambda h: jnp.exp(-h)]
    return lax.switch(jnp.int32(x.shape[0] // 4), branches, jnp.cos(x))


def _pooled(x, kernel):
    h = jnp.sin(_conv(x, kernel))
    return lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _averaged(x, kernel):
    h = _conv(x, kernel) ** 2
    return lax.reduce_window(h, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")


IMAGE, KERNEL, OTHER = (
    normal((8, 6, 6, 3)),
    normal((3, 3, 3, 4), seed=1) / 5,
    normal((3, 3, 4, 4), seed=2) / 6,
)
ROW = normal((1, 8), seed=7)

OTHERS = {
    "add": (lambda x, y, w: (jnp.sin(x) + jnp.cos(y)) @ w, (X, Y, W)),
    "sub": (lambda x, y, w: (jnp.sin(x) - jnp.cos(y)) @ w, (X, Y, W)),
    "mul": (lambda x, y, w: (jnp.sin(x) * jnp.cos(y)) @ w, (X, Y, W)),
    "div": (lambda x, y, w: (jnp.sin(x) / (2 + jnp.cos(y @ w))) @ w, (X, Y, W)),
    "max": (lambda x, y, w: jnp.maximum(x @ w, y @ w) @ w, (X, Y, W)),
    "min": (lambda x, y, w: jnp.minimum(jnp.sin(x @ w), 0.3) @ w, (X, Y, W)),
    "pow": (lambda x, y, w: jnp.power(2 + jnp.sin(x), jnp.cos(y)) @ w, (X, Y, W)),
    "atan2": (lambda x, y, w: jnp.arctan2(x @ w, 3 + jnp.sin(y)), (X, Y, W)),
    "rem": (lambda x, y: lax.rem(jnp.exp(x), 2 + jnp.sin(y)) * y, (X, Y)),
    "clamp": (lambda x, w: jnp.clip(x @ w, -0.5, 0.5) @ w, (X, W)),
    "cube": (lambda x, w: ((x @ w) * (x @ w) * (x @ w)) @ w, (X, W)),
    "integer_pow": (lambda x, w: ((x @ w) ** 3) @ w, (X, W)),
    "twice": (lambda x, y: jnp.sin(x) * (jnp.sin(x) ** 2 / 2 + y), (X, Y)),
    "reshape": (lambda x, w: jnp.sin(x @ w).reshape(2, 16) * 3, (X, W)),
    "transpose": (lambda x, w: jnp.sin(x @ w).T @ x, (X, W)),
    "rev": (lambda x, w: jnp.sin(x @ w)[:, ::-1] @ w, (X, W)),
    "concatenate": (lambda x, w: jnp.concatenate([x @ w, jnp.sin(x)]) @ w, (X, W)),
    "pad": (lambda x, w: jnp.pad(jnp.sin(x @ w), ((1, 0), (0, 0))) @ w, (X, W)),
    "slice": (lambda x, w: jnp.sin(x @ w)[1:3] @ w, (X, W)),
    "split": (lambda x, w: jnp.prod(jnp.stack(jnp.split(jnp.sin(x @ w), 2, -1)), 0), (X, W)),
    "broadcast": (lambda r, x, w: (jnp.broadcast_to(jnp.sin(r), x.shape) * x) @ w, (ROW, X, W)),
    "squeeze": (lambda r, w: jnp.sin(r @ w)[0] * 2, (ROW, W)),
    "dynamic_slice": (lambda i, x, w: lax.dynamic_slice_in_dim(x @ w, i, 2) @ w, (1, X, W)),
    "dynamic_update": (
        lambda i, x, w: lax.dynamic_update_slice_in_dim(jnp.sin(x), (x @ w)[:2], i, 0) @ w,
        (1, X, W),
    ),
    "gather": (lambda i, x, w: jnp.sin(x @ w)[i] @ w, (INDEX, X, W)),
    "scatter_add": (lambda i, x, w: jnp.sin(x).at[i].add(jnp.cos(x @ w)[0]) @ w, (INDEX, X, W)),
    "scatter_mul": (lambda x, w: jnp.sin(x).at[1].multiply(jnp.cos(x @ w)[0]) @ w, (X, W)),
    "sort": (lambda x, w: jnp.sort(x @ w) @ w, (X, W)),
    "top_k": (lambda x, w: lax.top_k(jnp.sin(x @ w), 3)[0], (X, W)),
    "cumsum": (lambda x, w: jnp.cumsum(jnp.sin(x @ w), 0) @ w, (X, W)),
    "cumprod": (lambda x, w: jnp.cumprod(jnp.sin(x @ w), 0) @ w, (X, W)),
    "cummax": (lambda x, w: lax.cummax(x @ w) @ w, (X, W)),
    "cumlogsumexp": (lambda x, w: lax.cumlogsumexp(x @ w) @ w, (X, W)),
    "reduce_sum": (lambda x, w: jnp.sin(x @ w).sum(0), (X, W)),
    "reduce_max": (lambda x, w: jnp.sin(x @ w).max(-1), (X, W)),
    "reduce_prod": (lambda x, w: jnp.sin(x @ w).prod(-1), (X, W)),
    "logsumexp": (lambda x, w: jax.nn.logsumexp(x @ w, -1), (X, W)),
    "softmax": (lambda x, w: jax.nn.softmax(x @ w) @ w, (X, W)),
    "log_softmax": (lambda x, w: jax.nn.log_softmax(x @ w) @ w, (X, W)),
    "relu": (lambda x, w: jax.nn.relu(x @ w) @ w, (X, W)),
    "leaky_relu_alone": (lambda x, w: jax.nn.leaky_relu(x), (X, W)),
    "leaky_relu": (lambda x, w: jax.nn.leaky_relu(x @ w) @ w, (X, W)),
    "gelu": (lambda x, w: jax.nn.gelu(x @ w) @ w, (X, W)),
    "exact_gelu": (lambda x, w: jax.nn.gelu(x @ w, approximate=False) @ w, (X, W)),
    "softplus": (lambda x, w: jax.nn.softplus(x @ w) @ w, (X, W)),
    "swiglu": (_swiglu, (X, W, V)),
    "where": (lambda x, w: jnp.where(x > 0, jnp.sin(x @ w), x @ w) @ w, (X, W)),
    "layer_norm": (lambda x, s, b, w: _layer_norm(x @ w, s, b) @ w, (X, ROW, ROW, W)),
    "conv_net": (_conv_net, (IMAGE, KERNEL, OTHER)),
    "max_pool": (_pooled, (IMAGE, KERNEL)),
    "avg_pool": (_averaged, (IMAGE, KERNEL)),
    "einsum": (lambda x, w: jnp.einsum("bi,ij,bj->b", x, jnp.sin(w), jnp.cos(x)), (X, W)),
    "attention": (_attention, (X, W)),
    "linear_attention": (_linear_attention, (X, W)),
    "cholesky": (lambda x: jnp.linalg.cholesky(_spd(jnp.sin(x))), (X,)),
    "solve": (_solve, (X, W)),
    "triangular_solve": (lambda x, w: lax.linalg.triangular_solve(_spd(x), jnp.sin(w)), (X, W)),
    "qr": (lambda x: jnp.linalg.qr(_spd(jnp.sin(x)))[1], (X,)),
    "eigh": (lambda x: jnp.linalg.eigvalsh(_spd(jnp.sin(x))), (X,)),
    "svd": (lambda x: jnp.linalg.svd(jnp.sin(x), compute_uv=False), (X,)),
    "slogdet": (lambda x: jnp.linalg.slogdet(_spd(jnp.sin(x)))[1], (X,)),
    "complex_fft": (_complex, (X, W)),
    "rfft": (lambda x, w: jnp.abs(jnp.fft.rfft(jnp.sin(x @ w))), (X, W)),
    "complex_input": (lambda z, w: jnp.abs(jnp.sin(z) @ w), (lax.complex(X, Y), W)),
    "scan": (_recurrence, (X, W)),
    "fori_loop": (lambda x, w: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w), x) @ w, (X, W)),
    "map": (lambda x, w: lax.map(lambda r: jnp.sin(w @ r), jnp.cos(x)), (X, W)),
    "cond": (lambda x, w: lax.cond(x.sum() > 0, jnp.sin, lambda h: h * h, x @ w) @ w, (X, W)),
    "switch": (_branches, (X, W)),
    "jit": (lambda x, w: jax.jit(lambda h: jnp.sin(h) @ w)(x @ w), (X, W)),
    "vmap": (lambda x, w: jax.vmap(lambda r: jnp.sin(w @ r) * r)(jnp.cos(x)), (X, W)),
    "remat": (lambda x, w: jax.checkpoint(lambda h: jnp.sin(jnp.sin(h) @ w))(x @ w), (X, W)),
    "custom_vjp": (lambda x, w: _own_vjp(x @ w) @ w, (X, W)),
    "custom_vjp of a gate": (lambda x, w: _own_gate(x @ w, x) @ w, (X, W)),
    "custom_jvp": (lambda x, w: _own_jvp(jnp.sin(x @ w)) @ w, (X, W)),
    "inner_grad": (lambda x, w: jax.grad(lambda h: jnp.sin(h @ w).sum())(jnp.cos(x)), (X, W)),
    "stop_gradient": (lambda x, w: jnp.sin(x @ w) * lax.stop_gradient(jnp.cos(x @ w)), (X, W)),
    "barrier": (lambda x, w: lax.optimization_barrier(jnp.sin(x @ w)) @ w, (X, W)),
    "dropout": (_dropout, (jax.random.key(3), X, W)),
    "bfloat16": (lambda x, w: jnp.sin(x.astype(jnp.bfloat16).astype(jnp.float32) @ w), (X, W)),
    "reduce_precision": (lambda x, w: jnp.sin(lax.reduce_precision(x @ w, 8, 10)) @ w, (X, W)),
    "pytrees": (_nested, ({"x": X, "deep": [None, W], "empty": ()}, True, 3)),
    "flags": (lambda m, i, x, w: jnp.sin(x @ w) * m + x[i], (X > 0, jnp.array([3, 1, 0, 2]), X, W)),
    "constant_result": (lambda x, w: (jnp.sin(x @ w), jnp.ones(3), jnp.arange(4)), (X, W)),
    "unused": (lambda x, y, w: jnp.sin(x @ w), (X, Y, W)),
    "identity": (lambda x: x, (X,)),
    "scalar": (lambda a, x: jnp.sin(a * x).sum() * a, (jnp.float32(1.5), X)),
    "closure": (functools.partial(lambda w, x: jnp.sin(x @ w) @ w, np.asarray(W)), (X,)),
}

LIBRARY = UNARY | OTHERS
