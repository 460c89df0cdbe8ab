"""Forward and backward rule of `norm_act`, and what it saves between them."""

import dataclasses
import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxcomp._core import barriers, platforms
from jaxcomp._core.row_kernels import by_row_kernel
from jaxcomp._core.shard_map import match_varying
from jaxcomp.codecs import Codec, Encoded, Offload, noise, packing
from jaxcomp.codecs._codec import Seed
from jaxcomp.codecs._sign_aware import Normalized, Preactivation, SignAware
from jaxcomp.ops._norm import Norm
from jaxcomp.ops._pooling import Window


class Input(NamedTuple):
    """Arguments of one batch norm.

    Attributes:
        x: Array to normalise, with the features last.
        scale: Factor of each feature.
        bias: Offset of each feature.
    """

    x: Array
    scale: Array
    bias: Array


class Kept(NamedTuple):
    """The codes that are saved for the backward pass.

    Attributes:
        code: Code of the result, which the result carries; None without a ReLU.
        own: Codes of the normalised values of each norm, if `code` does not contain them.
        maxima: Code of the index of each window's maximum; None without a pool.
    """

    code: Encoded | None
    own: tuple[Normalized, ...]
    maxima: Encoded | None


class Affine(NamedTuple):
    """Normalised values: `values * factor + offset`.

    Attributes:
        values: float32 array of the shape of the norm's input.
        factor: A number for each channel, of the rank of `values`; None is 1.
        offset: A number for each channel; None is 0.
    """

    values: Array
    factor: Array | None = None
    offset: Array | None = None

    def times(self, total: Array, weights: Array) -> Array:
        """Returns the sum of weights times the normalised values, for each channel.

        Args:
            total: The sum of weights times `values`.
            weights: The sum of weights.
        """
        if self.factor is None or self.offset is None:
            return total
        return total * self.factor.reshape(total.shape) + weights * self.offset.reshape(total.shape)

    def plus(self, slope: Array, constant: Array) -> Array:
        """Returns the normalised values times a slope plus a constant of each channel."""
        if self.factor is None or self.offset is None:
            return self.values * slope + constant
        return self.values * (self.factor * slope) + (self.offset * slope + constant)


_Sums = tuple[Array, list[Array]]
_Statistics = tuple[tuple[Array, ...], tuple[Array, ...]]


