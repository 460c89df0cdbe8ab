"""Models whose activations are stored by rules."""

from jaxcomp.models import catalog as catalog
from jaxcomp.models import resmlp as resmlp
from jaxcomp.models import resnet as resnet
from jaxcomp.models import steps as steps
