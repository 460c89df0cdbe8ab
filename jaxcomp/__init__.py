"""jaxcomp: training with compressed activations in JAX."""

from jaxcomp.codecs import AvgPool as AvgPool
from jaxcomp.codecs import Cast as Cast
from jaxcomp.codecs import Codec as Codec
from jaxcomp.codecs import Encoded as Encoded
from jaxcomp.codecs import Exact as Exact
from jaxcomp.codecs import Packed as Packed
from jaxcomp.codecs import Quantize as Quantize
from jaxcomp.rules import Rule as Rule