@dataclasses.dataclass(frozen=True)
class NormActVjp:
    """The operation of `norm_act` with its custom backward rule.

    Attributes:
        norms: The norm of each input. They differ in how they compute, not in their axes.
        codec: Codec of the result, without `Offload`.
        stored_by: `codec`, or `Offload` of it.
        shape: Shape of each norm's input.
        relu: Whether there is a ReLU.
        window: Window of the pool, or None.
    """

    norms: tuple[Norm, ...]
    codec: SignAware
    stored_by: Codec
    shape: tuple[int, ...]
    relu: bool
    window: Window | None

    @property
    def norm(self) -> Norm:
        """Axes, epsilon and averages over devices, which all norms share."""
        return self.norms[0]

    def __call__(
        self, inputs: tuple[Input, ...], residual: Array | None, channel_scale: Array, seed: Seed
    ) -> tuple[Array, Encoded | None, tuple[Array, ...], tuple[Array, ...]]:
        """Runs the operation.

        Args:
            inputs: Arguments of the norm of `x` and, if there is one, of the norm of the skip
                connection.
            residual: Skip connection that is added without a norm, or None.
            channel_scale: Typical magnitude of the result in each channel; float32.
            seed: Integer scalar that selects the rounding noise.

        Returns:
            The result, its code (None without a ReLU), means and variances.
        """
        inputs, residual, channel_scale, seed = match_varying(
            (inputs, residual, channel_scale, seed)
        )
        like = jax.eval_shape(lambda *arguments: arguments, inputs, residual)

        @jax.custom_vjp
        def op(*arguments: Any) -> Any:
            y, kept, means, variances = self._compute(*arguments)
            return y, kept.code, means, variances

        def forward(*arguments: Any) -> Any:
            y, kept, means, variances = self._compute(*arguments)
            scales = [scale for _, scale, _ in arguments[0]]
            saved = kept, barriers.name_residual(variances, self.stored_by), scales
            return (y, kept.code, means, variances), saved

        def backward(saved: Any, cotangents: Any) -> tuple[Any, ...]:
            dy, _, dmeans, dvars = cotangents
            return *self._transpose(saved, dy, dmeans, dvars, like), None, None

        op.defvjp(forward, backward)
        return op(inputs, residual, channel_scale, seed)

    def unknown(self, variances: tuple[Array, ...]) -> Array:
        """Returns NaN for channels with a NaN statistic and 0 for others, to be added to the scale.

        A NaN in the scale makes the decoded values NaN, also for operations that only read the
        code.
        """
        return sum(
            (self.norm.wide(0 * var) for var in variances[1:]), self.norm.wide(0 * variances[0])
        )

    def _compute(
        self, inputs: tuple[Input, ...], residual: Array | None, channel_scale: Array, seed: Seed
    ) -> tuple[Array, Kept, tuple[Array, ...], tuple[Array, ...]]:
        """Returns the result, what is saved, means and variances."""
        norm, codec = self.norm, self.codec
        found = [norm.statistics(x) for norm, (x, _, _) in zip(self.norms, inputs, strict=True)]
        means, variances = zip(*found, strict=True)
        variances = tuple(norm.clip(var) for norm, var in zip(self.norms, variances, strict=True))
        salt = noise.salt(seed, *inputs[0])
        if not self.relu:
            ((x, scale, bias),) = inputs
            x, own = barriers.save_residual(
                x, self._own_codes(inputs, means, variances, salt), self.stored_by
            )
            y = norm.normalize(x, means[0], variances[0], scale, bias)
            return y, Kept(None, own, None), means, variances
        encode = by_row_kernel(self._encode, exact=True, wanted=self._by_row_kernels)
        y, (packed, own, index), affine = encode(
            inputs, residual, means, variances, channel_scale, salt
        )
        codes = packed, own, index
        (y, affine, after), codes = barriers.save_residual(
            (y, affine, (means, variances)), codes, self.stored_by
        )
        y = self._after_codes(inputs, residual, y, after)
        packed, own, index = codes
        arrays = *packed, *barriers.name_residual(barriers.undifferentiable(affine), self.stored_by)
        return y, Kept(Encoded(arrays, y.shape, y.dtype, codec), own, index), means, variances

    @property
    def _by_row_kernels(self) -> bool:
        """Whether programs for one GPU use kernels of rows of channels."""
        return self.codec.kernels and self.window is None

    def _encode(
        self,
        inputs: tuple[Input, ...],
        residual: Array | None,
        means: tuple[Array, ...],
        variances: tuple[Array, ...],
        channel_scale: Array,
        salt: Array,
    ) -> tuple[Array, tuple[Any, ...], tuple[Array, ...]]:
        """Returns the result of a ReLU, the codes, and what the code of the result is scaled by."""
        norm, codec = self.norm, self.codec
        own: tuple[Normalized, ...] = ()
        if not codec.signed:
            own = self._own_codes(inputs, means, variances, salt)
        y = self._activation(inputs, residual, means, variances)
        unknown, index = self.unknown(variances), None
        if codec.signed:
            ((x, scale, bias),) = inputs
            gain, offset = norm.wide(scale), norm.wide(bias)
            centred, factor = norm.centre(x, means[0], variances[0])
            packed: tuple[Any, ...] = codec.encode_preactivation(
                centred, threshold(gain, offset), y > 0, salt, factor * sign(gain)
            )
            affine = salt, jnp.abs(gain) + unknown, offset
        else:
            if self.window is not None:
                index = self.window.index.encode(self.window.argmax(y))
                y = barriers.materialize(self.window.max(y))
            coded = codec.encode_activation(y, channel_scale + unknown, salt)
            packed, affine = coded.arrays[:-3], coded.arrays[-3:]
        return y, (packed, own, index), affine

    def _own_codes(
        self,
        inputs: tuple[Input, ...],
        means: tuple[Array, ...],
        variances: tuple[Array, ...],
        salt: Array,
    ) -> tuple[Normalized, ...]:
        """Returns the codes of each norm's normalised values."""
        # The result's code may share noise with one of these: no gradient multiplies both.
        random = noise.indexed_words(self.shape, salt)
        return tuple(
            self.codec.encode_normalized(centred, noise.other_words(random, i), factor)
            for i, (centred, factor) in enumerate(
                self.norm.centre(x, mean, var)
                for (x, _, _), mean, var in zip(inputs, means, variances, strict=True)
            )
        )

    def _after_codes(
        self, inputs: tuple[Input, ...], residual: Array | None, made: Array, after: _Statistics
    ) -> Array:
        """Returns the result for the operations that read it.

        This is `made`, or the same value computed again from statistics that passed the barrier
        with the codes.
        """

        def anew(_: Array) -> Array:
            return self._activation(inputs, residual, *after)

        if len(inputs) > 1 or self.window is not None:
            return made
        offloaded = isinstance(self.stored_by, Offload)
        if self.codec.fuses_decode_on_tpu and (residual is None or offloaded):
            # XLA for TPUs fuses a value without a barrier into its readers. The codes of a sum on
            # their way to the host then do not wait for the sum.
            return platforms.remake_on_tpu(made, anew)
        return made

    def _activation(
        self,
        inputs: tuple[Input, ...],
        residual: Array | None,
        means: tuple[Array, ...],
        variances: tuple[Array, ...],
    ) -> Array:
        """Returns the ReLU of the sum of all norms and the skip connection."""
        y, *others = (
            norm.normalize(x, mean, var, *affine)
            for norm, (x, *affine), mean, var in zip(
                self.norms, inputs, means, variances, strict=True
            )
        )
        for other in others if residual is None else [residual]:
            y = y + other
        return jax.nn.relu(y)

    def _transpose(
        self,
        saved: tuple[Kept, tuple[Array, ...], list[Array]],
        dy: Array,
        dmeans: tuple[Array, ...],
        dvars: tuple[Array, ...],
        like: tuple[tuple[Input, ...], jax.ShapeDtypeStruct | None],
    ) -> tuple[tuple[Input, ...], Array | None]:
        """Returns the gradients of the inputs and of the skip connection, in their dtypes."""
        kept, variances, scales = saved
        kept, hold = barriers.hold_until(dy, kept, self.stored_by)
        by_kernel = functools.partial(by_row_kernel, exact=False, wanted=self._by_row_kernels)

        def read(
            kept: Kept, scale: Array, stopped: bool = True
        ) -> tuple[Array | None, list[Affine], Array | None]:
            positive, decoded, index = self._read(kept, scale, stopped)
            return positive, [h._replace(values=hold.use(h.values)) for h in decoded], index

        def totals(kept: Kept, dy: Array, scale: Array) -> tuple[_Sums, Array | None]:
            positive, normalized, _ = read(kept, scale, stopped=False)
            dz = passed(dy, positive)
            return self._totals(dz, normalized), dz.astype(dy.dtype) if adds else None

        def gradients(
            kept: Kept, dy: Array, scales: list[Array], *others: Any
        ) -> tuple[Input, ...]:
            positive, normalized, _ = read(kept, scales[0])
            dz = dy.astype(jnp.float32) if is_masked else passed(dy, positive)
            found = input_gradients(self.norm, dz, normalized, scales, *others)
            return cast(tuple[Input, ...], jax.tree.map(_as, found, like[0]))

        adds = like[1] is not None
        is_masked = adds or self.window is not None
        positive, normalized, index = read(kept, scales[0])
        if index is not None:
            masked = passed(dy, positive).astype(dy.dtype)
            dy, (dbias, dscales) = platforms.pool_over_map_on_tpu(
                (masked, index, variances),
                functools.partial(self._over_map, normalized),
                functools.partial(self._over_windows, kept.own, hold),
            )
        else:
            found, masked = by_kernel(totals)(kept, dy, scales[0])
            dbias, dscales = self._sums(found, normalized, variances)
            if masked is not None:
                # The masked cotangent is written to memory together with the sums; what follows
                # reads it instead of its operands.
                dy, (dscales, dbias) = barriers.barrier_together(masked, (dscales, dbias))
        dbias = hold.use_in_sum(dbias)
        inputs = by_kernel(gradients)(kept, dy, scales, variances, (dbias, dscales), dmeans, dvars)
        return inputs, _as(dy, like[1]) if adds else None

    def _totals(self, dz: Array, normalized: list[Affine]) -> _Sums:
        """Returns the sums of the cotangent, and of its product with each norm's values."""
        axes = self.norm.axes
        products = [dz * h.values for h in normalized]
        if isinstance(self.stored_by, Offload):
            # XLA for GPUs copies more codes from the host at once if the sums are one.
            dbias, first = dz.sum(axes), products[0].sum(axes)
        else:
            dbias, first = sums_of(dz, products[0], axes)
        return dbias, [first, *(product.sum(axes) for product in products[1:])]

    def _sums(
        self,
        totals: _Sums,
        normalized: list[Affine],
        variances: tuple[Array, ...],
    ) -> _Sums:
        """Returns the gradients of the bias and of every scale; NaN where a statistic is NaN."""
        dbias, sums = totals
        dscales = [h.times(total, dbias) for h, total in zip(normalized, sums, strict=True)]
        return dbias, [d + 0 * var for d, var in zip(dscales, variances, strict=True)]

    def _over_windows(
        self,
        own: tuple[Normalized, ...],
        hold: barriers.Hold,
        masked: Array,
        index: Array,
        variances: tuple[Array, ...],
    ) -> tuple[Array, _Sums]:
        """Computes the pool's backward pass with sums over windows.

        The cotangent of the map before the pool need not be written to memory. One kernel takes the
        codes at the maxima. It has a thread for each window, and that of the sums far fewer.

        Returns:
            That cotangent in float32, and the result of `_sums`.
        """
        window, bits, taken = cast(Window, self.window), self.codec.bits, []
        for coded in own:
            codes = window.gather(index, packing.unpack(coded.packed, self.shape, bits))
            at_maxima = tuple(map(barriers.materialize, packing.pack(codes, bits)))
            values = self.codec.decode_normalized(coded._replace(packed=at_maxima), window.out)
            taken.append(Affine(hold.use(values)))
        totals = self._totals(masked.astype(jnp.float32), taken)
        sums = self._sums(totals, taken, variances)
        masked, sums = barriers.barrier_together(masked, sums)
        return window.scatter(index, masked).astype(jnp.float32), sums

    def _over_map(
        self,
        normalized: list[Affine],
        masked: Array,
        index: Array,
        variances: tuple[Array, ...],
    ) -> tuple[Array, _Sums]:
        """Computes the same as `_over_windows` with sums over the map before the pool.

        This form is for TPUs, on which slices of the decoded values cost more than sums over the
        map.
        """
        window = cast(Window, self.window)
        dz = window.scatter(index, masked).astype(jnp.float32)
        return dz, self._sums(self._totals(dz, normalized), normalized, variances)

    def _read(
        self, kept: Kept, scale: Array, stopped: bool
    ) -> tuple[Array | None, list[Affine], Array | None]:
        """Decodes the mask of the ReLU, the normalised values, and the indices of a pool.

        Without `stopped` the values that the ReLU stops may be any finite numbers. Sums multiply
        these by 0.
        """
        code, own, index = kept
        if code is not None and self.codec.signed:
            coded = Preactivation(*code.arrays[:-3])
            signs = sign(self.norm.wide(scale))
            if self.codec.scale_source == "range":
                h, positive = self.codec.decode_preactivation(coded, code.shape)
                return positive, [Affine(h * signs)], None
            codes = packing.unpack(coded.packed, code.shape, self.codec.bits)
            t, positive = self.codec.levels.decode(codes)
            if not stopped:
                t = self.codec.levels.decode_positive(codes)
            return positive, [Affine(t, signs, coded.threshold * signs)], None
        passed = None if code is None else self.codec.positive(code)
        normalized = [Affine(self.codec.decode_normalized(coded, self.shape)) for coded in own]
        if self.window is None or index is None:
            return passed, normalized, None
        return passed, normalized, self.window.index.decode(index)


