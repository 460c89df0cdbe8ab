"""`storage`: what each module of a model keeps for the backward pass, before and after coding."""

import dataclasses
from typing import Any

import jax
from flax import nnx

from jaxcomp._core import table
from jaxcomp._core.module_scopes import scope_paths, with_module_scopes
from jaxcomp._core.modules import split_model
from jaxcomp.codecs import Codec, Exact, Packed
from jaxcomp.memory import declared_residuals
from jaxcomp.nn._coded import coded_modules, covered
from jaxcomp.policies._rules import Rule
from jaxcomp.transform._layers import apply


@dataclasses.dataclass(frozen=True)
class Stored:
    """What one module keeps.

    Attributes:
        path: Its path; "" is the model itself.
        op: Its kind of operation, or its class where it has no coded form.
        codec: How it stores; None for what has no coded form.
        elements: Elements of what it stores, over all its calls: of its first argument, or of its
            result for "norm_act" and "max_pool", and for a "norm_act" of the residual that it
            normalises, and of the array that it pools, too.
        exact_bytes: Bytes that it keeps with nothing coded.
        stored_bytes: Bytes that it keeps as it is.
    """

    path: str
    op: str
    codec: Codec | None
    elements: int
    exact_bytes: int
    stored_bytes: int


@dataclasses.dataclass(frozen=True)
class Storage:
    """What the modules of a model keep, in the order of their calls; prints as a table."""

    modules: tuple[Stored, ...]

    @property
    def stored_bytes(self) -> int:
        """Bytes that wait for the backward pass."""
        return sum(m.stored_bytes for m in self.modules)

    @property
    def exact_bytes(self) -> int:
        """Bytes that would wait with nothing coded."""
        return sum(m.exact_bytes for m in self.modules)

    @property
    def bits_per_element(self) -> float:
        """Mean bits of a coded element, metadata included.

        Masks and indices are not counted, but for the indices of a pool that a "norm_act" has.
        """
        coded = [m for m in self.modules if not isinstance(m.codec, Exact | Packed | None)]
        coded = [m for m in coded if m.stored_bytes]
        elements = sum(m.elements for m in coded)
        return 8 * sum(m.stored_bytes for m in coded) / elements if elements else 0.0

    def __str__(self) -> str:
        """One line for each module, and the sums."""
        rows = [("path", "op", "codec", "exact bytes", "stored bytes", "bits/element", "share")]
        for m in self.modules:
            bits = f"{8 * m.stored_bytes / m.elements:.3f}" if m.elements else ""
            share = f"{m.stored_bytes / max(1, self.stored_bytes):.1%}"
            figures = f"{m.exact_bytes:,}", f"{m.stored_bytes:,}", bits, share
            rows.append((m.path, m.op, "-" if m.codec is None else str(m.codec), *figures))
        lines = table.lines(rows, right=range(3, 7))
        lines.append(
            f"{self.stored_bytes:,} of {self.exact_bytes:,} bytes; "
            f"{self.bits_per_element:.3f} bits for a coded element, metadata included"
        )
        return "\n".join(lines)


def storage(model: nnx.Module, *inputs: Any, strict: bool = False) -> Storage:
    """Tells what each module of a model keeps for the backward pass; nothing is computed.

    The bytes are those that the program declares (`memory.declared_residual_bytes`), of the
    gradient with respect to parameters and floating-point inputs; `memory.analyze` tells what XLA
    makes of them. What a function outside of any module of its own keeps is listed with the module
    that calls it, and what only one of several modules needs to keep with the first.

    Args:
        model: Any model, in training mode; it is not changed.
        *inputs: What it is called with: arrays, `jax.ShapeDtypeStruct`s or pytrees of them.
        strict: Whether it is an error if a module without a coded form keeps something.

    Returns:
        The modules that keep something, now or with nothing coded.

    Raises:
        ValueError: If `strict` and there is such a module; the message has its share.

    Example:
        >>> from jaxcomp import Quantize
        >>> from jaxcomp.nn import Linear
        >>> model = Linear(64, 4, codec=Quantize(bits=4), rngs=nnx.Rngs(0))
        >>> found = storage(model, jax.ShapeDtypeStruct((32, 64), jax.numpy.float32))
        >>> found.stored_bytes, found.bits_per_element  # codes and two extremes a sample
        (1280, 5.0)
    """
    exact = nnx.clone(model)
    apply(exact, (Rule(Exact(), required=False),))
    coded = coded_modules(model)
    hidden = covered(coded)
    called: dict[str, int] = {}
    after, before = (
        _bytes(m, inputs, called_by, hidden) for m, called_by in ((model, called), (exact, {}))
    )
    kinds = {"/".join(map(str, path)): type(m).__name__ for path, m in nnx.iter_modules(model)}
    modules = []
    for path in sorted(before.keys() | after.keys(), key=[*called, *before].index):
        module = coded.get(path)
        modules.append(
            Stored(
                path,
                module.kind if module else kinds[path],
                (module.codec or Exact()) if module else None,
                called.get(path, 0),
                before.get(path, 0),
                after.get(path, 0),
            )
        )
    found = Storage(tuple(modules))
    left = [m for m in modules if m.codec is None and m.stored_bytes]
    if strict and left:
        shares = ", ".join(
            f"{m.path or 'the model itself'} ({m.op}) {m.stored_bytes / found.stored_bytes:.1%}"
            for m in left
        )
        raise ValueError(f"strict=True: kept exactly, by modules without a coded form: {shares}")
    return found


def _bytes(
    model: nnx.Module, inputs: tuple[Any, ...], called: dict[str, int], hidden: set[str]
) -> dict[str, int]:
    """Bytes by the path of the innermost module that made them, but for hidden ones."""
    graphdef, params, rest = split_model(with_module_scopes(model, called))

    def run(params: Any, rest: Any, *inputs: Any) -> Any:
        return nnx.merge(graphdef, params, jax.lax.stop_gradient(rest), copy=True)(*inputs)

    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (params, rest))
    program = jax.make_jaxpr(run)(*shapes, *inputs)
    # Calls are noted once a program is traced; the gradient is taken of its jaxpr.
    found: dict[str, int] = {}
    for residual in declared_residuals(program):
        path = next((p for p in reversed(scope_paths(residual.scope)) if p not in hidden), "")
        found[path] = found.get(path, 0) + residual.nbytes
    return found
