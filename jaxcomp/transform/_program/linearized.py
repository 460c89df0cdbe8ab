"""A function's program beside that of its derivative."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jaxtyping import Array

from jaxcomp.transform._program.builder import flat
from jaxcomp.transform._program.program import Program, avals, is_reference
from jaxcomp.transform._program.types import Atom


@dataclasses.dataclass(frozen=True)
class Linearized:
    """A function's forward program, and its derivative at a point as a linear program.

    Attributes:
        forward: From the function's arguments to its results and, after them, the coefficients.
        linear: From the coefficients and, after them, the tangents of the arguments that are
            differentiated, to the tangents of the results that are.
        results: Number of the function's results.
        active: The arguments that are differentiated.
        smooth: The results that have a tangent.
    """

    forward: Program
    linear: Program
    results: int
    active: tuple[int, ...]
    smooth: tuple[int, ...]

    @property
    def coefficients(self) -> list[Any]:
        """The variables of the forward program that are the linear one's coefficients."""
        count = len(self.linear.arguments) - len(self.active)
        return self.forward.results[self.results :][:count]


def linearize(program: Program, active: Sequence[int]) -> Linearized:
    """Takes the derivative of a flat program with respect to some of its arguments.

    Every coefficient of the linear program is computed in the forward one, at the exact values.

    Raises:
        NotImplementedError: If the linear program reads or writes references.
    """
    arguments, results = avals(program.arguments), avals(program.results)
    _check_no_references([program.arguments[i] for i in active])
    smooth = [i for i, r in enumerate(results) if jnp.issubdtype(r.dtype, jnp.inexact)]
    linear: list[Jaxpr] = []  # without its constants, which are tracers of the forward program

    def both(*values: Array) -> Any:
        def at(*chosen: Array) -> Any:
            full = dict(enumerate(values)) | dict(zip(active, chosen, strict=True))
            made = program(*full.values())
            return [made[i] for i in smooth], made

        chosen = [values[i] for i in active]
        _, tangents, made = jax.linearize(at, *chosen, has_aux=True)
        traced = jax.make_jaxpr(tangents)(*[arguments[i] for i in active])
        linear.append(traced.jaxpr)
        return made, traced.consts

    forward = flat(Program.trace(both, *arguments))
    (opened,) = linear
    whole = Program(opened.replace(constvars=[], invars=[*opened.constvars, *opened.invars]))
    _check_no_references([*whole.arguments, *whole.made_by])
    return Linearized(forward, flat(whole), len(results), tuple(active), tuple(smooth))


def _check_no_references(atoms: Sequence[Atom]) -> None:
    """Raises a NotImplementedError if an atom of a linear program is a reference."""
    refs = [atom.aval for atom in atoms if is_reference(atom)]
    if refs:
        raise NotImplementedError(
            f"fn makes or differentiates a reference of jax.new_ref ({refs[0]}): expected arrays "
            "alone. Use x.at[...].set or the carry of jax.lax.scan; make a reference that counts "
            "outside of fn"
        )


def transpose(linear: Program, count: int) -> Program:
    """Returns the backward program of a linear one.

    Args:
        linear: From coefficients and tangents to tangents.
        count: How many of its arguments are tangents.

    Returns:
        From the coefficients and the cotangents of the results to those of these arguments.
    """
    kinds = avals(linear.arguments)
    coefficients, tangents = kinds[: len(kinds) - count], kinds[len(kinds) - count :]

    def backward(coefficients: list[Array], cotangents: list[Array]) -> Any:
        def pushed(*tangents: Array) -> list[Any]:
            return linear(*coefficients, *tangents)

        return jax.linear_transpose(pushed, *tangents)(cotangents)

    return flat(Program.trace(backward, coefficients, avals(linear.results)))
