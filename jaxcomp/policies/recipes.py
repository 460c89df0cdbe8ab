"""Recipes: functions that return a `Policy` for a whole model."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

from jaxcomp.codecs import (
    AvgPool,
    BlockSparse,
    Codec,
    DualPrecision,
    Exact,
    Packed,
    Quantize,
    SignAware,
)
from jaxcomp.codecs._block_sparse import Block, Product
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.codecs._quantize import Rounding
from jaxcomp.codecs._sign_aware import ScaleSource
from jaxcomp.policies._policy import Policy
from jaxcomp.policies._rule import Action, Rule

__all__ = (
    "actnn",
    "automatic",
    "boundary",
    "division",
    "everywhere",
    "fused",
    "pooling",
    "pruning",
    "save_names",
    "transformer",
)

Level = Literal["L0", "L1", "L2", "L3", "L4", "L5"]

_MIN_SIZE = 2**14
_PACKED = (
    Rule(Packed(bits=1), op="relu|dropout", required=False),
    Rule(Packed(bits=4), op="max_pool", required=False),
)
_REST = "affine|batch_norm|layer_norm|gelu|silu"


def everywhere(codec: Codec) -> Policy:
    """Returns one codec for everything that it can encode; masks and indices are exact and packed.

    In a model with layers of `jaxcomp.nn` these are the layers' saved activations: with `AvgPool`
    the inputs of convolutions, with `Cast` and `Quantize` those of linear layers and norms too. In
    any other model they are the values of 16,384 elements or more. `Exact()` keeps every value as
    it is.

    Args:
        codec: The codec.

    Returns:
        The policy.

    Example:
        >>> everywhere(Quantize(bits=2)).rules[0]
        Rule(Quantize(bits=2, group='channel', rounding='stochastic'), min_size=16384)
    """
    if isinstance(codec, Exact):
        return Policy((Rule("keep", required=False),))
    return Policy((Rule(codec, min_size=_MIN_SIZE), *_PACKED))


def _rest(bits: int | None, kinds: str) -> tuple[Rule, ...]:
    """Returns the rules for all else that layers of `jaxcomp.nn` and stock operations save."""
    if bits is None:
        return ()
    codec = Quantize(bits)
    of_layers = Rule(codec, op=kinds, required=False)
    return of_layers, Rule(codec, min_size=_MIN_SIZE, required=False)


def fused(bits: int = 4, scale_source: ScaleSource = "norm", kernels: bool = False) -> Policy:
    """Returns one code for each norm, addition and ReLU, which the convolutions around them share.

    For `jaxcomp.nn.ConvNormAct` and `jaxcomp.nn.NormAct`, and for stock operations: a batch norm,
    whoever wrote it, alone, or with the skip connection, `jax.nn.relu` and max pool that follow;
    and a batch, group or instance norm with the activation function that follows, such as
    `jax.nn.silu` or `leaky_relu`. Max pool indices are exact and packed. All other values are saved
    as they are.

    Args:
        bits: Bits of an element, ReLU's mask included: 2, 3 or 4.
        scale_source: "norm" takes the scales of the code from the norm's own statistics, without a
            pass over the values. With 3 and 4 bits hardly any value is beyond the last level, and
            the gradient is unbiased; with 2 bits it is biased. "range" takes the extremes of each
            channel of each sample, which costs a pass and has less noise.
        kernels: Whether programs for one NVIDIA GPU use Pallas kernels for batch norms with codes
            (`SignAware.kernels`).

    Returns:
        The policy.

    Raises:
        ValueError: If an argument is none of these.

    Example:
        >>> fused(bits=2).rules[0].action.bits
        2
    """
    return Policy(
        (Rule(SignAware(bits, scale_source=scale_source, kernels=kernels), op="norm_act"), *_PACKED)
    )


def automatic(bits: int = 4, kernels: bool = False) -> Policy:
    """Returns the default of `compress`.

    `fused` for batch norms, `transformer` for all other values.

    - A batch norm with the skip connection, ReLU and max pool that follow has one code, as in
      `fused`, which convolutions that read it share. This holds for layers of `jaxcomp.nn` and for
      stock operations, whose linear layers share it, too.
    - Masks and max pool indices are exact and packed.
    - All other values are as in `transformer`.

    Args:
        bits: Bits of an element: 3, 4, 5, 6 or 8. With 5 bits or more, batch norms are as all other
            values.
        kernels: As in `fused`.

    Returns:
        The policy.

    Raises:
        ValueError: If `bits` is none of these.

    Example:
        >>> automatic(bits=3).rules[0].op
        'norm_act'
    """
    if bits not in (3, 4, 5, 6, 8):
        raise ValueError(f"bits={bits!r}: expected 3, 4, 5, 6 or 8")
    rest = transformer(bits).rules
    rest = (*rest[:-1], dataclasses.replace(rest[-1], required=False))
    if bits > 4:
        return Policy((*_PACKED, *rest))
    unit = Rule(SignAware(bits, kernels=kernels), op="norm_act", required=False)
    return Policy((unit, *_PACKED, *rest))


def transformer(bits: int = 4, rounding: Rounding = "stochastic") -> Policy:
    """Returns a recipe for transformers of any library's layers.

    Values of 16,384 elements or more are quantized, without bias but for that of a norm's input
    (one part in its number of features). With 3 bits or more, a GELU or SiLU between two products
    has one code, and a gated linear unit two. Values that an attention under `jax.checkpoint`, a
    loop or a `jax.custom_vjp` reads have to be exact. Queries, keys and values are recomputed from
    the input of the products that made them: one value is saved exactly instead of three. Other
    products that have to be exact are kept or recomputed, whichever takes fewer bytes.

    Args:
        bits: Bits of an element: 1, 2, 3, 4, 5, 6 or 8.
        rounding: As in `Quantize`. "dither" has half the variance of "stochastic".

    Returns:
        The policy.

    Raises:
        ValueError: If `bits` is none of these; when a model is traced, if it has no value of so
            many elements.

    Example:
        >>> print(transformer(bits=2))
        rule  action                                                    for
        1     cheapest                                                  primitives=('dot_general',), roles=('other',) (if there is any)
        2     Quantize(bits=2, group='channel', rounding='stochastic')  min_size=16384
    """  # noqa: E501
    products = Rule("cheapest", primitives=("dot_general",), roles=("other",), required=False)
    return Policy((products, Rule(Quantize(bits, rounding=rounding), min_size=_MIN_SIZE)))


def save_names(named: Mapping[str, Codec | Action], rest: Action = "recompute") -> Policy:
    """Returns what becomes of values with names, as `jax.ad_checkpoint.checkpoint_name` gives them.

    What is computed again starts from the values that are saved. From a codec's it is biased, as
    with `boundary`: nonlinear steps and their derivatives are evaluated at the decoded values. With
    8 bits the bias is small.

    Args:
        named: By name: a codec (`Offload` of one puts the code into the host's memory), "keep",
            "offload" or "recompute".
        rest: What becomes of all other values: "recompute", as with
            `jax.checkpoint_policies.save_only_these_names`, "keep" or "offload".

    Returns:
        The policy.

    Raises:
        TypeError: If `named` is no mapping with names as keys, or has another action.
        ValueError: If it is empty, or an action is unknown; when a function is traced, if it has no
            value of a name.

    Example:
        >>> from jaxcomp import Float8, Offload
        >>> policy = save_names({"mlp_in": Float8(), "experts": Offload(Float8())})
        >>> [rule.names for rule in policy.rules]
        [('mlp_in',), ('experts',), ()]
    """
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
        raise TypeError(f"named={named!r}: expected a dict from names to codecs or actions")
    if not named:
        raise ValueError("named={}: expected at least one name")
    rules = [Rule(action, names=(name,)) for name, action in named.items()]
    is_lossy = any(isinstance(action, Codec) for action in named.values())
    return Policy((*rules, Rule(rest, required=False)), is_lossy)


def boundary(codec: Codec) -> Policy:
    """Saves the arguments of a function by a codec and recomputes everything from the decoded ones.

    For `jaxcomp.checkpoint` with `coded_argnums`. Biased: nonlinear steps and their derivatives are
    evaluated at the decoded values. A `scan` is not run again as a whole: its results, such as
    those of an attention in parts, are encoded, too. The bytes are those of the codes.

    Args:
        codec: Encodes the arguments and the results of loops. With 8 bits the bias is small.
            `Offload` of one puts the codes into the host's memory, where `Offload(Exact())` has
            no bias.

    Returns:
        The policy.

    Example:
        >>> boundary(Quantize(bits=8)).lossy_recomputation
        True
    """
    loops = Rule(codec, primitives=("scan",), required=False)
    is_lossy = not inner_codec(codec).is_exact
    rules = (Rule(codec, roles=("input",)), loops, Rule("recompute", required=False))
    return Policy(rules, is_lossy)


def division(window: int = 8, bits: int = 2) -> Policy:
    """Returns DIVISION: low frequencies in bfloat16, high frequencies in a few bits.

    Wang et al., ICML 2023 (arXiv:2208.04187). The low frequencies are means of windows, which lie
    on the feature map, and along the features for linear layers and layer norms. Masks and indices
    are exact and packed.

    Args:
        window: Edge of a window.
        bits: Bits of an element of the high frequencies.

    Returns:
        The policy.

    Example:
        >>> division().rules[0].action
        DualPrecision(window=8, bits=2, along='features')
    """
    features = DualPrecision(window, bits, along="features")
    along_features = Policy((Rule(features, op="dot|layer_norm", required=False),))
    return along_features + everywhere(DualPrecision(window, bits))


def pooling(window: int = 2, rest_bits: int | None = None, sampled: bool = False) -> Policy:
    """Returns average pooling of the input of every convolution.

    Masks and indices are exact and packed.

    Barley and Fröning (arXiv:2409.11902). Biased, as `AvgPool` is, unless it is `sampled`. A
    policy in front gives another window to a part of the model:
    `pooling(4).at("blocks/[01]/.*") + pooling(2)`.

    Args:
        window: Edge of a window.
        rest_bits: Bits of an element of all other saved activations (inputs of norms, linear and
            affine layers, derivatives of GELU and SiLU, in stock models values of 16,384 elements
            or more), by `Quantize`, without bias. None saves them as they are, as the paper does.
        sampled: Whether the difference of one element of each window from its mean is stored, too,
            in 4 bits: without bias, with more noise.

    Returns:
        The policy.

    Example:
        >>> [rule.op for rule in pooling(window=2, rest_bits=4).rules[:2]]
        ['conv', 'dot|affine|batch_norm|layer_norm|gelu|silu']
    """
    conv = Rule(AvgPool(window, Quantize(4) if sampled else None), op="conv")
    return Policy((conv, *_rest(rest_bits, f"dot|{_REST}"), *_PACKED))


def pruning(
    density: float = 0.25,
    block: Block = 8,
    rest_bits: int | None = None,
    product: Product = "auto",
    sampled: bool = False,
) -> Policy:
    """Prunes activations in blocks: keeps some blocks of every linear layer's input.

    Barley and Fröning (arXiv:2311.16883). Biased, as `BlockSparse` is, unless it is `sampled`.

    Args:
        density: Fraction of the blocks that is kept, as `BlockSparse` takes it.
        block: Height and width of a block.
        rest_bits: Bits of an element of all other saved activations (inputs of affine layers,
            LayerScale and norms, derivatives of GELU and SiLU), by `Quantize`, without bias; masks
            and indices are then exact and packed. None saves them as they are, as the paper does.
        product: How weight gradients are computed from the blocks, as `BlockSparse` takes it.
        sampled: Whether blocks are drawn at random, without bias; by default the largest are kept.

    Returns:
        The policy.

    Example:
        >>> [rule.op for rule in pruning(density=0.25, rest_bits=2).rules[:2]]
        ['dot', 'affine|batch_norm|layer_norm|gelu|silu']
    """
    linear = Rule(BlockSparse(block, density, product=product, sampled=sampled), op="dot")
    if rest_bits is None:
        return Policy((linear,))
    return Policy((linear, *_rest(rest_bits, _REST), *_PACKED))


def actnn(level: Level = "L3") -> Policy:
    """Returns the levels of ActNN (Chen et al., ICML 2021, arXiv:2104.14129, section 5).

    - L0: every value is saved as it is (`everywhere(Exact())`).
    - L1: inputs of convolutions in 4 bits.
    - L2: everything in 4 bits (`everywhere(Quantize(4))`).
    - L3: everything in 2 bits on average. The policy starts with 2 bits everywhere;
      `jaxcomp.diagnostics.BitPlanner` then gives each layer and rank of samples its own bits.
    - L4: as L3, with the codes in the host's memory (`.offloaded()`).
    - L5: as L4. The paper adds a memory allocator: XLA lays out memory when it compiles.

    Masks and indices are exact and packed from L2 on.

    Args:
        level: "L0" to "L5".

    Returns:
        The policy.

    Raises:
        ValueError: If `level` is none of these.

    Example:
        >>> actnn("L1").rules[0].op
        'conv'
    """
    if level not in get_args(Level):
        raise ValueError(f"level={level!r}: expected one of {get_args(Level)}")
    if level == "L0":
        return everywhere(Exact())
    if level == "L1":
        return Policy((Rule(Quantize(bits=4), op="conv"),))
    policy = everywhere(Quantize(bits=4 if level == "L2" else 2))
    return policy.offloaded() if level in ("L4", "L5") else policy


def __dir__() -> tuple[str, ...]:
    return __all__
