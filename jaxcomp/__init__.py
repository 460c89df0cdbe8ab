"""jaxcomp: training with compressed activations in JAX."""

from jaxcomp import memory as memory
from jaxcomp import models as models
from jaxcomp import nn as nn
from jaxcomp import ops as ops
from jaxcomp import policies as policies
from jaxcomp import recipes as recipes
from jaxcomp import training as training
from jaxcomp import ways as ways
from jaxcomp.codecs import AvgPool as AvgPool
from jaxcomp.codecs import Cast as Cast
from jaxcomp.codecs import Codec as Codec
from jaxcomp.codecs import DualPrecision as DualPrecision
from jaxcomp.codecs import Encoded as Encoded
from jaxcomp.codecs import Exact as Exact
from jaxcomp.codecs import Packed as Packed
from jaxcomp.codecs import PerSample as PerSample
from jaxcomp.codecs import Quantize as Quantize
from jaxcomp.codecs import SignAware as SignAware
from jaxcomp.gradients import check_gradients as check_gradients
from jaxcomp.residuals import compiler_options as compiler_options
from jaxcomp.rules import Plan as Plan
from jaxcomp.rules import Rule as Rule
from jaxcomp.rules import Rules as Rules
from jaxcomp.rules import apply as apply
