"""Cells of a table: how a figure of a record is written."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from experiments.tables.rows import Reader, Row, as_they_are, noise, read
from jaxcomp.codecs import Codec
from jaxcomp.codecs._offload import inner_codec
from jaxcomp.planning import Strategy
from jaxcomp.policies import Policy
from jaxcomp.policies._policy import has_codecs

Cell = Callable[[Row], str]

# Names of rows that are no text of `Strategy.parse`: what they are called, and what they are.
LABELS: Mapping[str, tuple[str, str]] = {
    "remat, names kept": ("`jax.checkpoint`, names kept", "remat"),
    "remat, names offloaded": ("`jax.checkpoint`, names offloaded", "remat"),
    "names in Float8": ("names in `Float8`", "plain"),
    "names in Float8, offloaded": ("names in `Float8`, offloaded", "plain"),
    "names in 4 bits": ("names in 4 bits", "quantize:bits=4"),
    "remat, inputs offloaded": ("`jax.checkpoint`, inputs of layers offloaded", "remat"),
    "remat, inputs and contexts offloaded": (
        "`jax.checkpoint`, inputs of layers and results of attentions offloaded",
        "remat",
    ),
    "boundary:bits=8": ("`boundary:quantize:bits=8`", "boundary:quantize:bits=8"),
    "boundary:bits=4": ("`boundary:quantize:bits=4`", "boundary:quantize:bits=4"),
    "boundary, exact, offloaded": ("`boundary:offload:exact`", "boundary:offload:exact"),
    "boundary:bits=8, offloaded": (
        "`boundary:offload:quantize:bits=8`",
        "boundary:offload:quantize:bits=8",
    ),
    "boundary:bits=4, offloaded": (
        "`boundary:offload:quantize:bits=4`",
        "boundary:offload:quantize:bits=4",
    ),
    "plain, another seed": ("`plain`, another seed", "plain"),
    "each": ("`jc.checkpoint` of each block", "quantize:bits=4"),
    "whole": ("`jc.checkpoint` of the stack", "quantize:bits=4"),
    "boundary, 8 bits": ("`recipes.boundary(Quantize(bits=8))`", "boundary:quantize:bits=8"),
}


def is_biased(name: str) -> bool:
    """Returns whether a codec or the recomputation of a row's strategy is biased.

    The small bias of a norm between unbiased codes does not count.

    Raises:
        ValueError: If the name is unknown.

    Example:
        >>> is_biased("fused:bits=2"), is_biased("fused:bits=4"), is_biased("remat")
        (True, False, False)
    """
    _, spec = LABELS.get(name, ("", name))
    for way in ("remat+", "planned:"):  # on the author's `jax.checkpoint`; with planned bits
        spec = spec.removeprefix(way)
    if spec.startswith(("fit:", "allocated:")):  # no biased codes unless they are asked for
        return False
    spec = spec.replace("remat:quantize", "boundary:quantize")  # as older records name it
    strategy = Strategy.parse(spec)
    if strategy.block_codec is not None:
        return not inner_codec(strategy.block_codec).is_exact
    if not isinstance(strategy.policy, Policy):
        return False
    codecs = (rule.action for rule in strategy.policy.rules if isinstance(rule.action, Codec))
    return strategy.policy.lossy_recomputation or not all(codec.unbiased for codec in codecs)


def name(row: Row) -> str:
    """The strategy, whether it is biased, what `fit` chose, and the memory of the host."""
    label, _ = LABELS.get(row.name, (f"`{row.name}`", ""))
    notes = ["biased"] if is_biased(row.name) else []
    notes += [f"`{row.values['chosen']}`"] if "chosen" in row.values else []
    if host := row.values.get("host_temp_bytes"):
        notes.append(f"{host / 2**20:,.0f} MiB of host memory")
    return f"{label} ({', '.join(notes)})" if notes else label


def name_of_codec(row: Row) -> str:
    """A codec, as its `repr` says."""
    return f"`{row.values['codec']}`"


def text(key: str) -> Cell:
    """A text or a count as it is."""
    return lambda row: str(row.values[key])


def number(key: str, unit: float = 1.0, form: str = ",.0f") -> Cell:
    """A figure in a unit. Empty if the record has none."""

    def cell(row: Row) -> str:
        figure = row.values.get(key)
        return "" if figure is None or math.isnan(figure) else format(figure / unit, form)

    return cell


def mib(key: str) -> Cell:
    """Bytes in MiB."""
    return number(key, 2**20)


def needed(row: Row) -> str:
    """MiB that a step needs, and whether that does not fit the device."""
    figure = mib("total_bytes")(row)
    return f"{figure} (does not fit)" if row.values.get("fits") is False else figure


def ratio(key: str) -> Cell:
    """A figure over that of the plain row. Empty if one of them is missing."""

    def cell(row: Row) -> str:
        figure, plain = row.values.get(key), row.plain.get(key)
        return "" if figure is None or not plain else f"{figure / plain:.2f}"

    return cell


def of(record: str, cell: Cell, reader: Reader = as_they_are) -> Cell:
    """The cell of the row of the same name of another record. Empty if it has none."""

    def other(row: Row) -> str:
        found = [r for r in read(record, reader, {}) if r.name == row.name]
        return cell(found[0]) if found else ""

    return other


def bias(row: Row) -> str:
    """The bias of a gradient with its 95% interval."""
    values: Mapping[str, Any] = row.values
    low, high = values["low"], values["high"]
    interval = f"to {high:.3f}" if low < 5e-4 else f"{low:.3f} .. {high:.3f}"
    return f"{values['bias']:.3f} ({interval})"


def bias_or_kind(gradients: Mapping[str, int]) -> Cell:
    """The bias of a strategy, from records of bench.gradients after so many steps of training.

    Without a record it is "none" of an exact strategy, else "biased" or "not measured".
    """

    def cell(row: Row) -> str:
        for record, steps in gradients.items():
            for found in read(record, noise, {"steps": steps}):
                if found.name == row.name.removeprefix("offload:"):
                    return bias(found)
        if encodes(row.name):
            return "biased, not measured" if is_biased(row.name) else "unbiased codes"
        return "none"

    return cell


def encodes(spec: str) -> bool:
    """Returns whether a strategy encodes a value or the input of a block.

    Example:
        >>> encodes("remat"), encodes("accumulate:2:transformer:bits=4")
        (False, True)
    """
    strategy = Strategy.parse(spec)
    if strategy.block_codec is not None:
        return not inner_codec(strategy.block_codec).is_exact
    return strategy.policy is not None and has_codecs(strategy.policy)
