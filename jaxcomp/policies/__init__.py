"""Policies: how the values that a backward pass needs are saved."""

from jaxcomp.policies import recipes as recipes
from jaxcomp.policies._policies import CodecPolicy as CodecPolicy
from jaxcomp.policies._policies import Match as Match
from jaxcomp.policies._policies import Value as Value
from jaxcomp.policies._policies import boundary as boundary
from jaxcomp.policies._policies import by_value as by_value
from jaxcomp.policies._policies import compress as compress
from jaxcomp.policies._policies import compress_dots as compress_dots
from jaxcomp.policies._policies import first as first
from jaxcomp.policies._policies import recomputable as recomputable
from jaxcomp.policies._policies import save_compressed as save_compressed
from jaxcomp.policies._rules import Rule as Rule
from jaxcomp.policies._rules import Rules as Rules
