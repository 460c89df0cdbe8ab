"""What XLA keeps in memory for any JAX function, on a device that is here or not."""

from .analyze import analyze as analyze
from .compiling import CompileError as CompileError
from .declared import Residual as Residual
from .declared import declared_residual_bytes as declared_residual_bytes
from .declared import declared_residuals as declared_residuals
from .report import MemoryReport as MemoryReport
from .targets import mesh as mesh
from .targets import targets as targets
