"""`check_gradients`: how far a compressed gradient is from the exact one, on a user's own model."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxcomp._core.explicit import explicit_axes
from jaxcomp._core.modules import split_model
from jaxcomp.diagnostics._clipping import clipped_during
from jaxcomp.diagnostics._exact import encodes, exact_copy
from jaxcomp.nn._coded import coded_modules

Loss = Callable[[Any, Any], Any]  # of a model and a batch
Z = 1.96  # of a confidence interval of 95%
_SIGNIFICANCE = 0.05
_ROUNDING = 10  # a mean error is of the codes if it is so much larger than without them
_MOST_SIGNS = 14  # of draws, as a power of two
_LOST, _NEAR = 0.1, 0.5  # noise in units of SGD's: lost in it, and of its size


@dataclasses.dataclass(frozen=True)
class Errors:
    """Of gradients that were drawn several times, against the exact one, as parts of its norm.

    Attributes:
        bias: Norm of the mean error that is no noise; an estimate without the floor, 0 if below it.
        bias_interval: Its 95% confidence interval, by the jackknife.
        floor: Norm of the mean error that the noise alone would leave after so many draws.
        noise: Standard deviation of one gradient.
        p_value: How often random signs of the drawn errors give a mean as large as theirs; 1 if
            their mean is less than ten times that of rounding alone.
    """

    bias: float
    bias_interval: tuple[float, float]
    floor: float
    noise: float
    p_value: float


@dataclasses.dataclass(frozen=True)
class GradientReport:
    """What `check_gradients` found; prints as a table.

    Attributes:
        coded: Of the model as it is.
        control: Of the same model with nothing coded: what rounding alone does.
        sgd_noise: Standard deviation of the exact gradient over batches of this size, as a part of
            its norm.
        draws: How many gradients were drawn.
        layers: Parameters and their parts of the variance of the coded gradient, largest first.
        parameters: Of each parameter's coded gradient by itself, as parts of the norm of its own
            exact one. Those whose exact gradient is zero are left out.
        clipped: Fraction of clipped values of each layer, as `diagnostics.clipped` returns it,
            largest first; empty if no layer has a `SignAware` codec.
    """

    coded: Errors
    control: Errors
    sgd_noise: float
    draws: int
    layers: tuple[tuple[str, float], ...]
    parameters: tuple[tuple[str, Errors], ...]
    clipped: tuple[tuple[str, float], ...] = ()

    @property
    def biased(self) -> tuple[str, ...]:
        """Parameters with a bias, the most significant first.

        The probability of naming any parameter without a bias is at most 5% (Holm's correction for
        as many tests as there are parameters). 15 draws or more can name one of 800 parameters. If
        there are more parameters, `bias_interval` of the whole gradient alone tells of a bias.
        """
        ordered = sorted(self.parameters, key=lambda item: item[1].p_value)
        names = []
        for rank, (name, errors) in enumerate(ordered):
            if errors.p_value > _SIGNIFICANCE / (len(ordered) - rank):
                break
            names.append(name)
        return tuple(names)

    @property
    def noise_over_sgd(self) -> float:
        """Noise of the coded gradient over that of SGD itself; infinite if that has none."""
        return self._over_sgd(self.coded)

    @property
    def verdict(self) -> str:
        """The report in a sentence."""
        if self.coded.noise <= 2 * self.control.noise and self.coded.bias <= 2 * self.control.bias:
            return "nothing was encoded: the gradient is the exact one"
        low, ratio, biased = self.coded.bias_interval[0], self.noise_over_sgd, self.biased
        bias = "biased" if low > 0 or biased else "no bias was found"
        if low > 0:
            bias += f" by {low:.1%} of the gradient or more"
        if biased:
            bias += f" ({len(biased)} of {len(self.parameters)} parameters, first {biased[0]})"
        noise = f"the noise is {ratio:.2f} of SGD's"
        if ratio < _LOST:
            return f"{bias}; {noise} and lost in it"
        return f"{bias}; {noise}" + (": use more bits" if ratio > _NEAR else "")

    def _over_sgd(self, errors: Errors) -> float:
        return errors.noise / self.sgd_noise if self.sgd_noise else float("inf")

    def __str__(self) -> str:
        """The figures, the verdict, and the five parameters that contribute most."""
        lines = [f"{'':<12}{'bias':>10}{'95% interval':>22}{'floor':>10}{'noise':>10}{'/ SGD':>10}"]
        for name, errors in (("coded", self.coded), ("Exact()", self.control)):
            low, high = errors.bias_interval
            lines.append(
                f"{name:<12}{errors.bias:>10.2e}{f'{low:.2e} .. {high:.2e}':>22}"
                f"{errors.floor:>10.2e}{errors.noise:>10.2e}{self._over_sgd(errors):>10.3f}"
            )
        lines.append(f"(parts of the exact gradient's norm; {self.draws} draws)")
        lines.append(self.verdict)
        lines += [f"{share:>6.1%} of the variance: {name}" for name, share in self.layers[:5]]
        return "\n".join(lines)


def check_gradients(
    loss: Loss,
    model: nnx.Module,
    batch: Any,
    draws: int = 16,
    parts: int = 4,
    *,
    has_aux: bool = False,
) -> GradientReport:
    """Measures bias and noise of a compressed model's gradient on a batch.

    The rounding noise is a hash of values and parameters. It is drawn anew by moving every
    parameter by about one unit in its last place; the control shows how little that does by itself.
    SGD's own noise is estimated from the exact gradients of parts of the batch.

    Args:
        loss: `loss(model, batch)` returns a floating-point scalar.
        model: A model whose `jaxcomp.nn` modules have codecs, of which `compress` made one that
            codes, or whose blocks' inputs are coded; it is not changed.
        batch: Any pytree of arrays, axis 0 the examples.
        draws: How many gradients are drawn; each is kept, so it takes this many times the
            parameters' memory.
        parts: Into how many parts the batch is split for SGD's noise. A batch norm normalises each
            by its own statistics.
        has_aux: Whether `loss` returns a pair of the scalar and something else, as for `jax.grad`.

    Returns:
        The report.

    Warns:
        UserWarning: If more than 1e-4 of a layer's values are clipped, as for
            `diagnostics.clipped`.

    Raises:
        TypeError: If an argument has another type, or `loss` returns no floating-point scalar.
        ValueError: If there are fewer than 3 draws or 2 parts, the batch does not divide into the
            parts, nothing of the model is compressed, it has no float32 parameters, or its exact
            gradient is zero or not finite.

    Example:
        >>> from jaxcomp import Quantize
        >>> from jaxcomp.nn import Linear
        >>> model = Linear(8, 4, codec=Quantize(bits=2), rngs=nnx.Rngs(0))
        >>> x = jax.random.normal(jax.random.key(0), (16, 8))
        >>> report = check_gradients(lambda model, x: (model(x) ** 2).mean(), model, x)
        >>> report.coded.bias_interval[0] == 0.0 and report.coded.noise > 100 * report.control.noise
        True
    """
    _check(loss, model, batch, draws, parts)
    coded, exact = (gradient_of(loss, m, has_aux) for m in (model, exact_copy(model)))
    params = nnx.state(model, nnx.Param)
    if not any(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params)):
        raise ValueError("model: expected float32 parameters")
    gradient = vector(exact(params, batch))
    if not 0 < np.linalg.norm(gradient) < np.inf:
        raise ValueError(f"loss: its exact gradient has the norm {np.linalg.norm(gradient)}")
    drawn = [moved(params, draw) for draw in range(draws)]
    errors = np.stack([vector(coded(p, batch)) - gradient for p in drawn])
    control = np.stack([vector(exact(p, batch)) - gradient for p in drawn])
    norm = float(np.linalg.norm(gradient))
    shares = clipped_during(loss, model, batch)
    sgd_noise = np.sqrt(sgd_variance(exact, params, batch, parts)) / norm
    return GradientReport(
        _errors(errors, control, norm),
        _errors(control, control, norm),
        float(sgd_noise),
        draws,
        _shares(params, np.var(errors, axis=0, ddof=1)),
        tuple(
            (
                name,
                _errors(errors[:, part], control[:, part], float(np.linalg.norm(gradient[part]))),
            )
            for name, part in _parts(params)
            if gradient[part].any()
        ),
        tuple(sorted(shares.items(), key=lambda item: -item[1])),
    )


def _check(loss: Any, model: Any, batch: Any, draws: Any, parts: Any) -> None:
    for name, number in (("draws", draws), ("parts", parts)):
        if not isinstance(number, int):
            raise TypeError(f"{name}={number!r}: expected an integer")
    if draws < 3 or parts < 2:
        raise ValueError(f"draws={draws}, parts={parts}: expected at least 3 and 2")
    check_data(loss, model, batch, parts)
    layers = coded_modules(model).values()
    is_coded = any(layer.codec is not None for layer in layers)
    if not is_coded and not any(encodes(module) for _, module in nnx.iter_modules(model)):
        raise ValueError(
            f"model={type(model).__name__}: nothing is compressed; expected what jaxcomp.compress "
            "returned, or a model whose layers have codecs"
        )


def check_data(loss: Any, model: Any, batch: Any, parts: int) -> None:
    """Checks what a gradient is measured on.

    Raises:
        TypeError: If one of them has another type.
        ValueError: If the batch does not divide into so many parts.
    """
    if not callable(loss):
        raise TypeError(f"loss={loss!r}: expected a function of a model and a batch")
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model of type {type(model).__name__}: expected a Flax NNX module")
    leaves = jax.tree.leaves(batch)
    if not all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
        raise TypeError(f"batch: expected a pytree of arrays; it has {kinds}")
    sizes = {leaf.shape[:1] for leaf in leaves}
    if len(sizes) != 1 or () in sizes or sizes.pop()[0] % parts:
        raise ValueError(f"batch: expected arrays whose axis 0 is the same multiple of {parts}")


def gradient_of(loss: Loss, model: nnx.Module, has_aux: bool = False) -> Callable[[Any, Any], Any]:
    """The gradient of a loss, compiled, as a function of the parameters and the batch."""
    graphdef, _, rest = split_model(model)

    def of(params: Any, batch: Any) -> jax.Array:
        found = loss(nnx.merge(graphdef, params, rest, copy=True), batch)
        if has_aux and not (isinstance(found, tuple) and len(found) == 2):
            raise TypeError(f"loss returned a {type(found).__name__}: expected a pair (has_aux)")
        value = found[0] if has_aux else found
        is_scalar = getattr(value, "shape", None) == ()
        if not is_scalar or not jnp.issubdtype(value.dtype, jnp.floating):
            kind = jax.typeof(value) if isinstance(value, jax.Array) else type(value).__name__
            raise TypeError(
                f"loss returned {kind}: expected a floating-point scalar, or with has_aux=True a "
                "pair of it and something else"
            )
        return value

    return jax.jit(jax.grad(of))


def sgd_variance(exact: Callable[[Any, Any], Any], params: Any, batch: Any, parts: int) -> float:
    """The variance of the gradient over batches of this size, from parts of one."""
    each = [vector(exact(params, _part(batch, i, parts))) for i in range(parts)]
    return float(np.var(each, axis=0, ddof=1).sum() / parts)


def _part(batch: Any, number: int, parts: int) -> Any:
    """One of equal parts of a batch, sharded as the batch."""

    def cut(x: Any) -> Any:
        size = x.shape[0] // parts
        piece = np.asarray(x)[number * size : (number + 1) * size]
        # Over explicit axes the type of the batch carries its sharding.
        return jax.device_put(piece, x.sharding) if explicit_axes() else piece

    return jax.tree.map(cut, batch)


def moved(params: Any, draw: int) -> Any:
    """The parameters, float32 ones moved by about a unit in the last place, up or down."""
    rng = np.random.default_rng(draw)

    def move(leaf: jax.Array) -> jax.Array:
        if leaf.dtype != jnp.float32:
            return leaf
        up = rng.integers(0, 2, leaf.shape).astype(bool)
        return jnp.nextafter(leaf, jnp.where(up, jnp.inf, -jnp.inf).astype(jnp.float32))

    return jax.tree.map(move, params)


def vector(gradient: Any) -> np.ndarray:
    """All values of a pytree, in float64."""
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(gradient)]
    return np.concatenate(leaves)


def _errors(errors: np.ndarray, control: np.ndarray, norm: float) -> Errors:
    """Bias by the products of different draws, whose noise is zero on average."""
    draws = len(errors)
    products = errors @ errors.T
    own = np.diag(products)

    def squared_bias(total: float, own: float, draws: int) -> float:
        return (total - own) / (draws * (draws - 1))

    total = products.sum()
    square = squared_bias(total, own.sum(), draws)
    left_out = [
        squared_bias(total - 2 * products[i].sum() + own[i], own.sum() - own[i], draws - 1)
        for i in range(draws)
    ]
    deviation = np.sqrt((draws - 1) * np.var(left_out))
    variance = np.var(errors, axis=0, ddof=1).sum()

    mean, of_rounding = (np.linalg.norm(rows.mean(0)) for rows in (errors, control))
    more_than_rounding = mean > _ROUNDING * of_rounding

    def part(square: float) -> float:
        return float(np.sqrt(max(0.0, square)) / norm)

    return Errors(
        bias=part(square),
        bias_interval=(part(square - Z * deviation), part(square + Z * deviation)),
        floor=part(variance / draws),
        noise=part(variance),
        p_value=_p_value(products) if more_than_rounding else 1.0,
    )


def _p_value(products: np.ndarray) -> float:
    """How often random signs of vectors give a sum as long as theirs.

    Args:
        products: The products of each vector with each.
    """
    draws = len(products)
    if draws - 1 <= _MOST_SIGNS:  # all combinations: the first sign does not matter
        numbers = np.arange(2 ** (draws - 1))
        signs = 1 - 2 * (numbers[:, None] >> np.arange(draws) & 1)
    else:
        signs = np.random.default_rng(0).choice([-1, 1], (2**_MOST_SIGNS, draws))
        signs[0] = 1
    squares = ((signs @ products) * signs).sum(1)
    return float(np.mean(squares >= squares[0] * (1 - 1e-9)))


def _shares(params: Any, variance: np.ndarray) -> tuple[tuple[str, float], ...]:
    total = max(float(variance.sum()), np.finfo(float).tiny)
    shares = [(name, float(variance[part].sum()) / total) for name, part in _parts(params)]
    return tuple(sorted(shares, key=lambda item: -item[1]))


def _parts(params: Any) -> list[tuple[str, slice]]:
    """Parameters by name, and where they are in a vector of all."""
    leaves = jax.tree.leaves_with_path(params)
    ends = np.cumsum([leaf.size for _, leaf in leaves])
    return [
        (_name(path), slice(int(end) - leaf.size, int(end)))
        for (path, leaf), end in zip(leaves, ends, strict=True)
    ]


def _name(path: Any) -> str:
    keys = (getattr(key, "key", getattr(key, "name", None)) for key in path)
    return "/".join(str(key) for key in keys if key not in (None, "value"))
