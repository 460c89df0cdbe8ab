"""Image classifiers built of `jaxcomp.nn`, and their training steps."""

from jaxcomp.models import catalog as catalog
from jaxcomp.models import resmlp as resmlp
from jaxcomp.models import resnet as resnet
from jaxcomp.models import steps as steps
from jaxcomp.models import training as training
