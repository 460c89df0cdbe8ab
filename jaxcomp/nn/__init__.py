"""Flax NNX layers that keep compressed residuals."""

from jaxcomp.nn.activation import GELU as GELU
from jaxcomp.nn.activation import Dropout as Dropout
from jaxcomp.nn.activation import MaxPool as MaxPool
from jaxcomp.nn.activation import ReLU as ReLU
from jaxcomp.nn.activation import SiLU as SiLU
from jaxcomp.nn.affine import Affine as Affine
from jaxcomp.nn.coded import Sink as Sink
from jaxcomp.nn.linear import Conv as Conv
from jaxcomp.nn.linear import ConvTranspose as ConvTranspose
from jaxcomp.nn.linear import Linear as Linear
from jaxcomp.nn.norm import BatchNorm as BatchNorm
from jaxcomp.nn.norm import LayerNorm as LayerNorm
from jaxcomp.nn.norm_act import ConvNormAct as ConvNormAct
from jaxcomp.nn.norm_act import NormAct as NormAct
from jaxcomp.nn.remat import remat_blocks as remat_blocks
