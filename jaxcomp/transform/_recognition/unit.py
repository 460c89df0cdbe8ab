"""Recognized operations, and what they save by."""

import abc
import dataclasses
from typing import Any, ClassVar

from jaxtyping import Array

from jaxcomp.codecs import Codec
from jaxcomp.memory._source_line import source_line
from jaxcomp.ops._curves import Curve
from jaxcomp.transform._program.origins import module_path
from jaxcomp.transform._program.program import Program, variables
from jaxcomp.transform._program.types import Equation
from jaxcomp.transform._recognition.batch_norms import BatchNorm
from jaxcomp.transform._recognition.curved_norms import CurvedNorm


class OneResult:
    """An operation whose result one equation makes."""

    equation: Equation

    @property
    def origin(self) -> Equation:
        """The equation that makes the result."""
        return self.equation

    @property
    def results(self) -> list[Any]:
        """The variable that it makes."""
        return list(self.equation.outvars)


@dataclasses.dataclass(frozen=True, eq=False)
class Activation:
    """An activation function of a program.

    Attributes:
        curve: The function of which it has the equations.
        program: It as the program has it.
        equation: The equation that makes its result.
    """

    curve: Curve
    program: Program
    equation: Equation


@dataclasses.dataclass(frozen=True, eq=False)
class NormAct:
    """Batch norms, a skip connection, a ReLU and a max pool, as far as they are there.

    Attributes:
        norms: The norm of the main branch and, if it has one, that of the skip connection.
        residual: Skip connection without a norm, or None.
        relu: Whether there is a ReLU.
        pool: Shape, strides and padding of a max pool's windows, or None.
        equation: The equation that makes the result.
        origin: The equation that makes the result of the first norm.
        pooled_by: The equation of the max pool, or None.
    """

    norms: tuple[BatchNorm, ...]
    residual: Any
    relu: bool
    pool: Any
    equation: Equation
    origin: Equation
    pooled_by: Equation | None = None
    kind = "norm_act"

    @property
    def operands(self) -> list[Any]:
        """The variables that it reads."""
        of_norms = [v for n in self.norms for v in (n.x, n.scale, n.bias)]
        return [v for v in (*of_norms, self.residual) if v is not None]

    @property
    def results(self) -> list[Any]:
        """The variables that it makes."""
        return [self.equation.outvars[0], *(v for n in self.norms for v in (n.mean, n.variance))]

    @property
    def is_coded(self) -> bool:
        """Whether the result has a code."""
        return self.relu

    @property
    def saved(self) -> list[Any]:
        """Variables of the shapes and dtypes of the arrays that have a code."""
        makes = [self.equation.outvars[0]] if self.residual is not None or self.pool else []
        return [*(n.x for n in self.norms), *makes]

    @property
    def feature(self) -> int:
        """The feature axis."""
        return self.norms[0].norm.feature


@dataclasses.dataclass(frozen=True, eq=False)
class NormCurve:
    """A norm of any groups of elements, and an activation function.

    Attributes:
        norm: The norm.
        activation: The function.
        origin: The equation that makes the result of the norm.
    """

    norm: CurvedNorm
    activation: Activation
    origin: Equation
    kind = "norm_act"
    is_coded = True

    @property
    def equation(self) -> Equation:
        """The equation that makes the result."""
        return self.activation.equation

    @property
    def operands(self) -> list[Any]:
        """The variables that it reads."""
        return [self.norm.x, *self.norm.parameters]

    @property
    def results(self) -> list[Any]:
        """The variables that it makes."""
        return [*self.equation.outvars, self.norm.mean, self.norm.variance]

    @property
    def saved(self) -> list[Any]:
        """The variable of the shape and dtype of the array that has a code."""
        return [self.norm.x]

    @property
    def feature(self) -> int:
        """The feature axis."""
        return self.norm.norm.feature


