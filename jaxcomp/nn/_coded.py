"""What modules whose operation has a coded form share."""

import contextlib
import contextvars
import dataclasses
import math
import typing
from collections.abc import Callable, Iterator

import jax
from flax import nnx
from jaxtyping import Array

from jaxcomp.codecs import Codec, noise
from jaxcomp.ops import CodedArray, value


class Sink(nnx.Variable[Array]):
    """State of a module that holds what `ops.Sink` is: a row for each sample of the batch."""


class Coded:
    """A module whose operation has a coded form; rules find it by this class.

    Attributes:
        kind: Its kind of operation: "conv", "dot", "batch_norm", "layer_norm", "relu", "gelu",
            "silu", "affine", "dropout", "max_pool" or "norm_act".
        covers: Attributes whose modules store nothing once this one has a codec.
        codec: How it stores what waits for its backward pass; None is as in Flax.
        sink: Takes each sample's sensitivity as its gradient (`ops.Sink`), if there is a codec;
            None is nothing. Convolutions, linear layers and batch norms read it.
    """

    kind: typing.ClassVar[str]
    covers: typing.ClassVar[tuple[str, ...]] = ()
    codec: Codec | None
    sink: Sink | None = None

    def __init__(self, *args: typing.Any, codec: Codec | None = None, **kwargs: typing.Any) -> None:
        super().__init__(*args, **kwargs)
        self.check_codec(codec)
        self.codec = codec

    def check_codec(self, codec: Codec | None) -> None:
        """Raises an error if the module cannot store by a codec.

        Raises:
            TypeError: If `codec` is not a codec.
            ValueError: If the codec is not for this kind of operation.
        """
        if codec is None:
            return
        if not isinstance(codec, Codec):
            raise TypeError(f"codec={codec!r}: expected a codec such as Quantize(bits=4), or None")
        if self.kind not in codec.kinds:
            raise ValueError(f"codec={codec}: stores for {', '.join(codec.kinds)}, not {self.kind}")

    def saved_elements(self, args: tuple[typing.Any, ...], result: typing.Any) -> int:
        """Elements of what a call saves: of its first argument."""
        return count_elements(args[:1])

    def sink_argument(self) -> dict[str, typing.Any]:
        """The sink as a keyword argument of an operation, if there is one."""
        return {} if self.sink is None else {"sink": self.sink[...]}


def count_elements(values: typing.Any) -> int:
    """Elements of all arrays of a pytree, in which a `ops.CodedArray` is one array."""
    leaves = jax.tree.leaves(values, is_leaf=lambda x: isinstance(x, CodedArray))
    return sum(math.prod(value(leaf).shape) for leaf in leaves)


def covered(modules: dict[str, Coded]) -> set[str]:
    """The paths of the modules that store nothing, since one that covers them has a codec."""
    coding = ((path, module) for path, module in modules.items() if module.codec is not None)
    return {name for path, module in coding for name in covered_paths(path, module)}


def covered_paths(path: str, module: Coded) -> set[str]:
    """The paths of the modules that a module at `path` covers."""
    return {f"{path}/{name}".lstrip("/") for name in module.covers}


def coded_modules(model: nnx.Module) -> dict[str, Coded]:
    """The `jaxcomp.nn` modules of a model by path."""
    modules = nnx.iter_modules(model)
    return {"/".join(map(str, path)): m for path, m in modules if isinstance(m, Coded)}


@dataclasses.dataclass(frozen=True)
class CodedOp:
    """A product of `jaxcomp.ops` with its codec, comparable and hashable as Flax's static data.

    Attributes:
        op: The operation of an input and a kernel, which takes `codec=` and `seed=`.
        codec: Its codec, or None for the stock operation.
    """

    op: Callable[..., typing.Any]
    codec: Codec | None

    def __call__(self, x: Array, kernel: Array, *args: typing.Any, **kwargs: typing.Any) -> Array:
        """Calls the operation with the codec; its noise is drawn anew when the kernel changes."""
        seed = None if self.codec is None else noise.fingerprint(kernel)
        activation, given = _GIVEN.get()
        lhs = x if activation is None else dataclasses.replace(activation, value=x)
        return self.op(lhs, kernel, *args, codec=self.codec, seed=seed, **given, **kwargs)


_Given = tuple[CodedArray | None, dict[str, typing.Any]]
_GIVEN: contextvars.ContextVar[_Given] = contextvars.ContextVar("given", default=(None, {}))


@contextlib.contextmanager
def giving(activation: CodedArray | None, **arguments: typing.Any) -> Iterator[None]:
    """Gives a `CodedOp` that Flax's layer calls what that does not pass on.

    Args:
        activation: Whose code goes with the operation's input; None if the input has none.
        **arguments: Of the operation.
    """
    token = _GIVEN.set((activation, arguments))
    try:
        yield
    finally:
        _GIVEN.reset(token)
