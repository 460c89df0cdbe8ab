"""Reports the memory that XLA allocates for a JAX function, without running the function.

The package works on any function that JAX can trace. It imports nothing else of jaxcomp. The target
may be an absent device: the program is then compiled ahead of time for a GPU or TPU that is not
attached.
"""

from jaxcomp.memory._analyze import analyze as analyze
from jaxcomp.memory._batch import max_batch as max_batch
from jaxcomp.memory._compiling import CompileError as CompileError
from jaxcomp.memory._declared import Residual as Residual
from jaxcomp.memory._declared import declared_residual_bytes as declared_residual_bytes
from jaxcomp.memory._declared import declared_residuals as declared_residuals
from jaxcomp.memory._live_bytes import Timeline as Timeline
from jaxcomp.memory._live_bytes import timeline as timeline
from jaxcomp.memory._options import compiler_options as compiler_options
from jaxcomp.memory._report import MemoryReport as MemoryReport
from jaxcomp.memory._targets import mesh as mesh
from jaxcomp.memory._targets import targets as targets
from jaxcomp.memory._timeline_draw import draw_html as draw_html
from jaxcomp.memory._watch import Watch as Watch
from jaxcomp.memory._watch import watch as watch