@dataclasses.dataclass(frozen=True, eq=False)
class MaxPool(OneResult):
    """A max pool alone.

    Attributes:
        pool: Shape, strides and padding of its windows.
        equation: Its equation.
        feature: The feature axis.
    """

    pool: Any
    equation: Equation
    feature: int
    kind = "max_pool"

    @property
    def operands(self) -> list[Any]:
        """The variable that it reads."""
        return variables(self.equation.invars)

    @property
    def saved(self) -> list[Any]:
        """The variable of the shape of its index."""
        return list(self.equation.outvars)


@dataclasses.dataclass(frozen=True, eq=False)
class Gate(OneResult):
    """A product of a coded array and one factor for each channel of each sample.

    Attributes:
        x: The coded array.
        factor: The factor.
        equation: The equation of the product.
    """

    x: Any
    factor: Any
    equation: Equation
    kind = "gate"

    @property
    def operands(self) -> list[Any]:
        """The variables that it reads."""
        return [self.x, self.factor]

    @property
    def saved(self) -> list[Any]:
        """Nothing is encoded."""
        return []


@dataclasses.dataclass(frozen=True, eq=False)
class Concatenation(OneResult):
    """A concatenation of the channels of arrays, some of which other units encode.

    Attributes:
        operands: The arrays.
        saved: Those that no other unit encodes.
        equation: The equation of the concatenation.
        feature: The feature axis.
    """

    operands: list[Any]
    saved: list[Any]
    equation: Equation
    feature: int
    kind = "concatenation"


@dataclasses.dataclass(frozen=True, eq=False)
class CodedActivation(OneResult):
    """An activation function, or its product with another value, as in a gated linear unit.

    Its operands have one code each, which serve the derivatives and what reads the result.

    Attributes:
        operands: The argument of the function, and the other value if there is one.
        curve: The function.
        program: From the operands to the result.
        equation: The equation that makes the result.
        readers: The products and convolutions that read it.
        feature: The feature axis.
    """

    operands: list[Any]
    curve: Curve
    program: Program
    equation: Equation
    readers: list[Equation]
    feature: int
    kind = "activation"

    @property
    def saved(self) -> list[Any]:
        """The variables that have a code."""
        return self.operands


@dataclasses.dataclass(frozen=True, eq=False)
class Product(OneResult):
    """A convolution with a parameter, or a product with one, as of a linear layer.

    Attributes:
        kind: "conv" or "dot".
        x: The activation, which has a code.
        kernel: The parameter.
        equation: Its equation.
    """

    kind: str
    x: Any
    kernel: Any
    equation: Equation

    @property
    def operands(self) -> list[Any]:
        """The variables that it reads."""
        return [self.x, self.kernel]

    @property
    def saved(self) -> list[Any]:
        """The variable that has a code."""
        return [self.x]


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
    equation: Equation
    program: Program
    kind: ClassVar[str]
    decision: ClassVar[str]

    @property
    @abc.abstractmethod
    def saved(self) -> list[Any]:
        """The variable of the shape and dtype of what is not saved."""

    @abc.abstractmethod
    def evaluate(self, *operands: Array) -> list[Array]:
        """Returns the result, by the program's own steps, with the other derivative."""


Unit = NormAct | NormCurve | MaxPool | Gate | Concatenation | CodedActivation | Product | Codeless


@dataclasses.dataclass(frozen=True, eq=False)
class Recognized:
    """A unit and what it saves by.

    Attributes:
        unit: The unit.
        codec: Its codec; None if it has none.
    """

    unit: Unit
    codec: Codec | None

    @property
    def path(self) -> str:
        """Path of the norm's or the pool's module."""
        return module_path(self.unit.origin)

    @property
    def decision(self) -> str:
        """How what it saves is saved, as plans list it."""
        return self.unit.decision if isinstance(self.unit, Codeless) else str(self.codec)

    @property
    def source(self) -> str:
        """Line of the user's code that calls it."""
        return source_line(self.unit.origin)