def input_gradients(
    norm: Norm,
    dz: Array,
    normalized: list[Affine],
    scales: list[Array],
    variances: tuple[Array, ...],
    sums: _Sums,
    dmeans: tuple[Array, ...],
    dvars: tuple[Array, ...],
) -> tuple[Input, ...]:
    """Returns the gradients of the arguments of norms whose results are added.

    Args:
        norm: Axes, epsilon and averages over devices, which all norms share.
        dz: Cotangent of the sum; float32.
        normalized: Normalised values of each norm.
        scales: Scale of each norm.
        variances: Variances of each norm's input.
        sums: Gradients of the bias and of every scale.
        dmeans: Cotangents of the means.
        dvars: Cotangents of the variances.
    """
    dbias, dscales = sums
    count = dz.size // dz.shape[-1]
    asked = norm.shares((*dmeans, *dvars), dz)
    averages = norm.average(tuple(s / count for s in (dbias, *dscales, *asked)))
    mean_dz, *others = map(norm.wide, averages)
    inputs = []
    for i, (h, var, scale) in enumerate(
        zip(normalized, map(norm.wide, variances), scales, strict=True)
    ):
        mean_dzh, dmean, dvar = others[i :: len(scales)]
        deviation = jnp.sqrt(var + norm.epsilon)
        factor = norm.wide(scale) / deviation
        constant = dmean - factor * mean_dz
        slope = 2 * deviation * dvar - factor * mean_dzh
        # In a constant channel h is 0; a clipped variance has no derivative.
        slope = jnp.where(var == 0, 0, slope)
        dx = factor * dz + h.plus(slope, constant)
        inputs.append(Input(dx, dscales[i], dbias))
    return tuple(inputs)


