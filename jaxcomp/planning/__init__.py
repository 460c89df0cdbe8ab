"""Strategies for a training step's memory, and tables that compare them."""

from jaxcomp.planning._comparison import Comparison as Comparison
from jaxcomp.planning._comparison import MakeStep as MakeStep
from jaxcomp.planning._comparison import Row as Row
from jaxcomp.planning._comparison import compare as compare
from jaxcomp.planning._strategies import Strategy as Strategy
