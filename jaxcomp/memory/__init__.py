"""Reports the memory that XLA allocates for a JAX function, without running the function.

The package works on any function that JAX can trace. It imports nothing else of jaxcomp. The target
may be an absent device: the program is then compiled ahead of time for a GPU or TPU that is not
attached.
"""

from ._analyze import analyze as analyze
from ._batch import max_batch as max_batch
from ._compiling import CompileError as CompileError
from ._declared import Residual as Residual
from ._declared import declared_residual_bytes as declared_residual_bytes
from ._declared import declared_residuals as declared_residuals
from ._live_bytes import Timeline as Timeline
from ._live_bytes import timeline as timeline
from ._options import compiler_options as compiler_options
from ._report import MemoryReport as MemoryReport
from ._targets import mesh as mesh
from ._targets import targets as targets
from ._timeline_draw import draw_html as draw_html
