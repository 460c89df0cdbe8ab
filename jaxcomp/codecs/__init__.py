"""Codecs: each encodes one array in fewer bytes and decodes it to the same shape and dtype."""

from jaxcomp.codecs._block_sparse import BlockSparse as BlockSparse
from jaxcomp.codecs._codec import Cast as Cast
from jaxcomp.codecs._codec import Codec as Codec
from jaxcomp.codecs._codec import Encoded as Encoded
from jaxcomp.codecs._codec import Exact as Exact
from jaxcomp.codecs._dual import DualPrecision as DualPrecision
from jaxcomp.codecs._float8 import Float8 as Float8
from jaxcomp.codecs._offload import Offload as Offload
from jaxcomp.codecs._packed import Packed as Packed
from jaxcomp.codecs._per_sample import PerSample as PerSample
from jaxcomp.codecs._pool import AvgPool as AvgPool
from jaxcomp.codecs._quantize import Quantize as Quantize
from jaxcomp.codecs._sign_aware import SignAware as SignAware
