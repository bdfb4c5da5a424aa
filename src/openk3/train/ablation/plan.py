"""From a set of ablations to its runs, and what each stands for in the tables. Pure: no file, no process.

Runs that come to the same configuration are one run: the baseline of every group is trained once for each
seed, and a variant that needs the baseline's FLOPs to the step is not trained again to compare at equal
FLOPs. A run is known by the digest of its configuration, so that a changed set finds the runs that it still
has in common with its former self; its label is for people.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from openk3.config import digest
from openk3.train.ablation.config import AblationSet, Equal, Group, Variant, with_steps
from openk3.train.config import ProbeData, TrainConfig
from openk3.train.flops import model_flops

Choices = Mapping[tuple[str, str], int | None]
"""The candidate that was chosen, by group and variant. None: none could be, and the variant is left out."""


@dataclass(frozen=True)
class Run:
    """A training run. `label`: what it was planned for, in words fit for a file name."""

    label: str
    config: TrainConfig

    @cached_property
    def digest(self) -> str:
        """Of the configuration."""
        return digest(self.config)[:12]

    @property
    def steps(self) -> int:
        return self.config.train.total_steps

    @property
    def tokens(self) -> int:
        """At most: the end of a document may leave padding."""
        return self.steps * self.config.train.step_tokens

    @property
    def flops(self) -> int:
        """Of the model in the whole run, with documents that fill their windows."""
        return self.steps * step_flops(self.config)

    @property
    def is_probe(self) -> bool:
        """Whether answers are counted after the training, see `openk3.train.probe`."""
        return isinstance(self.config.data, ProbeData)


@dataclass(frozen=True)
class Trial:
    """A run that helps to choose: of one candidate, with one search seed."""

    group: str
    variant: str
    candidate: int
    seed: int
    run: Run


@dataclass(frozen=True)
class Entry:
    """A place in the tables, and the run whose numbers stand there."""

    group: str
    variant: str
    equal: Equal
    seed: int
    run: Run


def trials(ablation: AblationSet) -> tuple[Trial, ...]:
    """The runs to choose with, before the others."""
    return tuple(
        Trial(
            group.name,
            variant.name,
            candidate,
            seed,
            _run(
                ablation.config(group, variant, seed, candidate),
                f"search {group.name} {variant.name} {candidate}",
            ),
        )
        for group in ablation.groups
        for variant in group.variants
        for candidate in range(len(variant.candidates))
        for seed in ablation.search_seeds
    )


def entries(ablation: AblationSet, choices: Choices) -> tuple[Entry, ...]:
    """The runs to compare, and where they stand.

    Args:
        choices: of every variant that has candidates.
    """
    return tuple(
        Entry(group.name, variant.name, equal, seed, run)
        for group in ablation.groups
        for equal in group.equal
        for variant in group.variants
        for seed in ablation.seeds
        if (run := _compared(ablation, choices, group, variant, equal, seed)) is not None
    )


def first_choices(ablation: AblationSet) -> Choices:
    """The first candidate of every variant: a stand-in for what the search will choose."""
    return {(g.name, v.name): 0 for g in ablation.groups for v in g.variants if v.candidates}


def distinct(items: Iterable[Trial | Entry]) -> tuple[Run, ...]:
    """Each run once, in order, under its first label."""
    runs: dict[str, Run] = {}
    for item in items:
        runs.setdefault(item.run.digest, item.run)
    return tuple(runs.values())


def step_flops(config: TrainConfig) -> int:
    """Model FLOPs of a step whose windows are full of one document."""
    windows = [config.train.context] * (config.train.step_tokens // config.train.context)
    return model_flops(config.model, windows, mtp=config.train.mtp_weight > 0).total


def _compared(
    ablation: AblationSet, choices: Choices, group: Group, variant: Variant, equal: Equal, seed: int
) -> Run | None:
    """None where the search of the variant, or of the baseline whose FLOPs it must meet, found nothing."""
    config = _chosen(ablation, choices, group, variant, seed)
    if config is None:
        return None
    use = f"{group.name} {variant.name}"
    if equal == "flops":
        baseline = _chosen(ablation, choices, group, group.baseline, seed)
        if baseline is None:
            return None
        budget = baseline.train.total_steps * step_flops(baseline)
        steps = max(1, round(budget / step_flops(config)))
        if steps != config.train.total_steps:
            config, use = with_steps(config, steps), f"{use} flops"
    return _run(config, use)


def _chosen(
    ablation: AblationSet, choices: Choices, group: Group, variant: Variant, seed: int
) -> TrainConfig | None:
    if not variant.candidates:
        return ablation.config(group, variant, seed)
    candidate = choices[group.name, variant.name]
    return None if candidate is None else ablation.config(group, variant, seed, candidate)


def _run(config: TrainConfig, use: str) -> Run:
    words = re.sub(r"[^a-z0-9]+", "-", use.lower()).strip("-")
    return Run(f"{words}-seed{config.train.seed}", config)
