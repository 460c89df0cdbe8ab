"""Policies: how the values that a backward pass needs are saved."""

from jaxcomp.policies._policy import Policy as Policy
from jaxcomp.policies._rule import Rule as Rule
from jaxcomp.policies._save_compressed import save_compressed as save_compressed
from jaxcomp.policies._specs import PolicyLike as PolicyLike
from jaxcomp.policies._specs import from_spec as from_spec
from jaxcomp.policies._value import Value as Value
