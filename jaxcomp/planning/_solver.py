"""The integer program of a plan: a choice for each group, within budgets of bytes and of noise."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from scipy import optimize, sparse

_MIB = 2**20
_GAP = 1e-3  # relative, of the time that is minimized
_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class Choice:
    """One thing that may be done with a group.

    Attributes:
        bytes: Bytes that it saves for the backward pass.
        seconds: Its estimated part of the step time. Differences alone count.
        noise: Variance that it adds to the gradient, in units of SGD's.
    """

    bytes: float
    seconds: float
    noise: float = 0.0


FREE = Choice(0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Moment:
    """A point of a compiled step at which much memory is alive.

    Attributes:
        where: What computes there.
        rest: Bytes alive besides saved activations.
        alive: The fraction of its saved bytes that is alive, by group; 0 for other groups.
        group: The group that computes there; "" if that is not known.
        names: The choices of that group of which the compiled step is an example. With another
            choice the group computes otherwise, and `rest` does not count; empty: it always counts.
    """

    where: str
    rest: float
    alive: Mapping[str, float]
    group: str = ""
    names: Collection[str] = ()

    @property
    def groups(self) -> set[str]:
        """The groups whose choices change the bytes that are alive."""
        return {*self.alive, *([self.group] if self.names else [])}

    def of_either(self, pair: tuple[str, str]) -> float:
        """Returns the larger of two groups' fractions."""
        return max(self.alive.get(group, 0.0) for group in pair)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan decides.

    Attributes:
        choices: What may be done with each group, by name.
        moments: Where memory may not exceed the budget.
        together: Groups that have a choice of this name all or none.
        most_noise: The largest sum of the variances.
        neighbours: Pairs of groups, one of which reads what the other computes.
        boundary: What each pair takes more if its choices differ: a value that both read is then
            saved in two ways.
    """

    choices: Mapping[str, Mapping[str, Choice]]
    moments: Sequence[Moment]
    together: Mapping[str, Sequence[Collection[str]]]
    most_noise: float = np.inf
    neighbours: Sequence[tuple[str, str]] = ()
    boundary: Choice = FREE

    def boundaries(self, assignment: Mapping[str, str]) -> list[tuple[str, str]]:
        """Returns the neighbours whose choices differ."""
        return [(a, b) for a, b in self.neighbours if assignment[a] != assignment[b]]

    def peak(self, assignment: Mapping[str, str]) -> tuple[float, Moment]:
        """Returns the most bytes at a moment, and the moment."""
        boundaries = self.boundaries(assignment)

        def alive(moment: Moment) -> float:
            chosen = (self.bytes_of(moment, group, assignment[group]) for group in moment.groups)
            twice = (moment.of_either(pair) * self.boundary.bytes for pair in boundaries)
            return self.fixed_bytes(moment) + sum(chosen) + sum(twice)

        most = max(self.moments, key=alive)
        return alive(most), most

    @functools.cached_property
    def least_rest(self) -> float:
        """The bytes besides saved activations that are alive at any moment."""
        return min((moment.rest for moment in self.moments), default=0.0)

    def fixed_bytes(self, moment: Moment) -> float:
        """Returns the bytes that are alive at a moment with any choices."""
        return self.least_rest if moment.names else moment.rest

    def bytes_of(self, moment: Moment, group: str, name: str) -> float:
        """Returns the bytes that are alive at a moment because a group has a choice."""
        saved = moment.alive.get(group, 0.0) * self.choices[group][name].bytes
        is_example = group == moment.group and name in moment.names
        return saved + (moment.rest - self.least_rest if is_example else 0.0)

    def split(self, count: int, given: float) -> "Problem":
        """Returns the same for a part of the batch; `given` are bytes of arguments, which stay."""
        choices = {
            group: {
                name: dataclasses.replace(choice, bytes=choice.bytes / count)
                for name, choice in named.items()
            }
            for group, named in self.choices.items()
        }
        moments = [
            dataclasses.replace(
                moment, rest=min(moment.rest, given + (moment.rest - given) / count)
            )
            for moment in self.moments
        ]
        return dataclasses.replace(self, choices=choices, moments=moments)

    def seconds(self, assignment: Mapping[str, str]) -> float:
        """Returns the sum of the estimated times."""
        chosen = sum(self.choices[group][name].seconds for group, name in assignment.items())
        return chosen + self.boundary.seconds * len(self.boundaries(assignment))


def solve(problem: Problem, budget: float) -> dict[str, str] | None:
    """Returns the choices of the least time within the budgets; None if there are none.

    The time is minimal within a thousandth, or what the solver found in two seconds.

    Example:
        >>> choices = {"a": {"keep": Choice(4.0, 0.0), "code": Choice(1.0, 1.0)}}
        >>> problem = Problem(choices, [Moment("backward", 1.0, {"a": 1.0})], {})
        >>> solve(problem, 5.0), solve(problem, 2.0), solve(problem, 1.0)
        ({'a': 'keep'}, {'a': 'code'}, None)
    """
    chosen = [(group, name) for group, named in problem.choices.items() for name in named]
    pairs = list(problem.neighbours) if problem.boundary != FREE else []
    number = {column: i for i, column in enumerate([*chosen, *pairs])}
    rows: list[dict[int, float]] = []
    low: list[float] = []
    high: list[float] = []

    def add(row: dict[int, float], least: float, most: float) -> None:
        rows.append(row)
        low.append(least)
        high.append(most)

    for group, named in problem.choices.items():
        add({number[group, name]: 1.0 for name in named}, 1.0, 1.0)
    for name, sets in problem.together.items():
        for first, *others in map(sorted, sets):
            for other in others:
                add({number[first, name]: 1.0, number[other, name]: -1.0}, 0.0, 0.0)
    twice = problem.boundary.bytes / _MIB
    for moment in problem.moments:
        row = {
            number[group, name]: problem.bytes_of(moment, group, name) / _MIB
            for group in moment.groups
            for name in problem.choices[group]
        }
        row |= {number[pair]: twice * moment.of_either(pair) for pair in pairs}
        add(row, -np.inf, (budget - problem.fixed_bytes(moment)) / _MIB)
    for first, second in pairs:  # 1 if a choice of the first is not that of the second
        for name in problem.choices[first]:
            row = {number[first, second]: 1.0, number[first, name]: -1.0}
            if name in problem.choices[second]:
                row[number[second, name]] = 1.0
            add(row, 0.0, np.inf)
    if problem.most_noise < np.inf:
        noise = {
            number[group, name]: choice.noise
            for group, named in problem.choices.items()
            for name, choice in named.items()
        }
        add(noise, -np.inf, problem.most_noise)
    matrix = sparse.lil_matrix((len(rows), len(number)))
    for i, row in enumerate(rows):
        for column, value in row.items():
            matrix[i, column] = value
    times = [problem.choices[group][name].seconds for group, name in chosen]
    seconds = np.array([*times, *[problem.boundary.seconds] * len(pairs)])
    scale = max(np.abs(seconds).max(), 1e-30)
    result = optimize.milp(
        seconds / scale,
        integrality=np.ones(len(number)),
        bounds=optimize.Bounds(0, 1),
        constraints=optimize.LinearConstraint(matrix.tocsr(), np.array(low), np.array(high)),
        options={"mip_rel_gap": _GAP, "time_limit": _SECONDS},
    )
    if result.x is None:
        return None
    taken = np.round(result.x[: len(chosen)]).astype(bool)
    return {group: name for (group, name), is_taken in zip(chosen, taken, strict=True) if is_taken}
