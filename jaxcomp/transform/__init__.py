"""`checkpoint`: any function, with compressed residuals."""

from jaxcomp.transform.checkpoint import Checkpointed as Checkpointed
from jaxcomp.transform.checkpoint import checkpoint as checkpoint
from jaxcomp.transform.compress import compress as compress
from jaxcomp.transform.compress import plan as plan
from jaxcomp.transform.plan import CheckpointPlan as CheckpointPlan
from jaxcomp.transform.plan import PlannedValue as PlannedValue
