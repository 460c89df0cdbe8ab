"""Derivatives with poles, as that of a logarithm, become one coefficient with what multiplies them.

The derivative of `log(p)` is `1 / p`. What is large in it is small in another factor of the same
path, behind a mask, or not selected: the derivative of `log(softmax(z))[i, y]` is of ordinary size.
A code of `1 / p` has levels for its largest elements alone, and a code of the other factor has an
error that `1 / p` multiplies. Only their product can be encoded.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxcomp._core.shard_map import filled
from jaxcomp.transform._choice.chains import Costly, widened, with_coefficients
from jaxcomp.transform._program.builder import Builder, key_of_step, renamed
from jaxcomp.transform._program.linearized import Linearized
from jaxcomp.transform._program.primitives import ELEMENTWISE, MOVES, tangents_of
from jaxcomp.transform._program.program import Program, needed, read, readers_of, variables
from jaxcomp.transform._program.types import Atom, Equation, Renaming, Variable, is_variable

_MOST = 8  # paths to one result
_SELECTIONS = {"dynamic_slice", "gather", "reshape", "rev", "slice", "squeeze", "transpose"}
_GROWING = {"cosh", "exp", "exp2", "expm1", "integer_pow", "pow", "sinh", "tan"}
_KEEP_POLES = MOVES | {"abs", "add", "div", "mul", "neg", "select_n", "square", "sub"}
_MULTIPLY = {"div", "mul", "select_n"}


class _Path(NamedTuple):
    """How a tangent reaches another one by elementwise steps and selections.

    Attributes:
        before: The path but for its last step; None of a path without steps.
        start: The tangent at its beginning.
        step: The last step.
        along: The step's operand on the path.
    """

    before: "_Path | None"
    start: Variable
    step: Equation | None = None
    along: Variable | None = None

    def parts(self) -> list["_Path"]:
        """Returns this path after each of its steps."""
        found: list[_Path] = []
        path: _Path | None = self
        while path is not None and path.step is not None:
            found.append(path)
            path = path.before
        return found[::-1]

    def steps(self) -> list[tuple[Equation, Variable]]:
        """Returns the steps from the start on, each with its operand on the path."""
        return [(part.step, part.along) for part in self.parts() if part.step and part.along]


@dataclasses.dataclass(frozen=True)
class _Search:
    """The linear program as far as paths are concerned.

    Attributes:
        tangents: Its tangents.
        stored: Coefficients that would have to be stored.
        poles: Those of them with poles.
        growing: Others that may be much larger at some elements, as by `exp`.
        masks: Coefficients that are made of truth values.
        readers: The equations that read each variable.
        returned: The tangents that are results.
    """

    tangents: set[Variable]
    stored: set[Variable]
    poles: set[Variable]
    growing: set[Variable]
    masks: set[Variable]
    readers: dict[Variable, list[Equation]]
    returned: set[Variable]

    def followed(self, equation: Equation) -> list[Variable]:
        """Returns the tangents by which paths go through an equation; none if it ends them."""
        operands = [a for a in equation.invars if is_variable(a) and a in self.tangents]
        (out, *others) = equation.outvars
        kinds = [v.aval for v in (out, *operands)]
        if others or not all(jnp.issubdtype(kind.dtype, jnp.floating) for kind in kinds):
            return []
        if equation.primitive.name in _SELECTIONS:
            is_less = operands == equation.invars[:1] and out.aval.size <= operands[0].aval.size
            return operands if is_less else []
        same_rank = all(kind.ndim == out.aval.ndim for kind in kinds)
        return operands if equation.primitive.name in ELEMENTWISE and same_rank else []

    def has_pole(self, equation: Equation) -> bool:
        """Returns whether an equation multiplies a tangent by a coefficient with poles."""
        others = [a for a in equation.invars if is_variable(a) and a not in self.tangents]
        if equation.primitive.name == "div":
            return not self.stored.isdisjoint(others)
        return equation.primitive.name == "mul" and not self.poles.isdisjoint(others)

    def grows(self, equation: Equation) -> bool:
        """Returns whether an equation multiplies by a coefficient that a mask may have to tame."""
        return equation.primitive.name == "mul" and not self.growing.isdisjoint(
            variables(equation.invars)
        )

    def has_mask(self, equation: Equation) -> bool:
        """Returns whether an equation selects elements, or multiplies by a mask."""
        if equation.primitive.name == "mul":
            return not self.masks.isdisjoint(variables(equation.invars))
        return equation.primitive.name != "div" and self.has_factor(equation)

    def has_factor(self, equation: Equation) -> bool:
        """Returns whether an equation multiplies by an array, or selects elements."""
        if equation.primitive.name in _SELECTIONS:
            return equation.outvars[0].aval.size < equation.invars[0].aval.size
        others = [a for a in equation.invars if is_variable(a) and a not in self.tangents]
        return equation.primitive.name in _MULTIPLY and any(a.aval.size > 1 for a in others)

    def end(self, equation: Equation, paths: dict[Variable, list[_Path]]) -> Variable:
        """Returns the last tangent after an equation whose paths can be one coefficient each."""
        (current,) = equation.outvars
        last = current
        while len(self.readers.get(current, [])) == 1 and current not in self.returned:
            (reader,) = self.readers[current]
            if not self.followed(reader) or paths[reader.outvars[0]][0].before is None:
                break
            if reader.outvars[0].aval.size > current.aval.size:
                break  # a product of small factors takes more bytes than they do
            (current,) = reader.outvars
            if self.has_factor(reader):
                last = current
        return last


def with_whole_derivatives(linearized: Linearized, costly: Costly) -> Linearized:
    """Makes one coefficient of a derivative with poles and of all factors of the paths through it.

    Args:
        linearized: A function's forward program and its linear one.
        costly: Whether a value of the forward program would have to be stored at full size.

    Returns:
        Programs of the same results, to rounding.
    """
    linear = linearized.linear
    count = len(linear.arguments) - len(linearized.active)
    search = _search(linearized, costly)
    if not any(search.has_pole(e) or search.grows(e) for e in linear.equations):
        return linearized
    paths = _paths(search, linear.equations)
    ends: dict[Variable, list[_Path]] = {}
    for equation in linear.equations:
        if not search.has_pole(equation) and not search.grows(equation):
            continue
        if paths[equation.outvars[0]][0].before is None:
            continue
        end = search.end(equation, paths)
        if any(_is_made_small(search, equation, path) for path in paths[end]):
            ends[end] = paths[end]
    return _with_derivatives(linearized, search.tangents, ends, count) if ends else linearized


def _search(linearized: Linearized, costly: Costly) -> _Search:
    linear = linearized.linear
    count = len(linear.arguments) - len(linearized.active)
    behind = dict(zip(linear.arguments, linearized.coefficients, strict=False))
    stored = {argument for argument, value in behind.items() if costly(value)}
    poles, growing = _large(linearized.forward, costly)
    masks = _masks(linearized.forward)
    return _Search(
        tangents_of(linear.equations, linear.arguments[count:]),
        stored,
        {argument for argument in stored if behind[argument] in poles},
        {argument for argument in stored if behind[argument] in growing},
        {argument for argument, value in behind.items() if value in masks},
        readers_of(linear.equations),
        set(variables(linear.results)),
    )


def _large(forward: Program, costly: Costly) -> tuple[set[Variable], set[Variable]]:
    """Returns the values that may be much larger at some elements, by a reciprocal or by growth."""
    poles: set[Variable] = set()
    growing: set[Variable] = set()
    for equation in forward.equations:
        base, operands = _base_of_reciprocal(equation), variables(equation.invars)
        if is_variable(base) and costly(base):
            poles.update(equation.outvars)
        elif equation.primitive.name in _GROWING and any(map(costly, operands)):
            growing.update(equation.outvars)
        elif equation.primitive.name in _KEEP_POLES:
            for found in (poles, growing):
                if not found.isdisjoint(operands):
                    found.update(equation.outvars)
    return poles, growing


def masked_later(forward: Program, costly: Costly) -> set[Variable]:
    """Returns the values that may be much larger at some elements, and are read masked alone.

    The selected values take as many bytes, and their codes have levels for what is selected.
    """
    large = set().union(*_large(forward, costly))
    readers = readers_of(forward.equations)
    found: set[Variable] = set()
    returned = set(variables(forward.results))
    masks = _masks(forward)

    def is_masked(reader: Equation) -> bool:
        is_product = reader.primitive.name == "mul" and not masks.isdisjoint(
            variables(reader.invars)
        )
        return is_product or reader.primitive.name == "select_n" or reader.outvars[0] in found

    for equation in reversed(forward.equations):
        for value in large.intersection(equation.outvars) - returned:
            if value in readers and all(map(is_masked, readers[value])):
                found.add(value)
    return found


def _masks(forward: Program) -> set[Variable]:
    """Returns the numbers that are made of truth values and constants."""
    found: set[Variable] = set()
    for equation in forward.equations:
        operands = variables(equation.invars)
        is_simple = equation.primitive.name in ELEMENTWISE | MOVES and operands
        if is_simple and all(v in found or v.aval.dtype == jnp.bool for v in operands):
            found.update(equation.outvars)
    return found


def _base_of_reciprocal(equation: Equation) -> Atom | None:
    """Returns what an equation takes a reciprocal, or its power, of."""
    operands = equation.invars
    match equation.primitive.name:
        case "div":
            return operands[1]
        case "rsqrt":
            return operands[0]
        case "integer_pow":
            return operands[0] if equation.params["y"] < 0 else None
        case "pow":
            exponent = operands[1]
            is_positive = not is_variable(exponent) and bool(np.all(exponent.val >= 0))
            return None if is_positive else operands[0]
    return None


def _paths(search: _Search, equations: Sequence[Equation]) -> dict[Variable, list[_Path]]:
    """Returns the paths to each tangent; a tangent to which there are too many is a start."""
    found: dict[Variable, list[_Path]] = {}
    multiplied: set[Variable] = set()  # by an array, on the way
    for equation in equations:
        if search.tangents.isdisjoint(equation.outvars):
            continue
        operands = [*dict.fromkeys(search.followed(equation))]  # of y + y one
        for operand in operands:
            found.setdefault(operand, [_Path(None, operand)])
        (out, *_) = equation.outvars
        reached = [
            _Path(path, path.start, equation, operand)
            for operand in operands
            for path in found[operand]
        ]
        is_sum = len(operands) > 1 and multiplied.isdisjoint(operands)
        if not reached or is_sum or len(reached) > _MOST:
            found |= {v: [_Path(None, v)] for v in equation.outvars}
        else:
            found[out] = reached
            if search.has_factor(equation) or not multiplied.isdisjoint(operands):
                multiplied.add(out)
    return found


def _is_made_small(search: _Search, factor: Equation, path: _Path) -> bool:
    """Returns whether a path has a factor, and another step that may be small where it is large.

    It is any other factor of one with a pole, and a mask after one that grows.
    """
    steps = [step for step, _ in path.steps()]
    at = next((i for i, step in enumerate(steps) if step is factor), None)
    if at is None:
        return False
    if search.has_pole(factor):
        return any(map(search.has_factor, steps[:at] + steps[at + 1 :]))
    return any(map(search.has_mask, steps[at + 1 :]))


def _with_derivatives(
    linearized: Linearized,
    tangents: set[Variable],
    ends: dict[Variable, list[_Path]],
    count: int,
) -> Linearized:
    """Returns the programs in which the paths to some tangents are one product each.

    Args:
        linearized: The programs.
        tangents: The tangents of the linear program.
        ends: The paths to each such tangent.
        count: Number of coefficients.
    """
    forward, linear = linearized.forward, linearized.linear
    terms: list[list[_Path]] = []
    inside = Builder()
    derivatives: list[Variable] = []
    env = inside.constants_of(linear) | {v: v for v in linear.arguments}
    for equation in linear.equations:
        (out, *_) = equation.outvars
        if out not in ends:
            inside.copy(equation, env)
            continue
        products = []
        for alike in _terms(ends[out]):
            terms.append(alike)
            kind = jnp.result_type(out.aval, alike[0].start.aval)
            derivatives.append(Variable(out.aval.update(dtype=kind)))
            moved = _moved(inside, alike[0], env)
            product = functools.partial(_product, out.aval.dtype)
            products.append(inside.trace(product, moved, derivatives[-1], at=equation))
        env[out] = inside.trace(_sum, products, at=equation)
    results = renamed(env, linear.results)
    whole = inside.program(linear, [], results)
    equations = needed(whole.equations, results)
    used = {*variables(results), *(v for e in equations for v in variables(e.invars))}
    coefficients = [v for v in linear.arguments[:count] if v in used]
    arguments = [*coefficients, *derivatives, *linear.arguments[count:]]
    shortened = Program(whole.jaxpr.replace(invars=arguments, eqns=equations), whole.consts)

    outside, made, env = with_coefficients(linearized, tangents)
    made_of: dict[Any, Atom] = {}
    values = [
        _derivative(outside, alike, derivative.aval.dtype, env, made_of)
        for alike, derivative in zip(terms, derivatives, strict=True)
    ]
    kept = [*made, *(env[v] for v in coefficients), *values]
    return dataclasses.replace(
        linearized, forward=outside.program(forward, forward.arguments, kept), linear=shortened
    )


def _terms(paths: Sequence[_Path]) -> Iterator[list[_Path]]:
    """Yields paths whose derivatives are added up, and others by themselves."""
    by_start: dict[Variable, list[_Path]] = {}
    for path in paths:
        if any(_moves(*step) for step in path.steps()):
            yield [path]
        else:
            by_start.setdefault(path.start, []).append(path)
    yield from by_start.values()


def _moves(equation: Equation, along: Variable) -> bool:
    """Returns whether a step changes the shape."""
    return equation.primitive.name in _SELECTIONS or along.aval.shape != _shape(equation)


def _shape(equation: Equation) -> tuple[int, ...]:
    return equation.outvars[0].aval.shape


def _moved(builder: Builder, path: _Path, env: Renaming) -> Atom:
    """Returns the tangent at the start of a path in its place at the end."""
    moved = env[path.start]
    for equation, along in path.steps():
        if equation.primitive.name in _SELECTIONS:
            operands = [moved, *renamed(env, equation.invars[1:])]
            step = functools.partial(_bind, equation)
            (moved,) = builder.trace(step, *operands, at=equation)
        elif _moves(equation, along):
            shape = _shape(equation)
            moved = builder.trace(lambda x, s=shape: jnp.broadcast_to(x, s), moved, at=equation)
    return moved


def _derivative(
    builder: Builder,
    paths: Sequence[_Path],
    dtype: DTypeLike,
    env: Renaming,
    made: dict[Any, Atom],
) -> Atom:
    """Returns the derivative of a path's end by its start, rounded once; of several the sum.

    Args:
        builder: Where its equations are added.
        paths: The paths.
        dtype: What it is rounded to.
        env: The coefficients.
        made: The derivatives after the steps so far.
    """
    values = []
    for path in paths:
        kinds = [along.aval.dtype for _, along in path.steps()]
        wide = jnp.result_type(jnp.float32, dtype, *kinds)
        start = path.start.aval.update(dtype=wide)
        value = builder.trace(functools.partial(filled, start, 1.0), key=start)
        for part in path.parts():
            if (id(part), wide) not in made:
                made[id(part), wide] = _after(builder, part, wide, value, env)
            value = made[id(part), wide]
        values.append(value)
    return builder.trace(lambda xs: _sum(xs).astype(dtype), values)


def _after(builder: Builder, path: _Path, wide: DTypeLike, before: Atom, env: Renaming) -> Atom:
    """Returns the derivative after the last step of a path, of that before it."""
    equation, along = path.step, path.along
    assert equation is not None and along is not None
    known = [a for a in variables(equation.invars) if a is not along and a in env]
    step = functools.partial(_times, equation, along, wide, set(known))
    equal = key_of_step(equation)
    at = tuple(along is a or a in known for a in equation.invars if is_variable(a))
    place = [a is along for a in equation.invars].index(True)
    key = equal and (equal, wide, at, place)
    values = [env[a] for a in equation.invars if is_variable(a) and a in known]
    return builder.trace(step, before, *values, at=equation, key=key)


def _times(
    equation: Equation,
    along: Variable,
    wide: DTypeLike,
    known: set[Variable],
    derivative: Array,
    *values: Array,
) -> Array:
    """Returns the derivative after a step, of that before it; other tangents are 0."""
    given = iter(values)
    operands: list[Any] = []
    for atom in equation.invars:
        if atom is along:
            operands.append(derivative)
        elif is_variable(atom) and atom in known:
            operands.append(widened(next(given), wide))
        elif is_variable(atom):
            operands.append(filled(atom.aval.update(dtype=wide), 0.0))
        else:
            operands.append(widened(read({}, atom), wide))
    if equation.primitive.name == "convert_element_type":
        return derivative
    return _bind(equation, *operands)[0]


def _bind(equation: Equation, *operands: Any) -> list[Array]:
    with equation.ctx.manager:
        results = equation.primitive.bind(*operands, **equation.params)
    return results if equation.primitive.multiple_results else [results]


def _product(dtype: DTypeLike, tangent: Array, derivative: Array) -> Array:
    return lax.mul(tangent.astype(derivative.dtype), derivative).astype(dtype)


def _sum(values: Sequence[Array]) -> Array:
    return functools.reduce(lax.add, values)
