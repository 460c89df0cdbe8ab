"""Recognized operations that save no code: another derivative takes the place of theirs."""

import abc
import dataclasses
from typing import Any, ClassVar

from jax.extend.core import JaxprEqn
from jaxtyping import Array

from jaxcomp.transform._one_result import OneResult
from jaxcomp.transform._programs import Program


@dataclasses.dataclass(frozen=True, eq=False)
class Codeless(OneResult, abc.ABC):
    """A part of a program with one result.

    Attributes:
        operands: The variables that it reads.
        equation: The equation that makes the result.
        program: From the operands to the result.
        kind: What rules call it.
        decision: How plans list what it does not save.
    """

    operands: list[Any]
    equation: JaxprEqn
    program: Program
    kind: ClassVar[str]
    decision: ClassVar[str]

    @property
    @abc.abstractmethod
    def saved(self) -> list[Any]:
        """The variable of the shape and dtype of what is not saved."""

    @abc.abstractmethod
    def evaluate(self, *operands: Array) -> list[Array]:
        """The result, by the program's own steps, with the other derivative."""
