"""`checkpoint`: any function, with compressed residuals."""

from jaxcomp.transform._checkpoint import Checkpointed as Checkpointed
from jaxcomp.transform._checkpoint import checkpoint as checkpoint
from jaxcomp.transform._compress import compress as compress
from jaxcomp.transform._compress import plan as plan
from jaxcomp.transform._plan import CheckpointPlan as CheckpointPlan
from jaxcomp.transform._plan import PlannedValue as PlannedValue
