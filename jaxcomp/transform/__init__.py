"""Transformations of functions and models that save activations as a policy says."""

from jaxcomp.transform._checkpoint import checkpoint as checkpoint
from jaxcomp.transform._compress import compress as compress
from jaxcomp.transform._compress import policy_of as policy_of
from jaxcomp.transform._compress import uncompress as uncompress
from jaxcomp.transform._plan import Plan as Plan
from jaxcomp.transform._plan import SavedValue as SavedValue
