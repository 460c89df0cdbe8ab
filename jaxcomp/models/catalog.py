"""The models of this package by name."""

from typing import Any

from flax import nnx
from jax.typing import DTypeLike

from jaxcomp.memory._words import did_you_mean
from jaxcomp.models import resmlp, resnet
from jaxcomp.policies import PolicyLike


def names() -> list[str]:
    """Returns the names that `create` takes.

    Example:
        >>> "resnet50" in names(), "resmlp_s24" in names()
        (True, True)
    """
    return [*resnet.MODELS, *resmlp.MODELS]


def check_name(name: str) -> None:
    """Raises a ValueError if no model has this name."""
    if name not in names():
        raise ValueError(f"name={name!r}: expected one of {names()}{did_you_mean(name, names())}")


def create(
    name: str,
    *,
    num_classes: int,
    image_size: int,
    in_channels: int = 3,
    policy: PolicyLike | None = None,
    dtype: DTypeLike | None = None,
    rngs: nnx.Rngs,
) -> nnx.Module:
    """Makes an image classifier by name.

    Args:
        name: As `resnet.create` or `resmlp.create` takes it.
        num_classes: Number of logits.
        image_size: Height and width of the images; residual networks take any.
        in_channels: Channels of the images.
        policy: What `jaxcomp.compress` takes; None leaves the model uncompressed.
        dtype: Dtype of the computation; parameters and statistics are float32.
        rngs: Keys for the parameters.

    Returns:
        The model, which takes images of shape (batch, image_size, image_size, channels).

    Raises:
        ValueError: If `name` is unknown, or the policy or `image_size` does not fit the model.

    Example:
        >>> model = nnx.eval_shape(
        ...     lambda: create("resmlp_tiny", num_classes=10, image_size=28, rngs=nnx.Rngs(0))
        ... )
        >>> len(model.blocks)
        6
    """
    check_name(name)
    options: dict[str, Any] = dict(
        num_classes=num_classes, in_channels=in_channels, policy=policy, dtype=dtype, rngs=rngs
    )
    if name in resnet.MODELS:
        return resnet.create(name, **options)
    return resmlp.create(name, image_size=image_size, **options)
