"""Bits for each layer and for each rank of its samples, within one budget.

After ActNN (Chen et al., ICML 2021, arXiv:2104.14129, sections 4.1 and 4.2). Widths are static in
a compiled step, so they are chosen on the host, now and then, from a gradient that is taken for
its statistics alone.
"""

import dataclasses
import heapq
import re
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxcomp._core.module_scopes import with_module_scopes
from jaxcomp.codecs import Codec, Encoded, Exact, PerSample, Quantize
from jaxcomp.codecs._codec import Seed
from jaxcomp.codecs._offload import inner_codec, placed_like
from jaxcomp.codecs._per_sample import WIDTHS
from jaxcomp.diagnostics._losses import moved, vector
from jaxcomp.nn import Sink
from jaxcomp.nn._coded import coded_modules, covered
from jaxcomp.ops._sensitivity import COLUMNS
from jaxcomp.policies._policy import Policy
from jaxcomp.policies._rule import Rule
from jaxcomp.transform._layer_codecs import LayerCodecs

Loss = Callable[[Any, Any], jax.Array]  # of a model and a batch


_PROBED = 2  # bits of what is measured
_DRAWS = 3  # of the noise that a norm's code passes on


class _Probe(Codec):
    """Stores exactly, with the noise of 2 bits in the samples that have importance."""

    name = "probe"
    unbiased = True

    def encode(self, x: Array, seed: Seed = None, importance: Array | None = None) -> Encoded:
        quantize = Quantize(_PROBED)
        noisy = quantize.decode(quantize.encode(x, seed))
        assert importance is not None  # its modules have sinks
        on = jnp.expand_dims(importance > 0, tuple(range(1, x.ndim)))
        return Encoded((jnp.where(on, noisy, x),), x.shape, x.dtype, self)

    def _encode(self, x: Array, seed: Seed) -> tuple[Array, ...]:
        return (x,)

    def _decode(self, arrays: tuple[Array, ...], shape: tuple[int, ...], dtype: Any) -> Array:
        return arrays[0]


