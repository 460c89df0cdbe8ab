"""`scan` loops inside of a function: each iteration stores what the policy says of its values."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, PyTree

from jaxcomp._core.custom_derivative import Differentiable, undivided
from jaxcomp._core.linear_map import ByPosition
from jaxcomp._core.shard_map import filled
from jaxcomp.codecs import noise
from jaxcomp.codecs._codec import Seed
from jaxcomp.transform._execution.backward import used_arguments
from jaxcomp.transform._nested.chunks import chunk_length, decoded_chunk, encoded_chunk
from jaxcomp.transform._nested.scheduled import Nested, Outer, with_zeros
from jaxcomp.transform._nested.sums import products_at_once
from jaxcomp.transform._program.primitives import tangents_of
from jaxcomp.transform._program.program import Program, avals, is_of_collective
from jaxcomp.transform._program.types import Atom, Equation, is_variable

_SCAN = "scan"


def is_loop(equation: Equation) -> bool:
    """Returns whether it is a `scan` whose only effects, if any, are those of collectives."""
    return equation.primitive.name == _SCAN and all(map(is_of_collective, equation.effects))


class Loop(Differentiable[Nested]):
    """A `scan` whose iterations store by the schedule of its body.

    Attributes:
        body: The program of an iteration.
        consts: How many operands are the same in each iteration.
        carries: How many are the state that an iteration passes on to the next.
        at_x: Position of the first operand of which each iteration reads a part.
    """

    def __init__(self, equation: Equation, number: int, is_free: list[bool], outer: Outer) -> None:
        """Reads the equation of a loop.

        Args:
            equation: The equation.
            number: One that tells the loop's noise from that of others.
            is_free: Whether each operand is free to be had again.
            outer: The program that the loop is in.
        """
        self.body = Program.of(equation.params["jaxpr"])
        self.consts, self.carries = counts(equation, self.body)
        self.at_x = self.consts + self.carries
        self._equation, self._number, self._outer = equation, number, outer
        self._kinds = avals(self.body.arguments)
        self._coded = [
            i for i in range(self.consts, len(is_free)) if i < self.at_x or not is_free[i]
        ]

    def evaluate(self, seed: Seed, arguments: list[Array]) -> list[Array]:
        """Returns the results of the stock loop."""
        consts, start, xs = self._divided(arguments)

        def step(carry: list[Array], x: list[Array]) -> tuple[list[Any], list[Any]]:
            results = self.body(*consts, *carry, *x)
            return results[: self.carries], results[self.carries :]

        final, ys = self._scan(step, start, xs)
        return [*final, *ys]

    def choose(self, seed: Seed, arguments: list[Array], differentiated: list[int]) -> Nested:
        """Returns the schedule of the body."""
        length = self._equation.params["length"]
        active = _active(self.body, {*differentiated}, self.consts, self.carries)
        body = self._outer.scheduled(self.body, self._equation, active, self._coded, length)
        _, _, xs = self._divided(arguments)
        chunk = chunk_length(body.schedule, length, xs, self._outer.context.limits)
        return self._outer.noted(Nested((body,), length, chunk))

    def forward(
        self, choice: Nested, seed: Seed, arguments: list[Array]
    ) -> tuple[list[Array], PyTree]:
        """Returns the results, and what iterations stored beside operands of the loop."""
        (body,) = choice.programs

        def run(seed: Seed, arguments: list[Array]) -> Any:
            consts, start, xs = self._divided(arguments)

            def step(carry: PyTree, x: list[Array]) -> tuple[Any, Any]:
                index, state = carry
                if self._outer.context.encodes:
                    own_seed = noise.folded(noise.folded(seed, self._number), index)
                else:
                    own_seed = None
                results, (stored, used) = choice.iteration.forward(own_seed, [*consts, *state, *x])
                inside = {i: value for i, value in used.items() if not self._is_operand(i)}
                state, ys = results[: self.carries], results[self.carries :]
                return (index + jnp.uint32(1), state), (
                    ys,
                    (stored, inside),
                    own_seed if choice.chunk > 1 else (),
                )

            def encode(state: PyTree, chunk: Any) -> Any:
                ys, (stored, inside), seeds = chunk
                if choice.chunk > 1:
                    stored = encoded_chunk(body.schedule, stored, seeds)
                return state, (ys, (stored, inside))

            return self._scan(step, (jnp.uint32(0), start), xs, choice.chunk, after=encode)

        (count, final), (ys, saved) = undivided(run, seed, arguments)
        # No policy decides about values that are ours by this name, such as the iteration count.
        saved, _ = jax.tree.map(lambda leaf: checkpoint_name(leaf, choice.name), (saved, count))
        used = used_arguments(body.schedule)
        operands = {i: arguments[i] for i in used if self._is_operand(i)}
        return [*final, *ys], (saved, operands)

    def linear(self, choice: Nested, residual: PyTree, tangents: ByPosition) -> ByPosition:
        """Returns the tangents of results, by a loop in the same order."""
        (body,) = choice.programs
        saved, whole, stacked = self._split(residual)
        fixed = {i: move for i, move in tangents.items() if i < self.consts}
        along = {i: move for i, move in tangents.items() if i >= self.at_x}
        start = {
            i: tangents[i] if i in tangents else filled(self._kinds[i], 0.0)
            for i in body.schedule.active
            if self.consts <= i < self.at_x
        }

        def step(state: PyTree, x: PyTree) -> tuple[dict[int, Any], dict[int, Any]]:
            (stored, inside), operands, moving = x
            moves = fixed | state | moving
            results = body.linear((stored, inside | operands | whole), moves)
            return {i: results[i - self.consts] for i in state}, {
                i: move for i, move in results.items() if i >= self.carries
            }

        final, ys = self._scan(step, start, (saved, stacked, along))
        outputs = avals(self._equation.outvars)
        still = {i: filled(outputs[i], 0.0) for i in body.schedule.smooth}
        return still | {i - self.consts: move for i, move in final.items()} | ys

    def backward(self, choice: Nested, residual: PyTree, cotangents: ByPosition) -> ByPosition:
        """Returns the cotangents of operands, by a loop in the opposite order."""
        (body,) = choice.programs
        active, smooth = body.schedule.active, body.schedule.smooth
        summed = [i for i in active if i < self.consts]
        carried = [i for i in active if self.consts <= i < self.at_x]
        along = [i for i in active if i >= self.at_x]
        saved, whole, stacked = self._split(residual)
        arriving = with_zeros(cotangents, smooth, self._equation.outvars)

        def step(carry: PyTree, x: PyTree) -> tuple[Any, dict[int, Any]]:
            sums, of_carry = carry
            (stored, inside), operands, of_ys = x
            of_results = {i - self.consts: c for i, c in of_carry.items()} | of_ys
            residual = stored, inside | operands | whole
            of_arguments = choice.iteration.backward(residual, of_results)
            sums = {i: sums[i] + of_arguments[i] for i in summed}
            return (sums, {i: of_arguments[i] for i in carried}), {
                i: of_arguments[i] for i in along
            }

        start = (
            {i: filled(self._kinds[i], 0.0) for i in summed},
            {i: arriving[i - self.consts] for i in carried},
        )

        def decode(chunk: Any) -> Any:
            (stored, inside), operands, of_ys = chunk
            return (decoded_chunk(body.schedule, stored), inside), operands, of_ys

        xs = saved, stacked, {i: c for i, c in arriving.items() if i >= self.carries}
        if choice.chunk == 1:
            (sums, first), of_xs = self._scan(step, start, xs, backwards=True)
            return sums | first | of_xs

        def first_of(xs: PyTree) -> PyTree:
            return jax.tree.map(lambda x: x[0], decode(jax.tree.map(lambda x: x[:1], xs)))

        one = jax.eval_shape(first_of, xs)
        without_products, add_products = products_at_once(step, start, one, len(summed))

        def add(state: PyTree, chunk: PyTree) -> tuple[PyTree, PyTree]:
            of_xs, operands = chunk
            return add_products(state, operands), of_xs

        (sums, first), of_xs = self._scan(
            without_products, start, xs, choice.chunk, before=decode, after=add, backwards=True
        )
        return sums | first | of_xs

    def _scan(
        self,
        step: Callable[..., tuple[PyTree, PyTree]],
        start: PyTree,
        xs: PyTree,
        chunk: int = 1,
        *,
        before: Callable[[PyTree], PyTree] = lambda xs: xs,
        after: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] = lambda state, ys: (state, ys),
        backwards: bool = False,
    ) -> Any:
        """Returns a `scan` like that of the equation, or in the opposite order.

        Args:
            step: An iteration.
            start: The first state.
            xs: What each iteration reads a part of.
            chunk: How many iterations are a chunk.
            before: What is done to what the iterations of a chunk read.
            after: What is done to their last state and to what they give.
            backwards: Whether the order is the opposite one.
        """
        params = self._equation.params
        length, reverse = params["length"], params["reverse"] != backwards
        scan = functools.partial(lax.scan, reverse=reverse)
        if chunk == 1:
            final, ys = scan(step, start, before(xs), length=length, unroll=params["unroll"])
            return after(final, ys)

        def of_chunk(state: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
            state, ys = scan(step, state, before(xs), length=chunk, unroll=params["unroll"])
            return after(state, ys)

        count = length // chunk
        divided = jax.tree.map(lambda x: x.reshape(count, chunk, *x.shape[1:]), xs)
        final, ys = scan(of_chunk, start, divided, length=count)
        return final, jax.tree.map(lambda y: y.reshape(length, *y.shape[2:]), ys)

    def _divided(self, arguments: list[Array]) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns operands that stay the same, that iterations pass on, and with parts for each."""
        return (
            arguments[: self.consts],
            arguments[self.consts : self.at_x],
            arguments[self.at_x :],
        )

    def _is_operand(self, i: int) -> bool:
        """Returns whether an argument of the body is an operand of the loop, not a seed.

        The backward pass never reads a carry as it is: an iteration stores what it needs of it.
        """
        return i < len(self._kinds)

    def _split(self, residual: PyTree) -> tuple[Any, ByPosition, ByPosition]:
        """Returns what iterations stored, and the operands of all and of each."""
        saved, operands = residual
        whole = {i: value for i, value in operands.items() if i < self.at_x}
        stacked = {i: value for i, value in operands.items() if i >= self.at_x}
        return saved, whole, stacked


def counts(equation: Equation, body: Program) -> tuple[int, int]:
    """Returns how many operands are the same in each iteration, and how many are the state.

    What is looped over, and what each iteration gives, has an axis more than in the body.
    """

    def same_rank(outside: Sequence[Atom], inside: Sequence[Atom]) -> int:
        pairs = zip(avals(outside), avals(inside), strict=True)
        return sum(outer.ndim == inner.ndim for outer, inner in pairs)

    carries = same_rank(equation.outvars, body.results)
    return same_rank(equation.invars, body.arguments) - carries, carries


def _active(body: Program, perturbed: set[int], consts: int, carries: int) -> list[int]:
    """Returns the floating-point arguments of a body that depend on the differentiated ones."""
    active = set(perturbed)
    while True:
        reached = tangents_of(body.equations, [body.arguments[i] for i in active])
        outs = body.results[:carries]
        further = {consts + i for i, v in enumerate(outs) if is_variable(v) and v in reached}
        if further <= active:
            break
        active |= further
    kinds = avals(body.arguments)
    return [i for i in sorted(active) if jnp.issubdtype(kinds[i].dtype, jnp.inexact)]
