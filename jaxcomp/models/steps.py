"""Training steps of the models of this package, for `jaxcomp.compare`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxcomp.memory._words import did_you_mean
from jaxcomp.models import _efficientnet, _lm, _vit, catalog, training
from jaxcomp.models._network import ADAMW, images, of_linen, of_nnx
from jaxcomp.models.sharding import state_shardings
from jaxcomp.planning import MakeStep, Strategy

_LANGUAGE_MODELS = {"lm": _lm.lm, "scanned_lm": _lm.scanned_lm}
_IMAGE_MODELS = ("efficientnet_b0", "vit_b16")


def names() -> list[str]:
    """Returns the names that `by_name` takes.

    Example:
        >>> {"lm", "scanned_lm", "vit_b16", "efficientnet_b0", "resnet50"} <= {*names()}
        True
    """
    return [*catalog.names(), *_IMAGE_MODELS, *_LANGUAGE_MODELS]


def by_name(
    name: str,
    image: int | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    fsdp: bool = False,
) -> MakeStep:
    """Makes the step factory of a model of this package.

    Args:
        name: One of `names`. Those of `jaxcomp.models.catalog` are as by `classifier`. The others
            are stock Flax code, trained by AdamW: `vit_b16` in NNX and `efficientnet_b0` in Linen
            on images of 1000 classes; `lm`, a byte-level language model of 6 blocks of 768 features
            on 1024 tokens, and `scanned_lm`, the same with its blocks under `nnx.scan`.
        image: Height and width of images; 224 by default.
        dtype: Dtype of the computation and the images; parameters are float32.
        mesh: The devices that the batch is split over; None for a single one.
        fsdp: Whether parameters and optimizer are sharded, as by `sharding.state_shardings`.

    Returns:
        A function of a strategy and a batch size, which returns the jitted step and its arguments.

    Raises:
        ValueError: If `name` is unknown, `image` does not fit the model, or `fsdp` has no mesh.

    Example:
        >>> step, (state, tokens, labels) = by_name("lm")(Strategy.parse("plain"), 8)
        >>> tokens.shape
        (8, 1024)
    """
    if name not in names():
        raise ValueError(f"name={name!r}: expected one of {names()}{did_you_mean(name, names())}")
    if image is not None and name in _LANGUAGE_MODELS:
        raise ValueError(f"image={image}: {name} takes no images")
    size = 224 if image is None else image
    if name in catalog.names():
        return classifier(name, size, dtype, mesh, fsdp=fsdp)
    _check(size, mesh, fsdp)
    if name == "vit_b16" and size % 16:
        raise ValueError(f"image={size}: expected a multiple of 16, as vit_b16 has such patches")
    factory: MakeStep
    of_images: dict[str, Any] = dict(shape=(size, size, 3), dtype=dtype, optimizer=ADAMW)
    if name in _LANGUAGE_MODELS:
        factory = partial(_LANGUAGE_MODELS[name], dtype=dtype)
    elif name == "vit_b16":
        vit = partial(_vit.vit_b16, image=size, dtype=dtype)
        factory = images(of_nnx, vit, **of_images).make_step
    else:
        net = partial(_efficientnet.EfficientNet, dtype=dtype)
        factory = images(of_linen, net, **of_images).make_step

    def make_step(transform: Strategy, batch: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        transform.check_batch(batch, 1 if mesh is None else mesh.size)
        step, arguments = factory(transform, batch)
        return step, arguments if mesh is None else sharded(arguments, mesh, fsdp=fsdp)

    return make_step


def _check(image: int, mesh: Mesh | AbstractMesh | None, fsdp: bool) -> None:
    if image < 1:
        raise ValueError(f"image={image}: expected a positive number of pixels")
    if fsdp and mesh is None:
        raise ValueError("fsdp=True: expected a mesh of devices")


def sharded(arguments: tuple[Any, ...], mesh: Mesh | AbstractMesh, *, fsdp: bool) -> Any:
    """Returns the shapes of a state and the arrays of a batch, with their shardings over a mesh."""
    state, *batch = arguments
    by_example = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shardings = (state_shardings(state, mesh, fsdp=fsdp), *[by_example] * len(batch))
    return jax.tree.map(
        lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        (state, *batch),
        shardings,
    )


def classifier(
    name: str,
    image: int = 224,
    dtype: DTypeLike = jnp.bfloat16,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    fsdp: bool = False,
) -> Callable[[Strategy, int], tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Makes a step factory: SGD with momentum on a batch of images of 1000 classes.

    Args:
        name: The model, as `jaxcomp.models.catalog.create` takes it.
        image: Height and width of the images.
        dtype: Dtype of the computation and the images; parameters are float32.
        mesh: The devices that the batch is split over; None for a single one.
        fsdp: Whether parameters and optimizer are sharded, as by `sharding.state_shardings`.

    Returns:
        A function of a strategy and a batch size. It returns the jitted step, which donates its
        state, and the shapes of its arguments (state, images, labels).

    Raises:
        ValueError: If `name` is unknown, `image` is not positive, or `fsdp` has no mesh. The
            returned function raises one if the model cannot take images of this size, or the
            batch does not divide over the devices.

    Example:
        >>> make_step = classifier("resnet18", image=64)
        >>> step, (state, images, labels) = make_step(Strategy.parse("remat"), 8)
        >>> images.shape
        (8, 64, 64, 3)
    """
    catalog.check_name(name)
    _check(image, mesh, fsdp)

    def make_step(transform: Strategy, batch: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        transform.check_batch(batch, 1 if mesh is None else mesh.size)
        model = transform(
            nnx.eval_shape(
                lambda: catalog.create(
                    name, num_classes=1000, image_size=image, dtype=dtype, rngs=nnx.Rngs(0)
                )
            )
        )
        optimizer = training.sgd(lambda count: 0.1, momentum=0.9, nesterov=False, weight_decay=1e-4)
        loss_fn = training.make_loss(model, label_smoothing=0.1)
        step = training.make_train_step(loss_fn, optimizer, transform.micro_batches)
        state = jax.eval_shape(lambda: training.init_state(model, optimizer))
        images = jax.ShapeDtypeStruct((batch, image, image, 3), dtype)
        arguments = state, images, jax.ShapeDtypeStruct((batch,), jnp.int32)
        return step, arguments if mesh is None else sharded(arguments, mesh, fsdp=fsdp)

    return make_step
