"""`Context`: what holds for all programs of one call, and what is noted about them."""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxcomp.policies._policy import JaxPolicy, Policy, has_codecs
from jaxcomp.policies._rule import Rule
from jaxcomp.policies._value import Value, dtype_name
from jaxcomp.transform._choice.outliers import Outlier
from jaxcomp.transform._pieces.limits import Limits, current_limits
from jaxcomp.transform._program.program import Program


@dataclasses.dataclass(frozen=True)
class Notes:
    """What a policy was asked about a function, the iterations of its loops and its branches.

    Attributes:
        values: The values.
        regions: The paths of regions under `jax.checkpoint`.
        matched: The rules that matched a value or a region, or would but for a value's size.
        in_regions: The rules that match what is in a region, if the region is opened.
        unfit: Errors of rules that match a product whose activation their codec cannot store.
    """

    values: list[Value] = dataclasses.field(default_factory=list)
    regions: list[str] = dataclasses.field(default_factory=list)
    matched: set[Rule] = dataclasses.field(default_factory=set)
    in_regions: set[Rule] = dataclasses.field(default_factory=set)
    unfit: dict[Rule, Exception] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Context:
    """What holds for a program that is decided about.

    Attributes:
        policy: The policy.
        limits: Sizes of pieces of the backward pass.
        notes: Takes note of what the policy is asked.
        iterations: Of the loops around the program.
        is_region_body: Whether it is a region under `jax.checkpoint` that is kept: what it stores
            waits only while the backward pass evaluates it again.
        regions_are_decided: Whether it is such a body in which regions are opened already that the
            policy opens.
        keeps_rules: Whether rules of users' `jax.custom_vjp` functions stay one equation each. So
            it is while the bytes of a region under `jax.checkpoint` are compared: its author has
            chosen to make the residuals of these functions again.
        outliers: The large constants that arguments of the program hold, by their positions.
    """

    policy: Policy | JaxPolicy
    limits: Limits = dataclasses.field(default_factory=current_limits)
    notes: Notes = dataclasses.field(default_factory=Notes)
    iterations: int = 1
    is_region_body: bool = False
    regions_are_decided: bool = False
    keeps_rules: bool = False
    outliers: Mapping[int, Outlier] = dataclasses.field(default_factory=dict)

    @property
    def opens_rules(self) -> bool:
        """Whether such rules become equations, where they are linear."""
        names_residuals = any(rule.is_for_residuals for rule in self.rules)
        return self.encodes and not names_residuals and not self.keeps_rules

    @property
    def rules(self) -> Sequence[Rule]:
        """The rules of the policy; none of one of JAX's."""
        return self.policy.rules if isinstance(self.policy, Policy) else ()

    @property
    def encodes(self) -> bool:
        """Whether the policy has codecs."""
        return has_codecs(self.policy)

    def inside(self, iterations: int, outliers: Mapping[int, Outlier]) -> "Context":
        """Returns the context of the body of a loop, which takes note in the same places."""
        return dataclasses.replace(
            self,
            iterations=iterations * self.iterations,
            regions_are_decided=False,
            outliers=outliers,
        )

    def of_region(self) -> "Context":
        """Returns the context of a region that is kept, which notes nothing and encodes nothing."""
        return dataclasses.replace(self, policy=Policy(()), notes=Notes(), is_region_body=True)

    def of_encoding_region(self) -> "Context":
        """Returns the context of a region that is kept, and encodes while it is evaluated again."""
        return dataclasses.replace(self, notes=Notes(), regions_are_decided=True)

    def around(self, program: Program) -> "Context":
        """Returns the context of what is in a program, which takes note in the same places."""
        sizes = (v.aval.size for equation in program.equations for v in equation.outvars)
        outside = max(self.limits.outside, *sizes, 0)
        return dataclasses.replace(self, limits=dataclasses.replace(self.limits, outside=outside))

    def too_large(self) -> list[Rule]:
        """Returns the rules that ask for more elements than any of the values has."""
        most = max((value.elements for value in self.notes.values), default=0)
        return [rule for rule in self.rules if rule.is_for_values and rule.min_size > most]

    def check(self) -> None:
        """Raises an error if a required rule of the policy has matched nothing that fits it."""
        for rule in self.rules:
            if rule.required and rule not in self.notes.matched:
                raise self.notes.unfit.get(rule) or ValueError(_unmatched(rule, self.notes))


def _unmatched(rule: Rule, notes: Notes) -> str:
    """Says that a required rule matches nothing, and what there is."""
    values = notes.values
    if rule.is_for_regions:
        paths = ", ".join(dict.fromkeys(path or "no path" for path in notes.regions))
        return f"{rule} matches nothing: the regions under jax.checkpoint are {paths or 'none'}"
    if rule in notes.in_regions:
        return (
            f"{rule} matches nothing but what is in regions under jax.checkpoint, which are kept; "
            "Rule('open', op='checkpoint') in front of the policy's rules opens them"
        )
    if rule.is_for_residuals:
        residuals = {
            f"{dtype_name(v.dtype)}{list(v.shape)} at {v.path or v.source}"
            for v in values
            if v.role == "residual"
        }
        return (
            f"{rule} matches nothing: the residuals of jax.custom_vjp functions are "
            f"{', '.join(sorted(residuals)) or 'none'}"
        )
    if not rule.is_for_values:
        return (
            f"{rule} matches nothing: op is for layers of jaxcomp.nn, conv and dot also for stock "
            "convolutions and products with a parameter, norm_act also for stock batch norms, "
            "max_pool also for stock max pools, and with 'keep' attention and scaled_linear for "
            "stock ones; the function or model has none that it could match. The policy automatic "
            "is for any model"
        )
    names, primitives, roles, dtypes, paths = (
        ", ".join(sorted(names_of_kind)) or "none"
        for names_of_kind in (
            {name for value in values for name in value.names},
            {value.primitive for value in values if value.primitive},
            {value.role for value in values},
            {dtype_name(value.dtype) for value in values},
            {value.path for value in values if value.path},
        )
    )
    return (
        f"{rule} matches nothing, or only what an earlier rule took; the function has "
        f"names: {names}; primitives: {primitives}; roles: {roles}; dtypes: {dtypes} (codecs "
        f"encode float32, bfloat16 and float16); paths: {paths}; at most "
        f"{max((v.elements for v in values), default=0)} elements"
        + ("; an input is what coded_argnums of jaxcomp.checkpoint names" * ("input" in rule.roles))
    )
