"""jaxcomp: training with compressed activations in JAX.

- `compress` and `uncompress`: Flax NNX models; `checkpoint`: any JAX function.
- `plan`: what is saved for the backward pass; `check_gradients`: bias and noise of the gradient;
  `compare`: the memory of a training step by several strategies; `fit`: a strategy for a budget.
- `Policy` and `Rule`: what is saved, and how; `recipes`: policies for whole models.
- Codecs: `Quantize`, `SignAware`, `Float8`, `AvgPool`, `DualPrecision`, `BlockSparse`, ...
- `nn`, `ops`: layers and operations; `memory`: what XLA needs for a step; `models`: networks.
"""

from jaxcomp import codecs, diagnostics, memory, models, nn, ops, planning, policies
from jaxcomp.codecs import (
    AvgPool,
    BlockSparse,
    Cast,
    Codec,
    DualPrecision,
    Exact,
    Float8,
    Offload,
    Packed,
    PerSample,
    Quantize,
    SignAware,
)
from jaxcomp.diagnostics import check_gradients, plan
from jaxcomp.planning import compare, fit
from jaxcomp.policies import Policy, Rule, recipes
from jaxcomp.transform import checkpoint, compress, policy_of, uncompress

__all__ = (
    "AvgPool",
    "BlockSparse",
    "Cast",
    "Codec",
    "DualPrecision",
    "Exact",
    "Float8",
    "Offload",
    "Packed",
    "PerSample",
    "Policy",
    "Quantize",
    "Rule",
    "SignAware",
    "check_gradients",
    "checkpoint",
    "codecs",
    "compare",
    "compress",
    "diagnostics",
    "fit",
    "memory",
    "models",
    "nn",
    "ops",
    "plan",
    "planning",
    "policies",
    "policy_of",
    "recipes",
    "uncompress",
)


def __dir__() -> tuple[str, ...]:
    return __all__


__version__ = "1.0.0"
