"""Operations on arrays: exact forward, compressed residual."""

from jaxcomp.ops.activated import Activation as Activation
from jaxcomp.ops.activated import encode_activation as encode_activation
from jaxcomp.ops.activated import value as value
from jaxcomp.ops.activation import dropout as dropout
from jaxcomp.ops.activation import gelu as gelu
from jaxcomp.ops.activation import relu as relu
from jaxcomp.ops.activation import silu as silu
from jaxcomp.ops.affine import affine as affine
from jaxcomp.ops.conv import conv_general_dilated as conv_general_dilated
from jaxcomp.ops.conv import conv_transpose as conv_transpose
from jaxcomp.ops.conv_norm_act import conv_norm_act as conv_norm_act
from jaxcomp.ops.in_turn import in_turn as in_turn
from jaxcomp.ops.linear import dot_general as dot_general
from jaxcomp.ops.norm import batch_norm as batch_norm
from jaxcomp.ops.norm import layer_norm as layer_norm
from jaxcomp.ops.norm_act import clipped as clipped
from jaxcomp.ops.norm_act import norm_act as norm_act
from jaxcomp.ops.pooling import Padding as Padding
from jaxcomp.ops.pooling import avg_pool as avg_pool
from jaxcomp.ops.pooling import max_pool as max_pool
from jaxcomp.ops.scaled_linear import scaled_linear as scaled_linear
from jaxcomp.ops.sensitivity import Sink as Sink
