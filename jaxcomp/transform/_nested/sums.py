"""Sums over the iterations of a loop, of which each term is a matrix product.

The gradient of a parameter that all iterations read is such a sum. One product for a chunk of
iterations takes its place: each product by itself would read and write the whole sum.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from jaxcomp.transform._program.builder import flat
from jaxcomp.transform._program.primitives import MOVES
from jaxcomp.transform._program.program import Program, apply, needed
from jaxcomp.transform._program.types import Equation, is_variable

Step = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A sum over iterations.

    Attributes:
        position: Its position among the leaves of the state.
        product: The equation of a term's product.
        moves: What is done to the product, in order.
    """

    position: int
    product: Equation
    moves: list[Equation]

    def of_chunk(self, first: Array, second: Array, dtype: DTypeLike) -> Array:
        """Returns the sum of a chunk's terms, from the operands of all products."""
        params = self.product.params
        contracted, batched = params["dimension_numbers"]
        of_first, of_second = ([0, *(axis + 1 for axis in axes)] for axes in contracted)
        batch_of_first, batch_of_second = ([axis + 1 for axis in axes] for axes in batched)
        given = params["preferred_element_type"]
        total = lax.dot_general(
            first,
            second,
            ((of_first, of_second), (batch_of_first, batch_of_second)),
            precision=params["precision"],
            preferred_element_type=jnp.promote_types(given or first.dtype, dtype),
        )
        for move in self.moves:
            (total,) = apply(move, [total])
        return total


def products_at_once(
    step: Step, state: PyTree, x: PyTree, count: int
) -> tuple[Step, Callable[[PyTree, PyTree], PyTree]]:
    """Divides an iteration into all but such products, and the products of a chunk.

    Args:
        step: From the state and what an iteration reads to the next state and its results.
        state: Shapes and dtypes of the state. Its first leaves may be sums.
        x: Shapes and dtypes of what an iteration reads.
        count: How many leaves of the state may be sums.

    Returns:
        An iteration that leaves these sums alone, and whose results are its results and operands
        of products; and what adds the products of a chunk to the sums of a state.
    """
    leaves, tree = jax.tree.flatten((state, x))
    trees: list[Any] = []

    def run(*leaves: Array) -> list[Array]:
        made, of_results = jax.tree.flatten(step(*jax.tree.unflatten(tree, leaves)))
        trees.append(of_results)
        return made

    program = flat(Program.trace(run, *leaves))
    sums = [found for i in range(count) if (found := _sum(program, i)) is not None]
    results = list(program.results)
    for found in sums:
        results[found.position] = program.arguments[found.position]
    operands = [atom for found in sums for atom in found.product.invars]
    all_results = [*results, *operands]
    equations = needed(program.equations, all_results)
    rest = Program(program.jaxpr.replace(outvars=all_results, eqns=equations), program.consts)

    def without_products(state: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        made = rest(*jax.tree.leaves((state, x)))
        state, ys = jax.tree.unflatten(trees[-1], made[: len(results)])
        return state, (ys, made[len(results) :])

    def with_products(state: PyTree, operands: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten(state)
        for found, first, second in zip(sums, operands[::2], operands[1::2], strict=True):
            before = leaves[found.position]
            leaves[found.position] = before + found.of_chunk(first, second, before.dtype)
        return jax.tree.unflatten(tree, leaves)

    return without_products, with_products


def _sum(program: Program, position: int) -> _Sum | None:
    """Returns the sum that a leaf of the state is; None if it is none, or not of products."""
    argument, result = program.arguments[position], program.results[position]
    adds = program.made_by.get(result) if is_variable(result) else None
    if adds is None or adds.primitive.name not in ("add", "add_any"):
        return None
    terms = [atom for atom in adds.invars if atom is not argument]
    moves: list[Equation] = []
    value = terms[0] if len(terms) == 1 else None
    while is_variable(value) and (equation := program.made_by.get(value)) is not None:
        name = equation.primitive.name
        if name == "dot_general":
            is_of_iteration = all(map(is_variable, equation.invars))
            # An algorithm that is asked for may not accumulate in the sum's dtype.
            is_any = isinstance(equation.params["precision"], tuple | None)
            return _Sum(position, equation, moves[::-1]) if is_of_iteration and is_any else None
        if name not in MOVES or len(equation.outvars) > 1:
            return None
        moves.append(equation)
        value = equation.invars[0]
    return None
