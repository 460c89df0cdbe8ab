"""What a policy does to a model: bias and noise of gradients, clipped values, bits of layers."""

from jaxcomp.diagnostics._bits import BitPlanner as BitPlanner
from jaxcomp.diagnostics._bits import plan_bits as plan_bits
from jaxcomp.diagnostics._clipping import clipped as clipped
from jaxcomp.diagnostics._errors import Errors as Errors
from jaxcomp.diagnostics._gradients import GradientReport as GradientReport
from jaxcomp.diagnostics._gradients import check_gradients as check_gradients
from jaxcomp.diagnostics._plan import plan as plan
