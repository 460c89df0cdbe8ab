"""Flax NNX layers that keep compressed residuals."""

from jaxcomp.nn.activation import MaxPool as MaxPool
from jaxcomp.nn.activation import ReLU as ReLU
from jaxcomp.nn.linear import Conv as Conv
from jaxcomp.nn.linear import Linear as Linear
from jaxcomp.nn.norm import BatchNorm as BatchNorm
from jaxcomp.nn.norm_act import ConvNormAct as ConvNormAct
from jaxcomp.nn.norm_act import NormAct as NormAct
from jaxcomp.nn.remat import remat_blocks as remat_blocks
