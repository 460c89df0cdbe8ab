"""Flax NNX layers with compressed saved activations."""

from jaxcomp.nn._activation import GELU as GELU
from jaxcomp.nn._activation import Dropout as Dropout
from jaxcomp.nn._activation import MaxPool as MaxPool
from jaxcomp.nn._activation import ReLU as ReLU
from jaxcomp.nn._activation import SiLU as SiLU
from jaxcomp.nn._affine import Affine as Affine
from jaxcomp.nn._coded import Coded as Coded
from jaxcomp.nn._coded import Sink as Sink
from jaxcomp.nn._linear import Conv as Conv
from jaxcomp.nn._linear import ConvTranspose as ConvTranspose
from jaxcomp.nn._linear import Linear as Linear
from jaxcomp.nn._norm import BatchNorm as BatchNorm
from jaxcomp.nn._norm import LayerNorm as LayerNorm
from jaxcomp.nn._norm_act import ConvNormAct as ConvNormAct
from jaxcomp.nn._norm_act import NormAct as NormAct
