"""Codecs: one array -> fewer bytes -> one array."""

from jaxcomp.codecs.block_sparse import BlockSparse as BlockSparse
from jaxcomp.codecs.codec import Cast as Cast
from jaxcomp.codecs.codec import Codec as Codec
from jaxcomp.codecs.codec import Encoded as Encoded
from jaxcomp.codecs.codec import Exact as Exact
from jaxcomp.codecs.dual import DualPrecision as DualPrecision
from jaxcomp.codecs.offload import Offload as Offload
from jaxcomp.codecs.packed import Packed as Packed
from jaxcomp.codecs.per_sample import PerSample as PerSample
from jaxcomp.codecs.pool import AvgPool as AvgPool
from jaxcomp.codecs.quantize import Quantize as Quantize
from jaxcomp.codecs.sign_aware import SignAware as SignAware
