"""Recipes: functions that return rules for a whole model."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, get_args

from jaxcomp.codecs import (
    AvgPool,
    BlockSparse,
    Cast,
    Codec,
    DualPrecision,
    Exact,
    Offload,
    Packed,
    Quantize,
    SignAware,
)
from jaxcomp.codecs._block_sparse import Block, Product
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.codecs._sign_aware import ScaleSource
from jaxcomp.policies import _policies as policies
from jaxcomp.policies._policies import CodecPolicy
from jaxcomp.policies._rules import Rule, Rules

CODECS: dict[str, type[Codec]] = {
    c.name: c for c in (Exact, Cast, Quantize, AvgPool, DualPrecision, BlockSparse)
}

PACKED: Rules = (
    Rule(Packed(bits=1), op="relu|dropout", required=False),
    Rule(Packed(bits=4), op="max_pool", required=False),
)
"""Masks and indices, exactly, in as few bits as they need."""


def everywhere(codec: Codec) -> Rules:
    """Uses a codec in every operation that can store by it; packs masks and indices.

    With `AvgPool` these operations are the convolutions, with `Cast` and `Quantize` the linear
    layers and batch norms too. `Exact()` makes the model as it is in Flax.

    Args:
        codec: The codec.

    Returns:
        The rules.

    Example:
        >>> everywhere(AvgPool(window=2))[0].op
        'conv'
    """
    if isinstance(codec, Exact):
        return (Rule(codec, required=False),)
    return Rule(codec, op="|".join(codec.kinds)), *PACKED


def fused(bits: int = 4, scale_source: ScaleSource = "norm") -> Rules:
    """One code for each norm, addition and ReLU, which the convolutions around it share.

    For models built of `jaxcomp.nn.ConvNormAct` and `NormAct`. What else a model stores stays
    exact, but for the indices of max pools, which are exact and packed.

    Args:
        bits: Bits of a stored element, masks included: 2, 3 or 4.
        scale_source: "norm", in which no pass looks for ranges; or "range", with ranges of each
            channel of each sample, for the least noise.

    Returns:
        The rules.

    Example:
        >>> fused(bits=2)[0].codec.bits
        2
    """
    return Rule(SignAware(bits, scale_source=scale_source), op="norm_act"), *PACKED


def division(window: int = 8, bits: int = 2) -> Rules:
    """DIVISION: means of windows in bfloat16 and the rest in a few bits, in every operation.

    Wang et al., ICML 2023 (arXiv:2208.04187). Windows lie on the map, those of linear
    layers and layer norms along the features. Masks and indices are exact and packed.

    Args:
        window: Edge of a window.
        bits: Bits of an element of the rest.

    Returns:
        The rules.

    Example:
        >>> division()[-3].codec
        DualPrecision(window=8, bits=2, along='map')
    """
    features = DualPrecision(window, bits, along="features")
    along_features = Rule(features, op="dot|layer_norm", required=False)
    return along_features, *everywhere(DualPrecision(window, bits))


REST = "affine|batch_norm|layer_norm|gelu|silu"
"""Kinds of operation that `pooling` and `pruning` store by `rest_bits`."""


def pooling(window: int = 2, rest_bits: int | None = None) -> Rules:
    """Average pooling of every convolution's input; masks and indices are exact and packed.

    Barley and Fröning (arXiv:2409.11902). Biased, as `AvgPool` is. A rule in front of these gives
    another window to a part of the model, such as its first stage.

    Args:
        window: Edge of a window.
        rest_bits: Bits of an element of what else waits: inputs of norms, linear and affine layers,
            derivatives of GELU and SiLU, by `Quantize`, without bias. None leaves all of it as in
            Flax, as the paper does.

    Returns:
        The rules.

    Example:
        >>> [rule.op for rule in pooling(window=2, rest_bits=4)[:2]]
        ['conv', 'dot|affine|batch_norm|layer_norm|gelu|silu']
    """
    conv = Rule(AvgPool(window), op="conv")
    if rest_bits is None:
        return conv, *PACKED
    return conv, Rule(Quantize(rest_bits), op=f"dot|{REST}", required=False), *PACKED


def pruning(
    density: float = 0.25, block: Block = 8, rest_bits: int | None = None, product: Product = "auto"
) -> Rules:
    """Structured activation pruning: the largest blocks of every linear layer's input.

    Barley and Fröning (arXiv:2311.16883). Biased, as `BlockSparse` is.

    Args:
        density: Part of the blocks that is kept, see `BlockSparse`.
        block: Height and width of a block.
        rest_bits: Bits of an element of what else waits: inputs of affine layers, LayerScale and
            norms, derivatives of GELU and SiLU, by `Quantize`, without bias; masks and indices are
            exact and packed. None leaves all of it as in Flax, as the paper does.
        product: How weights' gradients are made of the blocks, see `BlockSparse`.

    Returns:
        The rules.

    Example:
        >>> [rule.op for rule in pruning(density=0.25, rest_bits=2)[:2]]
        ['dot', 'affine|batch_norm|layer_norm|gelu|silu']
    """
    linear = Rule(BlockSparse(block, density, product=product), op="dot")
    if rest_bits is None:
        return (linear,)
    return linear, Rule(Quantize(rest_bits), op=REST, required=False), *PACKED


def offloaded(rules: Rules, in_turn: bool = False) -> Rules:
    """The same rules with the codes in the host's pinned memory.

    On a GPU the forward pass waits for each copy; a backend without such memory is an error.

    Args:
        rules: Of a recipe.
        in_turn: See `Offload`; what has its turn already keeps it.

    Returns:
        The rules.

    Example:
        >>> offloaded(fused(bits=2))[0].codec
        Offload(codec=SignAware(bits=2, signed=False, scale_source='norm'), in_turn=False)
    """

    def away(codec: Codec) -> Codec:
        if isinstance(codec, Exact):
            return codec
        has_turn = isinstance(codec, Offload) and codec.in_turn
        return Offload(inner_codec(codec), in_turn or has_turn)

    return tuple(replace(rule, codec=away(rule.codec)) for rule in rules)


def transformer(bits: int = 4) -> CodecPolicy:
    """A policy for transformers, for `jaxcomp.compress` and `jaxcomp.checkpoint`.

    Values of 16,384 elements or more wait in a few bits, without bias but for that of a norm's
    input (one part in its number of features). What an attention under `jax.checkpoint`, a loop or
    a `custom_vjp` reads has to be exact: queries, keys and values are made again from the one input
    of the products that made them, which is stored exactly instead of three results. Other products
    that have to be exact are made again, too, where `policies.recomputable` finds it worth while.

    Args:
        bits: Bits of an element: 1, 2, 3, 4 or 8.

    Returns:
        The policy.

    Raises:
        ValueError: If `bits` is none of these; on tracing, if no value has so many elements.

    Example:
        >>> query = policies.Value((8, 64, 512), "float32", "dot_general")
        >>> operand = policies.Value((8, 64, 512), "float32", "mul", role="operand")
        >>> transformer(bits=2)(query), transformer(bits=2)(operand).bits
        ('recomputable', 2)
    """
    dots = policies.recomputable(primitives=("dot_general",), roles=("other",), required=False)
    return policies.first(dots, policies.compress(Quantize(bits), min_size=policies.MIN_SIZE))


Level = Literal["L0", "L1", "L2", "L3", "L4", "L5"]


def actnn(level: Level = "L3") -> Rules:
    """ActNN's levels (Chen et al., ICML 2021, arXiv:2104.14129, section 5).

    L0 stores everything exactly; L1 convolutions' inputs in 4 bits; L2 all that can be in 4 bits;
    L3 in 2 bits on average: these rules are its start, from which
    `jaxcomp.diagnostics.BitPlanner` gives each layer and rank of samples its own; L4 as L3, in the host's memory; L5 as L4, with a smaller
    working set where a block's shortcut has a norm: `Offload(..., in_turn=True)`, in place of the
    paper's allocator, since XLA lays memory out when it compiles. Masks and indices are exact and
    packed from L2 on.

    Args:
        level: "L0" to "L5".

    Returns:
        The rules.

    Raises:
        ValueError: If `level` is none of these.

    Example:
        >>> actnn("L1")[0].op
        'conv'
    """
    if level not in get_args(Level):
        raise ValueError(f"level={level!r}: expected one of {get_args(Level)}")
    if level == "L0":
        return everywhere(Exact())
    if level == "L1":
        return (Rule(Quantize(bits=4), op="conv"),)
    rules = everywhere(Quantize(bits=4 if level == "L2" else 2))
    return offloaded(rules, in_turn=level == "L5") if level in ("L4", "L5") else rules


RECIPES: dict[str, Callable[..., Rules]] = {
    "fused": fused,
    "division": division,
    "actnn": actnn,
    "pooling": pooling,
    "pruning": pruning,
}
POLICIES: dict[str, Callable[..., CodecPolicy]] = {"transformer": transformer}


def _read_block(value: str) -> Block:
    side, by, other = value.partition("x")
    return (int(side), int(other)) if by else int(side)


_READ: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (int, "an integer"),
    int | None: (int, "an integer"),
    float: (float, "a number"),
    bool: ({"true": True, "false": False}.__getitem__, "true or false"),
    Block: (_read_block, "an integer or two, such as 8x16"),
}


def from_spec(spec: str) -> Rules:
    """Reads the spec of a codec, which is then used everywhere, or of a recipe; see `read`.

    Args:
        spec: As `read`; or several with " + " between them, in order of precedence, each for the
            whole model or, after " @ ", for the modules whose path matches a regular expression.

    Returns:
        The rules.

    Raises:
        ValueError: As `read`, and if a path is not a regular expression.

    Example:
        >>> from_spec("quantize:bits=4")[0].codec
        Quantize(bits=4, group='channel', rounding='stochastic')
        >>> [(r.codec, r.path) for r in from_spec("exact @ blocks/0/.* + avg_pool:window=2")][:2]
        [(Exact(), 'blocks/0/.*'), (AvgPool(window=2), '.*')]
    """
    rules: Rules = ()
    for part in spec.split(" + "):
        text, _, path = part.partition(" @ ")
        made = read(text)
        own = everywhere(made) if isinstance(made, Codec) else made
        rules += tuple(replace(rule, path=path) for rule in own) if path else own
    return rules


def read(spec: str) -> Codec | Rules:
    """Reads the spec of a codec or of a recipe.

    Args:
        spec: A snake-case name with options, for example "quantize:bits=4", "avg_pool:window=2",
            "cast:dtype=float16", "block_sparse:block=8x16,density=0.25", "exact", "fused:bits=2";
            "offload:" before it is `Offload` of the codec, or `offloaded`.

    Returns:
        The codec, or the recipe's rules.

    Raises:
        ValueError: If the name or an option is unknown, or a value is not what it should be.

    Example:
        >>> read("avg_pool:window=2")
        AvgPool(window=2)
    """
    name, _, options = spec.partition(":")
    if name == "offload":
        made = read(options)
        return Offload(made) if isinstance(made, Codec) else offloaded(made)
    return _make(spec, CODECS | RECIPES)


def policy_from_spec(spec: str) -> CodecPolicy:
    """Reads the spec of a policy for `jaxcomp.compress`.

    Args:
        spec: "transformer:bits=4", or a codec as `read` takes it, not in the host's memory, which
            then stores all values of 16,384 elements or more.

    Returns:
        The policy.

    Raises:
        ValueError: As `read`.

    Example:
        >>> policy_from_spec("quantize:bits=4") == policies.compress(Quantize(4), min_size=2**14)
        True
    """
    made = _make(spec, CODECS | POLICIES)
    return policies.compress(made, min_size=policies.MIN_SIZE) if isinstance(made, Codec) else made


def _make(spec: str, makers: dict[str, Callable[..., Any]]) -> Any:
    """Calls the maker that a spec names, with its options."""
    name, _, options = spec.partition(":")
    make = makers.get(name)
    if make is None:
        raise ValueError(f"spec={spec!r}: unknown codec {name!r}, expected one of {[*makers]}")
    parameters = inspect.signature(make).parameters
    kwargs: dict[str, Any] = {}
    for option in options.split(",") if options else ():
        key, _, value = option.partition("=")
        if key not in parameters:
            raise ValueError(
                f"spec={spec!r}: unknown option {key!r}, expected of {list(parameters)}"
            )
        if key in kwargs:
            raise ValueError(f"spec={spec!r}: option {key!r} is given twice")
        parse, kind = _READ.get(parameters[key].annotation, (str, "text"))
        try:
            kwargs[key] = parse(value)
        except (ValueError, KeyError):
            raise ValueError(f"spec={spec!r}: {key}={value!r} is not {kind}") from None
    try:
        return make(**kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"spec={spec!r}: {error}") from error
