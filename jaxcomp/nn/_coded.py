"""Base class and helpers of the layers that save encoded activations."""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
from flax import nnx
from jaxtyping import Array

from jaxcomp.codecs import Codec, noise
from jaxcomp.ops import CodedArray, value


class Sink(nnx.Variable[Array]):
    """Variable of a layer that holds an `ops.Sink`: one row for each sample of the batch."""


class Coded:
    """Base class of the layers whose saved activations a codec can encode.

    Policies select layers of this class.

    Attributes:
        kind: Kind of operation: "conv", "dot", "batch_norm", "layer_norm", "relu", "gelu", "silu",
            "affine", "dropout", "max_pool" or "norm_act".
        covers: Names of the attributes whose modules save nothing if this module has a codec.
        codec: Codec of what the layer saves. None is the behaviour of Flax.
        sink: Variable whose gradient is the sensitivity of each sample (`ops.Sink`), or None. Only
            convolutions, linear layers and batch norms with a codec use it.
    """

    kind: ClassVar[str]
    covers: ClassVar[tuple[str, ...]] = ()
    codec: Codec | None
    sink: Sink | None = None

    def __init__(self, *args: Any, codec: Codec | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.check_codec(codec)
        self.codec = codec

    def check_codec(self, codec: Codec | None) -> None:
        """Checks that the layer can save its activation by a codec.

        Args:
            codec: The codec, or None.

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

    def saved_elements(self, args: tuple[Any, ...], result: Any) -> int:
        """Returns the number of elements that a call saves: those of its first argument.

        Args:
            args: Positional arguments of the call.
            result: Result of the call.
        """
        return count_elements(args[:1])

    def seed_of_call(self, x: Array, *parameters: Array) -> Array | None:
        """Returns a seed that differs between calls and updates; None without a codec.

        Args:
            x: The input.
            *parameters: The layer's parameters.
        """
        return None if self.codec is None else noise.salt(noise.fingerprint(*parameters), x)

    def sink_argument(self) -> dict[str, Any]:
        """Returns the sink as a keyword argument of an operation; an empty dict without a sink."""
        return {} if self.sink is None else {"sink": self.sink[...]}


def count_elements(values: Any) -> int:
    """Returns the number of elements of all arrays of a pytree.

    An `ops.CodedArray` counts as one array.
    """
    leaves = jax.tree.leaves(values, is_leaf=lambda x: isinstance(x, CodedArray))
    return sum(math.prod(value(leaf).shape) for leaf in leaves)


def covered(modules: dict[str, Coded]) -> set[str]:
    """Returns the paths of modules that save nothing, because a module with a codec covers them.

    Args:
        modules: Modules by path, as from `coded_modules`.
    """
    coding = ((path, module) for path, module in modules.items() if module.codec is not None)
    return {name for path, module in coding for name in covered_paths(path, module)}


def covered_paths(path: str, module: Coded) -> set[str]:
    """Returns the paths of the modules that the module at `path` covers."""
    return {f"{path}/{name}".lstrip("/") for name in module.covers}


def coded_modules(model: nnx.Module) -> dict[str, Coded]:
    """Returns the `jaxcomp.nn` modules of a model by path."""
    modules = nnx.iter_modules(model)
    return {"/".join(map(str, path)): m for path, m in modules if isinstance(m, Coded)}


@dataclasses.dataclass(frozen=True)
class CodedOp:
    """A product of `jaxcomp.ops` with its codec.

    It is comparable and hashable, as Flax requires of static attributes.

    Attributes:
        op: Operation of an input and a kernel, with the arguments `codec` and `seed`.
        codec: Codec of the input. None calls the stock operation.
    """

    op: Callable[..., Any]
    codec: Codec | None

    def __call__(self, x: Array, kernel: Array, *args: Any, **kwargs: Any) -> Array:
        """Calls the operation with the codec; the seed is derived from the kernel."""
        seed = None if self.codec is None else noise.fingerprint(kernel)
        activation, given = _GIVEN.get()
        lhs = x if activation is None else dataclasses.replace(activation, value=x)
        return self.op(lhs, kernel, *args, codec=self.codec, seed=seed, **given, **kwargs)


_Given = tuple[CodedArray | None, dict[str, Any]]
_GIVEN: contextvars.ContextVar[_Given] = contextvars.ContextVar("given", default=(None, {}))


@contextlib.contextmanager
def giving(activation: CodedArray | None, **arguments: Any) -> Iterator[None]:
    """Passes arguments through a Flax layer to the `CodedOp` that the layer calls.

    Args:
        activation: `CodedArray` whose code belongs to the layer's input, or None.
        **arguments: Keyword arguments of the operation.
    """
    token = _GIVEN.set((activation, arguments))
    try:
        yield
    finally:
        _GIVEN.reset(token)
