"""From single runs to statements: means with standard errors, and differences to the baseline, seed by seed.

The two runs of a pair share weights at step 0 (where both have the tensor) and the order of the data, so that
much of what a seed brings cancels in their difference. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from openk3.train.ablation.config import AblationSet, Equal, Group
from openk3.train.ablation.plan import Choices, Trial
from openk3.train.ablation.results import Measured, Result, score


@dataclass(frozen=True)
class Mean:
    """A mean over runs. `error`: its standard error; None of a single run."""

    value: float
    error: float | None
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        n = len(values)
        error = statistics.stdev(values) / math.sqrt(n) if n > 1 else None
        return cls(statistics.fmean(values), error, n)


@dataclass(frozen=True)
class Line:
    """A variant in one comparison.

    Attributes:
        runs: with a result; `wanted`: that the set asks for.
        values: by name, over all runs. differences: to the baseline's run of the same seed, over the seeds
            that both have; empty for the baseline itself.
        folders: of the runs.
    """

    group: str
    variant: str
    equal: Equal
    parameters: int
    active: int
    runs: int
    wanted: int
    values: Mapping[str, Mean]
    differences: Mapping[str, Mean]
    folders: tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """What a search found.

    Attributes:
        scored: mean score of each candidate over the search seeds, lower is better; None where a run failed.
        chosen: the best one; None where all failed.
    """

    group: str
    variant: str
    scored: tuple[float | None, ...]
    chosen: int | None

    @property
    def at_the_edge(self) -> bool:
        """Whether a candidate beyond the first or last might be better still."""
        return self.chosen in (0, len(self.scored) - 1)


def choose(trials: Sequence[Trial], found: Mapping[str, Measured]) -> tuple[Choice, ...]:
    """The best candidate of every variant that has some.

    Args:
        found: what the trials' runs measured, by digest; failed ones are missing.
    """
    scores: dict[tuple[str, str], dict[int, list[float | None]]] = {}
    for trial in trials:
        own = scores.setdefault((trial.group, trial.variant), {}).setdefault(trial.candidate, [])
        own.append(score(found[trial.run.digest])[1] if trial.run.digest in found else None)
    choices = []
    for (group, variant), by_candidate in scores.items():
        scored = tuple(_mean_of_all(by_candidate[i]) for i in range(len(by_candidate)))
        ranked = sorted((s, i) for i, s in enumerate(scored) if s is not None)
        choices.append(Choice(group, variant, scored, ranked[0][1] if ranked else None))
    return tuple(choices)


def chosen(choices: Sequence[Choice]) -> Choices:
    """The choices as a plan wants them."""
    return {(choice.group, choice.variant): choice.chosen for choice in choices}


def summarise(ablation: AblationSet, results: Sequence[Result]) -> tuple[Line, ...]:
    """A line for every variant that has a result, in the set's order."""
    lines = []
    for group in ablation.groups:
        for equal in group.equal:
            here = [r for r in results if (r.group, r.equal) == (group.name, equal)]
            baseline = {r.seed: r.measured for r in here if r.variant == group.baseline.name}
            for variant in group.variants:
                own = [r for r in here if r.variant == variant.name]
                if own:
                    pairs = [] if variant is group.baseline else [(r, baseline.get(r.seed)) for r in own]
                    lines.append(_line(own, [(a.measured, b) for a, b in pairs if b], len(ablation.seeds)))
    return tuple(lines)


def comparisons(group: Group, lines: Sequence[Line]) -> tuple[Equal, ...]:
    """How a group's lines were compared; once, where the same runs serve every comparison."""
    runs = [[line.folders for line in lines if line.equal == equal] for equal in group.equal]
    return group.equal[:1] if all(own == runs[0] for own in runs) else group.equal


def _line(own: Sequence[Result], pairs: Sequence[tuple[Measured, Measured]], wanted: int) -> Line:
    first = own[0]
    values = {name: Mean.of([r.measured[name] for r in own]) for name in first.measured}
    differences = {
        name: Mean.of([a[name] - b[name] for a, b in pairs])
        for name in first.measured
        if pairs and all(name in b for _, b in pairs)
    }
    return Line(
        first.group,
        first.variant,
        first.equal,
        first.parameters,
        first.active,
        len(own),
        wanted,
        values,
        differences,
        tuple(r.folder for r in own),
    )


def _mean_of_all(scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return statistics.fmean(known) if len(known) == len(scores) else None
