"""Strategies for a training step's memory, and tables that compare them."""

from jaxcomp.planning._allocate import allocate as allocate
from jaxcomp.planning._answer import DoesNotFitError as DoesNotFitError
from jaxcomp.planning._comparison import Comparison as Comparison
from jaxcomp.planning._comparison import Row as Row
from jaxcomp.planning._comparison import compare as compare
from jaxcomp.planning._fit import fit as fit
from jaxcomp.planning._fitted import FittedPlan as FittedPlan
from jaxcomp.planning._largest import largest_batch as largest_batch
from jaxcomp.planning._strategies import Strategy as Strategy
from jaxcomp.planning._watched import MakeStep as MakeStep
