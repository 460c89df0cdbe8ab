"""What recognized operations of one equation at their end have in common."""

from typing import Any

from jax.extend.core import JaxprEqn


class OneResult:
    """An operation whose result one equation makes."""

    equation: JaxprEqn

    @property
    def origin(self) -> JaxprEqn:
        """The equation that makes the result."""
        return self.equation

    @property
    def results(self) -> list[Any]:
        """The variable that it makes."""
        return list(self.equation.outvars)
