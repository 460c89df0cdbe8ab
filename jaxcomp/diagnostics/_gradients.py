"""`check_gradients`: how far a compressed gradient is from the exact one, on a user's own model."""

import dataclasses
import html
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx import filterlib

from jaxcomp.diagnostics._clipping import clipped_during
from jaxcomp.diagnostics._errors import Errors, errors_of
from jaxcomp.diagnostics._losses import (
    Loss,
    check_data,
    exactly,
    largest_rounding,
    moved,
    of_parameters,
    parameters_of,
    sgd_variance,
    vector,
)
from jaxcomp.transform._program.without_codes import has_codes, saves_codes

_SIGNIFICANCE = 0.05
_NO_PARTS = "; parts=None measures no noise of SGD, such as for a batch that is one graph"
_LOST, _NEAR = 0.1, 0.5  # noise in units of SGD's: lost in it, and of its size


@dataclasses.dataclass(frozen=True, repr=False)
class GradientReport:
    """What `check_gradients` found; prints as a table.

    Attributes:
        coded: Of the model as it is.
        control: Of the same model with nothing coded, at parameters that move by the rounding error
            of its narrowest dtype: what rounding alone does.
        sgd_noise: Standard deviation of the exact gradient over batches of this size, as a part of
            its norm; NaN if it was not measured.
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
        """Noise of the coded gradient over that of SGD itself.

        It is infinite if that has none, and NaN if it was not measured.
        """
        return self._over_sgd(self.coded)

    @property
    def verdict(self) -> str:
        """The report in a sentence."""
        rounding = 2 * max(self.control.noise, self.control.bias)
        if self.coded.noise <= rounding and self.coded.bias <= rounding:
            return "the gradient is the exact one, to rounding"
        low, ratio, biased = self.coded.bias_interval[0], self.noise_over_sgd, self.biased
        is_biased = low > rounding
        bias = "biased" if is_biased or biased else "no bias was found"
        if is_biased:
            bias += f" by {low:.1%} of the gradient or more"
        if biased:
            bias += f" ({len(biased)} of {len(self.parameters)} parameters, first {biased[0]})"
        if np.isnan(ratio):
            return f"{bias}; the noise is {self.coded.noise:.1%} of the gradient"
        if np.isinf(ratio):
            return f"{bias}; SGD has no noise, as all examples are alike: give real data"
        noise = f"the noise is {ratio:.2f} of SGD's"
        if ratio < _LOST:
            return f"{bias}; {noise} and lost in it"
        return f"{bias}; {noise}" + (": use more bits" if ratio > _NEAR else "")

    def _over_sgd(self, errors: Errors) -> float:
        return errors.noise / self.sgd_noise if self.sgd_noise else float("inf")

    def __repr__(self) -> str:
        """Returns one line."""
        return f"GradientReport({self.verdict}; {self.draws} draws)"

    def _repr_html_(self) -> str:
        """Returns what notebooks show."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        """Returns the figures, the verdict, and the five parameters that contribute most."""
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
    model: Any,
    batch: Any,
    draws: int = 16,
    parts: int | None = 4,
    *,
    has_aux: bool = False,
    wrt: filterlib.Filter = nnx.Param,
) -> GradientReport:
    """Measures bias and noise of a compressed model's gradient on a batch.

    The rounding noise is a hash of values and parameters. It is drawn anew by moving every
    parameter by about one unit in its last place. The control, which codes nothing, shows what
    rounding does by itself. Its parameters move by the rounding error of the narrowest dtype, such
    as bfloat16: a bias that is not larger is not told of.
    SGD's own noise is estimated from the exact gradients of parts of the batch.

    Args:
        loss: `loss(model, batch)` returns a floating-point scalar. It, or the model, compresses
            what it saves: `compress` made the model, its `jaxcomp.nn` modules have codecs, or
            `checkpoint` is called somewhere.
        model: A Flax NNX module, which is not changed, or a pytree of parameters, such as those of
            a Linen module or the arrays of an Equinox module.
        batch: Any pytree of arrays, axis 0 the examples; with `parts=None` of any shapes, such as
            those of a graph.
        draws: How many gradients are drawn; each is kept, so it takes this many times the
            parameters' memory.
        parts: Into how many parts the batch is split for SGD's noise. A batch norm normalises each
            by its own statistics. None measures no noise of SGD.
        has_aux: Whether `loss` returns a pair of the scalar and something else, as for `jax.grad`.
        wrt: Selects the variables of a module that the gradient is taken by, as in `nnx.grad`,
            such as `nnx.LoRAParam`.

    Returns:
        The report.

    Warns:
        UserWarning: If more than 1e-4 of a layer's values are clipped, as for
            `diagnostics.clipped`.

    Raises:
        TypeError: If an argument has another type, or `loss` returns no floating-point scalar.
        ValueError: If there are fewer than 3 draws or 2 parts, the batch does not divide into the
            parts, the model has no variables `wrt`, nothing is compressed or coded, there are codes
            in a `while` loop or in `jax.shard_map`, there are no float32 parameters, or the exact
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
    _check(draws, parts)
    check_data(loss, batch, parts, _NO_PARTS)
    params = parameters_of(model, wrt)
    of = of_parameters(loss, model, has_aux, wrt)
    coded, exact = jax.jit(jax.grad(of)), jax.jit(jax.grad(exactly(of)))
    if not has_codes(jax.make_jaxpr(of)(params, batch)):
        raise ValueError(
            f"model={type(model).__name__}: nothing is compressed; expected a model of "
            "jaxcomp.compress, layers with codecs, or a loss that calls jaxcomp.checkpoint"
        )
    if not saves_codes(jax.make_jaxpr(jax.grad(of))(params, batch)):
        raise ValueError(
            f"loss, model={type(model).__name__}: nothing is coded, since the policy keeps every "
            "value exactly; expected values that are large enough for it where they are computed, "
            "which those of one example under jax.vmap may not be"
        )
    if not any(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params)):
        raise ValueError("model: expected float32 parameters")
    gradient = vector(exact(params, batch))
    if not 0 < np.linalg.norm(gradient) < np.inf:
        raise ValueError(f"loss: its exact gradient has the norm {np.linalg.norm(gradient)}")
    drawn = [moved(params, draw) for draw in range(draws)]
    errors = np.stack([vector(coded(p, batch)) - gradient for p in drawn])
    rounding = largest_rounding(jax.make_jaxpr(jax.grad(exactly(of)))(params, batch))
    shaken = [moved(params, draw, rounding) for draw in range(draws)]
    control = np.stack([vector(exact(p, batch)) - gradient for p in shaken])
    norm = float(np.linalg.norm(gradient))
    shares = clipped_during(loss, model, batch) if isinstance(model, nnx.Module) else {}
    variance = np.nan if parts is None else sgd_variance(exact, params, batch, parts)
    return GradientReport(
        errors_of(errors, control, norm),
        errors_of(control, control, norm),
        float(np.sqrt(variance)) / norm,
        draws,
        _shares(params, np.var(errors, axis=0, ddof=1)),
        tuple(
            (
                name,
                errors_of(errors[:, part], control[:, part], float(np.linalg.norm(gradient[part]))),
            )
            for name, part in _parts(params)
            if gradient[part].any()
        ),
        tuple(sorted(shares.items(), key=lambda item: -item[1])),
    )


def _check(draws: Any, parts: Any) -> None:
    for name, number in (("draws", draws), ("parts", parts)):
        if not isinstance(number, int) and (name == "draws" or number is not None):
            raise TypeError(f"{name}={number!r}: expected an integer")
    if draws < 3 or (parts is not None and parts < 2):
        raise ValueError(f"draws={draws}, parts={parts}: expected at least 3 and 2")


def _shares(params: Any, variance: np.ndarray) -> tuple[tuple[str, float], ...]:
    total = max(float(variance.sum()), np.finfo(float).tiny)
    shares = [(name, float(variance[part].sum()) / total) for name, part in _parts(params)]
    return tuple(sorted(shares, key=lambda item: -item[1]))


def _parts(params: Any) -> list[tuple[str, slice]]:
    """Returns parameters by name, and where they are in a vector of all."""
    leaves = jax.tree.leaves_with_path(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    ends = np.cumsum([leaf.size for _, leaf in leaves])
    return [
        (
            jax.tree_util.keystr(path, simple=True, separator="/"),
            slice(int(end) - leaf.size, int(end)),
        )
        for (path, leaf), end in zip(leaves, ends, strict=True)
    ]