def sensitivities(
    loss: Loss, model: nnx.Module, batch: Any
) -> dict[str, Float[np.ndarray, "batch columns"]]:
    """Returns the noise that the code of each sample adds, for each layer with `Quantize`.

    For convolutions and linear layers it is computed in one backward pass (`ops.Sink`). A norm's
    code reaches the gradients of all layers before it, too, and that outweighs its own: the sum is
    measured, by gradients in which only that norm has the noise of a code.

    Args:
        loss: From a model and a batch to a scalar, in training.
        model: A model of `jaxcomp.nn` layers; it is not changed.
        batch: Any pytree of arrays, axis 0 the examples, as it is in every layer. It is stored
            exactly, so where the plain step does not fit, take a part of a batch.

    Returns:
        By path, in each sample's row, what `ops.Sink` says, of the gradient of all parameters.

    Raises:
        ValueError: If the model has no such layer, or the arrays of `batch` differ in axis 0.

    Example:
        >>> from jaxcomp.nn import Linear
        >>> model = nnx.Sequential(Linear(4, 2, codec=Quantize(2), rngs=nnx.Rngs(0)))
        >>> found = sensitivities(lambda m, x: m(x).sum(), model, jnp.ones((8, 4)))
        >>> found["layers/0"].shape
        (8, 6)
    """
    sizes = {leaf.shape[:1] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(f"batch: expected arrays of one size of axis 0; it has {sorted(sizes)}")
    ((size,),) = sizes
    layers = _planned(model)
    probed = nnx.clone(model)
    modules = coded_modules(probed)
    for layer in modules.values():
        layer.codec = None
    for path in layers:
        modules[path].codec = _Probe()

    def split(noisy: str | None) -> tuple[Any, ...]:
        """Returns the model with noise in one layer, or in none."""
        for path in layers:
            modules[path].sink = Sink(jnp.full((size, COLUMNS), float(path == noisy)))
        return nnx.split(probed, nnx.Param, Sink, ...)

    graphdef, params, no_noise, rest = split(None)

    @jax.jit
    def gradient(params: Any, sinks: Any, rest: Any, batch: Any) -> Any:
        def of(params: Any, sinks: Any) -> jax.Array:
            return loss(nnx.merge(graphdef, params, sinks, rest, copy=True), batch)

        return jax.grad(of, (0, 1))(params, sinks)

    _, statistics = gradient(params, no_noise, rest, batch)
    filled = coded_modules(nnx.merge(graphdef, params, statistics, rest, copy=True))
    sinks = {path: cast(Sink, filled[path].sink) for path in layers}
    found = {path: np.array(sink[...], np.float64) for path, sink in sinks.items()}
    norms = [path for path in layers if modules[path].kind.endswith("norm")]
    drawn = [moved(params, draw) for draw in range(_DRAWS)] if norms else []
    exact = [vector(gradient(p, no_noise, rest, batch)[0]) for p in drawn]
    for path in norms:
        noise = split(path)[2]
        noisy = [vector(gradient(p, noise, rest, batch)[0]) for p in drawn]
        total = np.mean([np.square(a - b).sum() for a, b in zip(noisy, exact, strict=True)])
        own = found[path][:, 2 + WIDTHS.index(_PROBED)].sum()
        found[path][:, 2:] *= total / own if own else 1.0
    return found


def plan_bits(
    loss: Loss, model: nnx.Module, batch: Any, bits: int | float = 2, run: int = 8
) -> Policy:
    """Chooses widths so that the summed variance of the gradient is least, within a budget.

    Every rank of every layer starts with 8 bits; then, again and again, the one takes the next
    width of 4, 2 and 1 whose variance grows least for each bit that it saves, until the mean over
    all elements is the budget. Ranks are those of `PerSample`.

    Args:
        loss: From a model and a batch to a scalar, in training.
        model: A model in training with layers that store by `Quantize` or `PerSample`; it is not
            changed. A norm that uses running averages keeps the bits that it has.
        batch: Any pytree of arrays, axis 0 the examples, at least `run` of them.
        bits: Mean bits of a code, from 1 to 8; ranges come on top (`jaxcomp.plan` tells).
        run: Consecutive samples that are ranked, from 2 to 256; with 1 all have the same bits.

    Returns:
        A policy with a rule for each layer that has a codec: these layers get their widths, the
        others keep the codec that they have. `compress(uncompress(model), policy)` applies it.

    Raises:
        ValueError: If `bits` or `run` is out of its range, `batch` holds no whole run, the model
            has no such layer, or a statistic is not finite.

    Example:
        >>> from jaxcomp.nn import Linear
        >>> model = nnx.Sequential(Linear(4, 2, codec=Quantize(2), rngs=nnx.Rngs(0)))
        >>> x = jax.random.normal(jax.random.key(0), (8, 4))
        >>> policy = plan_bits(lambda m, x: m(x).sum(), model, x, bits=4)
        >>> policy.rules[0].action.bits  # one layer, whose samples are alike
        4
    """
    _check(bits, run)
    needs = Needs.measure(loss, model, batch, run)
    return _policy(model, needs.by_path(needs.allocate(bits)))


@dataclasses.dataclass(frozen=True)
class Needs:
    """What each rank of each layer's samples needs.

    Attributes:
        paths: The layers.
        needs: Variance that each rank would bring in, over all runs, with 1, 2, 4 and 8 bits.
        elements: How many elements each layer stores.
    """

    paths: tuple[str, ...]
    needs: Float[np.ndarray, "layers ranks widths"]
    elements: Int[np.ndarray, " layers"]

    @classmethod
    def measure(cls, loss: Loss, model: nnx.Module, batch: Any, run: int) -> "Needs":
        """Measures them on a batch; see `plan_bits`."""
        found = sensitivities(loss, model, batch)
        size = len(next(iter(found.values())))
        if size < run:
            raise ValueError(f"run={run}: the batch has {size} samples")
        called: dict[str, int] = {}
        graphdef, state = nnx.split(with_module_scopes(model, called))
        jax.eval_shape(lambda s, b: loss(nnx.merge(graphdef, s, copy=True), b), state, batch)
        found = {path: samples for path, samples in found.items() if called.get(path)}
        if not found:
            raise ValueError("loss: calls none of the model's layers that are to be planned")
        needs = []
        for path, samples in found.items():
            if not np.isfinite(samples).all():
                raise ValueError(f"loss: its gradient at {path} is not finite")
            runs = samples[: size - size % run].reshape(-1, run, COLUMNS)
            order = np.argsort(-runs[..., 0], axis=1, kind="stable")[..., None]
            ranked = np.take_along_axis(runs, order, axis=1)
            needs.append(ranked[..., 2:].sum(0))
        elements = np.array([called[path] for path in found])
        return cls(tuple(found), np.array(needs), elements)

    def allocate(self, bits: int | float) -> Int[np.ndarray, "layers ranks"]:
        """Returns the widths of 1, 2, 4 or 8 bits, not increasing along the ranks; see `plan_bits`.

        Example:
            >>> needs = np.array([[[900.0, 100, 4, 0], [9, 1, 0.04, 0]]])
            >>> Needs(("a",), needs, np.array([8])).allocate(bits=3).tolist()
            [[4, 2]]
        """
        # A rank gets no less than those after it.
        needs = np.flip(np.maximum.accumulate(np.flip(self.needs, 1), axis=1), 1)
        share = self.elements / needs.shape[1]
        widths = np.full(needs.shape[:2], WIDTHS[-1])

        def growth(layer: int, rank: int, width: int) -> tuple[float, int, int, int]:
            """Returns the growth of the variance for each bit saved, and the rank."""
            now = widths[layer, rank]
            saved = (now - width) * share[layer]
            more = needs[layer, rank, WIDTHS.index(width)] - needs[layer, rank, WIDTHS.index(now)]
            return more / saved, -rank, layer, width

        queue = [growth(layer, rank, WIDTHS[-2]) for layer, rank in np.ndindex(*widths.shape)]
        heapq.heapify(queue)
        total, budget = float(share @ widths.sum(1)), bits * float(self.elements.sum())
        while total > budget * (1 + 1e-9):
            _, rank, layer, width = heapq.heappop(queue)
            total -= (widths[layer, -rank] - width) * share[layer]
            widths[layer, -rank] = width
            if width > WIDTHS[0]:
                narrower = WIDTHS[WIDTHS.index(width) - 1]
                heapq.heappush(queue, growth(layer, -rank, narrower))
        return -np.sort(-widths, axis=1)

    def variance(self, widths: Int[np.ndarray, "layers ranks"]) -> float:
        """Returns the predicted variance of the parameters' gradient with these widths."""
        chosen = np.searchsorted(WIDTHS, widths)[..., None]
        return float(np.take_along_axis(self.needs, chosen, axis=-1).sum())

    def widths_of(self, model: nnx.Module) -> Int[np.ndarray, "layers ranks"]:
        """Returns the widths that a model has, in runs as long as those that were measured."""
        modules = coded_modules(model)
        codecs = [inner_codec(modules[path].codec or Exact()) for path in self.paths]
        widths = [cast(Quantize | PerSample, codec).bits for codec in codecs]
        return np.stack([np.broadcast_to(bits, self.needs.shape[1]) for bits in widths])

    def by_path(self, widths: Int[np.ndarray, "layers ranks"]) -> dict[str, list[int]]:
        """Returns each layer's widths under its path."""
        return dict(zip(self.paths, widths.tolist(), strict=True))


def _check(bits: int | float, run: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"bits={bits}: expected a mean of 1 to 8")
    if not isinstance(run, int) or not 1 <= run <= 256:
        raise ValueError(f"run={run}: expected an integer from 1 to 256")


def _policy(model: nnx.Module, widths: dict[str, list[int]]) -> Policy:
    """Returns the codecs of a model's layers, with these widths for those that have some."""
    modules = coded_modules(model)
    if missing := sorted(widths.keys() - modules.keys()):
        raise ValueError(f"model: has no layer {missing[0]}, which the plan is for")
    hidden = covered(modules)
    rules = []
    for path, module in modules.items():
        if path in hidden or (module.codec is None and path not in widths):
            continue
        codec = module.codec or Exact()
        if path in widths:
            ranks = widths[path]
            planned = Quantize(ranks[0]) if len(set(ranks)) == 1 else PerSample(tuple(ranks))
            codec = placed_like(codec, planned)
        rules.append(Rule(codec, op=module.kind, path=re.escape(path)))
    return Policy(tuple(rules))


def _planned(model: nnx.Module) -> list[str]:
    """Returns the paths of the layers that have a sink and store by a codec of so many bits.

    A norm that uses running averages stores nothing.
    """
    modules = coded_modules(model)
    hidden = covered(modules)
    layers = [
        path
        for path, module in modules.items()
        if module.kind in PerSample.kinds
        and module.codec is not None
        and isinstance(inner_codec(module.codec), Quantize | PerSample)
        and path not in hidden
        and not getattr(module, "use_running_average", False)
        and (module.kind.endswith("norm") or isinstance(getattr(module, "kernel", None), nnx.Param))
    ]
    if not layers:
        raise ValueError("model: expected layers that store by Quantize or PerSample")
    return layers


class BitPlanner:
    """Plans a model's bits again every so many steps, on the host, between compiled steps.

    A model with other widths is another program. So a new plan is taken only if it lowers the
    predicted variance by a tenth, and at most `most` times.

    Args:
        loss: From a model and a batch to a scalar, in training.
        bits: Mean bits of a code, from 1 to 8.
        run: Consecutive samples that are ranked, from 1 to 256.
        every: Steps between two plans.
        most: How many plans may be taken, each of which makes the step be compiled again.

    Attributes:
        taken: The widths of each plan by path, by the step at which it was taken.

    Raises:
        ValueError: If `every` or `most` is not positive, or `bits` or `run` out of its range.

    Example:
        >>> from jaxcomp.nn import Linear
        >>> model = nnx.Sequential(Linear(4, 2, codec=Quantize(2), rngs=nnx.Rngs(0)))
        >>> planner = BitPlanner(lambda m, x: m(x).sum(), bits=4, every=100)
        >>> [planner.update(model, jnp.ones((8, 4)), step) for step in (0, 50, 100)]
        [True, False, False]
        >>> print(planner)
        1 of at most 8 plans taken, at steps 0
    """

    def __init__(
        self, loss: Loss, *, bits: int | float = 2, run: int = 8, every: int = 1000, most: int = 8
    ) -> None:
        if every < 1 or most < 1:
            raise ValueError(f"every={every}, most={most}: expected positive numbers")
        _check(bits, run)
        self.loss, self.bits, self.run, self.every, self.most = loss, bits, run, every, most
        self.taken: dict[int, dict[str, list[int]]] = {}

    def update(self, model: nnx.Module, batch: Any, step: int) -> bool:
        """Changes the model's codecs if a new plan is due and better.

        Args:
            model: The model, with the parameters of this step.
            batch: Any pytree of arrays, axis 0 the examples, at least `run` of them.
            step: How many steps were taken; a plan is due at multiples of `every`.

        Returns:
            Whether the model was changed, so that the step must be made anew.

        Raises:
            ValueError: If `batch` holds no whole run, the model has no layer that saves by
                `Quantize` or `PerSample`, or a statistic is not finite.
        """
        if step % self.every or len(self.taken) >= self.most:
            return False
        needs = Needs.measure(self.loss, model, batch, self.run)
        widths = needs.allocate(self.bits)
        if self.taken and needs.variance(widths) >= 0.9 * needs.variance(needs.widths_of(model)):
            return False
        self.taken[step] = needs.by_path(widths)
        self.restore(model)
        return True

    def restore(self, model: nnx.Module) -> None:
        """Gives a model the last plan's widths, if there is one: `taken` may be of an earlier run.

        Raises:
            ValueError: If the model has no such layers.
        """
        for plan in list(self.taken.values())[-1:]:
            LayerCodecs.of(model, _policy(model, plan)).set(model)

    def __str__(self) -> str:
        """Returns how often it made the step be compiled again."""
        steps = ", ".join(map(str, self.taken)) or "none"
        return f"{len(self.taken)} of at most {self.most} plans taken, at steps {steps}"
