"""What XLA keeps in memory for any JAX function, on a device that is here or not."""

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
