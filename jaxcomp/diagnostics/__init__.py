"""What a policy does to a model: bytes, bias and noise of gradients, clipped values, bits."""

from jaxcomp.diagnostics._bits import BitPlanner as BitPlanner
from jaxcomp.diagnostics._bits import plan_bits as plan_bits
from jaxcomp.diagnostics._clipping import clipped as clipped
from jaxcomp.diagnostics._gradients import check_gradients as check_gradients
from jaxcomp.diagnostics._storage import Storage as Storage
from jaxcomp.diagnostics._storage import storage as storage
