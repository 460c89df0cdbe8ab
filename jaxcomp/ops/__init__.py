"""Operations on arrays with an exact forward pass and a compressed saved residual."""

from jaxcomp.ops._activation import dropout as dropout
from jaxcomp.ops._activation import gelu as gelu
from jaxcomp.ops._activation import relu as relu
from jaxcomp.ops._activation import silu as silu
from jaxcomp.ops._affine import affine as affine
from jaxcomp.ops._coded_array import CodedArray as CodedArray
from jaxcomp.ops._coded_array import encode_activation as encode_activation
from jaxcomp.ops._coded_array import value as value
from jaxcomp.ops._conv import conv_general_dilated as conv_general_dilated
from jaxcomp.ops._conv import conv_transpose as conv_transpose
from jaxcomp.ops._linear import dot_general as dot_general
from jaxcomp.ops._linear_log_probs import LogProbs as LogProbs
from jaxcomp.ops._linear_log_probs import linear_cross_entropy as linear_cross_entropy
from jaxcomp.ops._linear_log_probs import linear_log_probs as linear_log_probs
from jaxcomp.ops._norm import batch_norm as batch_norm
from jaxcomp.ops._norm import layer_norm as layer_norm
from jaxcomp.ops._norm_act import clipped as clipped
from jaxcomp.ops._norm_act import norm_act as norm_act
from jaxcomp.ops._pooling import Padding as Padding
from jaxcomp.ops._pooling import max_pool as max_pool
from jaxcomp.ops._scaled_linear import scaled_linear as scaled_linear
from jaxcomp.ops._sensitivity import Sink as Sink