def passed(dy: Array, positive: Array | None) -> Array:
    """Returns the cotangent in float32, and 0 where the mask of a ReLU is False."""
    dz = dy.astype(jnp.float32)
    return dz if positive is None else jnp.where(positive, dz, 0)


def _as(gradient: Array, like: Any) -> Array:
    return gradient.astype(like.dtype)


def sums_of(one: Array, other: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Returns the sums of two arrays that are made of the same costly values.

    XLA for GPUs estimates that a kernel computes these once for each operand of its reduction, and
    therefore writes them to memory. Complex numbers are one operand.
    """

    def as_one(one: Array, other: Array) -> tuple[Array, Array]:
        both = lax.complex(one, other).sum(axes)
        return both.real, both.imag

    def apart(one: Array, other: Array) -> tuple[Array, Array]:
        return one.sum(axes), other.sum(axes)

    return platforms.sum_as_one_on_gpu((one, other), as_one, apart)


def sign(scale: Array) -> Array:
    """Returns the sign of a norm's scale: `h` times it grows with the pre-activation."""
    return jnp.where(scale < 0, -1.0, 1.0)


def threshold(scale: Array, bias: Array) -> Array:
    """Returns the value that `h` times its sign must exceed for the ReLU to pass it."""
    size = jnp.abs(scale)
    always = jnp.where(bias > 0, -jnp.inf, jnp.inf)
    return jnp.where(size == 0, always, -bias / jnp.where(size == 0, 1, size))
