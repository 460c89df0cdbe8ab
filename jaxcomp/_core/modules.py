"""Flax NNX models as pytrees."""

from typing import Any

from flax import nnx

State = nnx.State[Any, Any]


def split_model(model: nnx.Module) -> tuple[nnx.GraphDef[Any], State, State]:
    """The model's structure, its parameters, and its other variables."""
    return nnx.split(model, nnx.Param, ...)  # type: ignore[return-value] # always two states here
