"""What XLA keeps in memory for any JAX function, on a device that is here or not."""

from .analyze import analyze as analyze
from .audit import audit as audit
from .batch import max_batch as max_batch
from .comparison import Comparison as Comparison
from .comparison import compare as compare
from .compiling import CompileError as CompileError
from .declared import Residual as Residual
from .declared import declared_residual_bytes as declared_residual_bytes
from .declared import declared_residuals as declared_residuals
from .live_bytes import Timeline as Timeline
from .live_bytes import timeline as timeline
from .report import MemoryReport as MemoryReport
from .targets import mesh as mesh
from .targets import targets as targets
from .timeline_draw import draw_html as draw_html
from .timeline_draw import draw_png as draw_png
