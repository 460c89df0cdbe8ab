"""Per-feature scaling and shifting with a compressed saved input."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxcomp._core import barriers
from jaxcomp._core.custom_derivative import Differentiable
from jaxcomp._core.linear_map import ByPosition
from jaxcomp._core.shard_map import match_varying, type_like
from jaxcomp.codecs import Codec
from jaxcomp.codecs._codec import Seed


def affine(
    x: Float[Array, "*batch features"],
    scale: Float[Array, " features"],
    bias: Float[Array, " features"] | None = None,
    *,
    codec: Codec | None = None,
    seed: Seed = None,
) -> Float[Array, "*batch features"]:
    """Computes `scale * x + bias` and saves `x` encoded.

    The result is bit-identical to `x * scale + bias`. The gradients of `x` and `bias` are exact.
    The gradient of `scale` is computed from the decoded `x`, so it is unbiased if the codec is. If
    no gradient of `scale` is taken, `x` is not saved.

    Source: the affine layer of ResMLP (Touvron et al., arXiv:2105.03404, section 2) and, without
    `bias`, LayerScale (Touvron et al., arXiv:2103.17239, section 2).

    Args:
        x: float32, bfloat16 or float16 activations; axis 0 is the batch.
        scale: Factor of each feature.
        bias: Offset of each feature, or None.
        codec: Codec of `x`. None leaves differentiation to JAX.
        seed: Integer scalar that selects the rounding noise of the codec.

    Returns:
        The result in the promoted dtype of the arguments.

    Raises:
        TypeError: If the codec cannot store the dtype of `x`.
        ValueError: If the codec cannot store the shape of `x`.

    Example:
        >>> from jaxcomp import Quantize
        >>> x = jnp.array([[0.0, 1.0], [3.0, 3.0]])
        >>> f = lambda scale: affine(x, scale, codec=Quantize(bits=2)).sum()
        >>> jax.grad(f)(jnp.ones(2)).tolist()
        [3.0, 4.0]
    """
    others = tuple(range(x.ndim - 1))

    def stock(x: Array, scale: Array, bias: Array | None = None) -> Array:
        y = x * jnp.expand_dims(scale, others)
        return y if bias is None else y + jnp.expand_dims(bias, others)

    if codec is None:
        return stock(x, scale, bias)
    saved_by = codec
    saved_by.check(x.shape, x.dtype)
    x, scale, bias, seed = match_varying((x, scale, bias, seed))
    like_scale = type_like(scale)

    class Affine(Differentiable[bool]):
        """The choice is whether the backward pass reads the operand with the code."""

        def evaluate(self, seed: Seed, arguments: list[Array]) -> list[Array]:
            return [stock(*arguments)]

        def choose(self, seed: Seed, arguments: list[Array], differentiated: list[int]) -> bool:
            """Returns whether the backward pass reads `x`: not if the scale is frozen."""
            return 1 in differentiated

        def forward(
            self, choice: bool, seed: Seed, arguments: list[Array]
        ) -> tuple[list[Array], Any]:
            x, scale, *biases = arguments
            if not choice:
                return [stock(*arguments)], (None, scale)
            code = saved_by.encode(x, seed)
            # The barrier takes an array that is written to memory anyway: the input of
            # LayerScale, or the result of an affine layer, which a matrix product reads.
            if not biases:
                x, code = barriers.save_residual(x, code, saved_by)
                return [stock(x, scale)], (code, scale)
            y, code = barriers.save_residual(stock(*arguments), code, saved_by)
            return [y], (code, scale)

        def backward(self, choice: bool, residual: Any, cotangents: ByPosition) -> ByPosition:
            code, scale = residual
            cotangent = cotangents[0]
            found: ByPosition = {}
            if choice:
                decoded = barriers.decode_after(cotangent, code, saved_by.decode)
                transpose = jax.linear_transpose(lambda scale: stock(decoded, scale), like_scale)
                (found[1],) = transpose(
                    cotangent.astype(jnp.result_type(decoded, like_scale.dtype))
                )
            if bias is not None:
                found[2] = cotangent.sum(others).astype(bias.dtype)
                found[1], cotangent = barriers.barrier_together(found.get(1), cotangent)
            found[0] = (cotangent * jnp.expand_dims(scale, others)).astype(x.dtype)
            if bias is None:
                found[1], found[0] = barriers.barrier_together(found.get(1), found[0])
            return found

    return Affine()(seed, x, scale, *([] if bias is None else [bias]))[0]
