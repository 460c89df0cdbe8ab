"""The rule of `norm_act`: what it computes, what of that is kept, and the backward pass."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxcomp._core import barriers, platforms
from jaxcomp._core.shard_map import match_varying
from jaxcomp.codecs import Codec, Encoded, Offload, noise
from jaxcomp.codecs._codec import Seed
from jaxcomp.codecs._sign_aware import Normalized, Preactivation, SignAware
from jaxcomp.ops._norm import Norm
from jaxcomp.ops._pooling import Window


class Input(typing.NamedTuple):
    """What a batch norm takes."""

    x: Array
    scale: Array
    bias: Array


class Kept(typing.NamedTuple):
    """The codes that wait for the backward pass.

    Attributes:
        code: Of the result, if there is a ReLU; it goes on with it.
        own: Of each norm's value, where `code` does not hold it.
        maxima: The index of each window's, if there is a pool.
    """

    code: Encoded | None
    own: tuple[Normalized, ...]
    maxima: Encoded | None


_Sums = tuple[Array, list[Array]]
_Statistics = tuple[tuple[Array, ...], tuple[Array, ...]]


@dataclasses.dataclass(frozen=True)
class NormActVjp:
    """The operation and its backward rule.

    Attributes:
        norm: Of each input.
        codec: `stored_by`, or what that puts into the host's memory.
        stored_by: How codes are stored.
        shape: Of each input.
        relu: Whether there is a ReLU.
        window: Of the pool, if there is one.
    """

    norm: Norm
    codec: SignAware
    stored_by: Codec
    shape: tuple[int, ...]
    relu: bool
    window: Window | None

    def __call__(
        self, inputs: tuple[Input, ...], residual: Array | None, channel_scale: Array, seed: Seed
    ) -> tuple[Array, Encoded | None, tuple[Array, ...], tuple[Array, ...]]:
        """The result, its code, means and variances."""
        inputs, residual, channel_scale, seed = match_varying(
            (inputs, residual, channel_scale, seed)
        )
        like = jax.eval_shape(lambda *arguments: arguments, inputs, residual)

        @jax.custom_vjp
        def op(*arguments: typing.Any) -> typing.Any:
            y, kept, means, variances = self._compute(*arguments)
            return y, kept.code, means, variances

        def forward(*arguments: typing.Any) -> typing.Any:
            y, kept, means, variances = self._compute(*arguments)
            scales = [scale for _, scale, _ in arguments[0]]
            waiting = kept, barriers.name_residual(variances, self.stored_by), scales
            return (y, kept.code, means, variances), waiting

        def backward(waiting: typing.Any, cotangents: typing.Any) -> tuple[typing.Any, ...]:
            dy, _, dmeans, dvars = cotangents
            found = self._transpose(waiting, dy, dmeans, dvars, residual is not None)
            return *jax.tree.map(lambda d, a: d.astype(a.dtype), found, like), None, None

        op.defvjp(forward, backward)
        return op(inputs, residual, channel_scale, seed)

    def unknown(self, variances: tuple[Array, ...]) -> Array:
        """NaN where a statistic is, else 0: for whoever reads the result's code to see."""
        return sum(
            (self.norm.wide(0 * var) for var in variances[1:]), self.norm.wide(0 * variances[0])
        )

    def _compute(
        self, inputs: tuple[Input, ...], residual: Array | None, channel_scale: Array, seed: Seed
    ) -> tuple[Array, Kept, tuple[Array, ...], tuple[Array, ...]]:
        """The result, what is kept, means and variances."""
        norm, codec = self.norm, self.codec
        means, variances = zip(*(norm.statistics(x) for x, _, _ in inputs), strict=True)
        variances = tuple(map(norm.clip, variances))
        # Of x, the same on any number of devices, as a mean is to rounding only. Both codes of an
        # element may share their noise: no gradient multiplies one by the other.
        random = [noise.words(x, seed) for x, _, _ in inputs]
        normalized = [
            norm.standardize(x, mean, var)
            for (x, _, _), mean, var in zip(inputs, means, variances, strict=True)
        ]
        own: tuple[Normalized, ...] = ()
        if not codec.signed:
            own = tuple(map(codec.encode_normalized, normalized, random))
        if not self.relu:
            ((x, scale, bias),) = inputs
            x, own = barriers.save_residual(x, own, self.stored_by)
            y = norm.normalize(x, means[0], variances[0], scale, bias)
            return y, Kept(None, own, None), means, variances
        y = self._activation(inputs, residual, means, variances)
        unknown, index = self.unknown(variances), None
        if codec.signed:
            ((_, scale, bias),) = inputs
            gain, offset = norm.wide(scale), norm.wide(bias)
            packed: tuple[typing.Any, ...] = codec.encode_preactivation(
                normalized[0] * sign(gain), threshold(gain, offset), y > 0, random[0]
            )
            affine = jnp.abs(gain) + unknown, offset
        else:
            if self.window is not None:
                index = self.window.index.encode(self.window.argmax(y))
                y = barriers.materialize(self.window.max(y))
                random = [noise.words(y, seed)]
            coded = codec.encode_activation(y, channel_scale + unknown, random[0])
            packed, affine = coded.arrays[:-2], coded.arrays[-2:]
        codes = packed, own, index
        (y, affine, after), codes = barriers.save_residual(
            (y, affine, (means, variances)), codes, self.stored_by
        )
        y = self._after_codes(inputs, residual, y, after)
        packed, own, index = codes
        arrays = *packed, *barriers.name_residual(barriers.undifferentiable(affine), self.stored_by)
        return y, Kept(Encoded(arrays, y.shape, y.dtype), own, index), means, variances

    def _after_codes(
        self, inputs: tuple[Input, ...], residual: Array | None, made: Array, after: _Statistics
    ) -> Array:
        """The result that goes on: `made`, or made anew of statistics of after the codes."""

        def anew(_: Array) -> Array:
            return self._activation(inputs, residual, *after)

        if len(inputs) > 1 or self.window is not None:
            return made
        offloaded = isinstance(self.stored_by, Offload)
        if self.codec.fuses_decode_on_tpu and (residual is None or offloaded):
            # On TPUs a value without a barrier is a part of what reads it, too. A sum's codes
            # do not wait for it on their way to the host.
            return platforms.remake_on_tpu(made, anew)
        return made

    def _activation(
        self,
        inputs: tuple[Input, ...],
        residual: Array | None,
        means: tuple[Array, ...],
        variances: tuple[Array, ...],
    ) -> Array:
        """The ReLU of the sum of all norms and the residual."""
        y, *others = (
            self.norm.normalize(x, mean, var, *affine)
            for (x, *affine), mean, var in zip(inputs, means, variances, strict=True)
        )
        for other in others if residual is None else [residual]:
            y = y + other
        return jax.nn.relu(y)

    def _transpose(
        self,
        waiting: tuple[Kept, tuple[Array, ...], list[Array]],
        dy: Array,
        dmeans: tuple[Array, ...],
        dvars: tuple[Array, ...],
        adds: bool,
    ) -> tuple[tuple[Input, ...], Array | None]:
        """Gradients of the inputs, and of the residual if there is one."""
        norm = self.norm
        kept, variances, scales = waiting
        read = functools.partial(self._read, scale=scales[0])
        positive, normalized, index = barriers.decode_after(dy, kept, read, self.stored_by)
        dz = dy.astype(jnp.float32)
        if positive is not None:
            dz = jnp.where(positive, dz, 0)
        masked = dz.astype(dy.dtype)
        if index is not None:
            dz, (dbias, dscales) = platforms.pool_over_map_on_tpu(
                (masked, index, normalized, variances), self._over_map, self._over_windows
            )
        else:
            dbias, dscales = self._sums(dz, normalized, variances)
        if adds:
            # It is written with the sums: what follows reads it and not what it was made of.
            masked, (dscales, dbias) = barriers.barrier_together(masked, (dscales, dbias))
            dz = masked.astype(jnp.float32)
        count = dz.size // dz.shape[-1]
        asked = norm.shares((*dmeans, *dvars), dz)
        sums = norm.average(tuple(s / count for s in (dbias, *dscales, *asked)))
        mean_dz, *others = map(norm.wide, sums)
        inputs = []
        for i, (h, var, scale) in enumerate(
            zip(normalized, map(norm.wide, variances), scales, strict=True)
        ):
            mean_dzh, dmean, dvar = others[i :: len(scales)]
            deviation = jnp.sqrt(var + norm.epsilon)
            factor = norm.wide(scale) / deviation
            dx = factor * dz + (dmean - factor * mean_dz)
            slope = 2 * deviation * dvar - factor * mean_dzh
            # Of a constant channel h is zero; where the variance was clipped it has no derivative.
            dx += h * jnp.where(var == 0, 0, slope)
            inputs.append(Input(dx, dscales[i], dbias))
        return tuple(inputs), masked if adds else None

    def _sums(self, dz: Array, normalized: list[Array], variances: tuple[Array, ...]) -> _Sums:
        """Gradients of the bias and of every scale, in which NaN is where a statistic is."""
        dscales = [
            (dz * h).sum(self.norm.axes) + 0 * var
            for h, var in zip(normalized, variances, strict=True)
        ]
        return dz.sum(self.norm.axes), dscales

    def _over_windows(
        self,
        masked: Array,
        index: Array,
        normalized: list[Array],
        variances: tuple[Array, ...],
    ) -> tuple[Array, _Sums]:
        """The cotangent of the map before the pool, which need not be in memory, and sums."""
        window = typing.cast(Window, self.window)
        taken = [window.gather(index, h) for h in normalized]
        sums = self._sums(masked.astype(jnp.float32), taken, variances)
        masked, sums = barriers.barrier_together(masked, sums)
        return window.scatter(index, masked).astype(jnp.float32), sums

    def _over_map(
        self,
        masked: Array,
        index: Array,
        normalized: list[Array],
        variances: tuple[Array, ...],
    ) -> tuple[Array, _Sums]:
        """The same, for a TPU: slices of what is decoded cost it more than sums over the map."""
        window = typing.cast(Window, self.window)
        dz = window.scatter(index, masked).astype(jnp.float32)
        return dz, self._sums(dz, normalized, variances)

    def _read(self, kept: Kept, scale: Array) -> tuple[Array | None, list[Array], Array | None]:
        """ReLU's mask, the normalised values, and of a pool the indices."""
        code, own, index = kept
        if code is not None and self.codec.signed:
            coded = Preactivation(*code.arrays[:-2])
            h, positive = self.codec.decode_preactivation(coded, code.shape)
            return positive, [h * sign(self.norm.wide(scale))], None
        passed = None if code is None else self.codec.positive(code)
        normalized = [self.codec.decode_normalized(coded, self.shape) for coded in own]
        if self.window is None or index is None:
            return passed, normalized, None
        return passed, normalized, self.window.index.decode(index)


def sign(scale: Array) -> Array:
    """Of a norm's scale, so that h times it grows with the pre-activation."""
    return jnp.where(scale < 0, -1.0, 1.0)


def threshold(scale: Array, bias: Array) -> Array:
    """Where h times its sign has to be for ReLU to pass it."""
    size = jnp.abs(scale)
    always = jnp.where(bias > 0, -jnp.inf, jnp.inf)
    return jnp.where(size == 0, always, -bias / jnp.where(size == 0, 1, size))
