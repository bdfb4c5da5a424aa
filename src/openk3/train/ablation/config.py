"""What a set of ablations is: groups of variants, each a few fields that differ from a base recipe.

A set is a TOML file. Those of the package go by name (`smoke`, `nano`) or by their path inside it
(`recipes/ablations/nano.toml`). Knows recipes and their fields; runs nothing.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from openk3.config import StrictModel, parse, parse_toml, read_toml
from openk3.errors import InvalidInput
from openk3.train.config import TrainConfig
from openk3.train.recipes import load_recipe

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
"""Of a set or a group: it becomes a part of file names."""

Seed = Annotated[int, Field(ge=0, lt=2**63)]

Equal = Literal["tokens", "flops"]
"""What the runs of a comparison have in common: the tokens they see, or their model FLOPs."""

Overrides = dict[str, Any]
"""Fields of `TrainConfig` as nested tables or by dotted names, as `optim.lr = 1e-3` in TOML."""

_FOLDER = "recipes/ablations"


class Variant(StrictModel):
    """One way to train. The first variant of a group is its baseline."""

    name: str = Field(min_length=1)
    overrides: Overrides = Field(default_factory=dict)
    candidates: tuple[Overrides, ...] = ()
    """Further overrides to choose from, such as a few learning rates: each is tried with the search seeds,
    and the best is what the variant is measured with."""


class Group(StrictModel):
    """Variants that are compared with each other."""

    name: Name
    question: str = Field(min_length=1)
    """What the comparison is about, in a sentence for its reader."""
    overrides: Overrides = Field(default_factory=dict)
    """For all of its variants."""
    equal: tuple[Equal, ...] = Field(default=("tokens", "flops"), min_length=1)
    """How to compare: at the tokens of the recipe, and with steps that match the baseline's model FLOPs."""
    variants: tuple[Variant, ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_unique("variant", [variant.name for variant in self.variants])
        return self

    @property
    def baseline(self) -> Variant:
        return self.variants[0]


class AblationSet(StrictModel):
    """Groups of variants of one recipe, all with the same seeds."""

    name: Name
    description: str = ""
    base: str | dict[str, Any]
    """A training recipe by name or path, or the fields of one."""
    overrides: Overrides = Field(default_factory=dict)
    """For all runs. A later one wins: of the set, the group, the variant, the candidate."""
    seeds: tuple[Seed, ...] = Field(min_length=1)
    """Of the runs that are compared: of weights and order of the data. Runs are paired by it."""
    search_seeds: tuple[Seed, ...] = ()
    """Of the runs that choose among candidates; others than `seeds`, or the chosen one would be favoured."""
    keep_checkpoints: bool = False
    """Leave the weights of finished runs on the disk."""
    groups: tuple[Group, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_unique("group", [group.name for group in self.groups])
        _check_unique("seed", list(self.seeds))
        _check_unique("search seed", list(self.search_seeds))
        if both := set(self.seeds) & set(self.search_seeds):
            raise ValueError(f"search_seeds: {sorted(both)} stand among the seeds too; choose with others")
        if not self.search_seeds and any(v.candidates for group in self.groups for v in group.variants):
            raise ValueError("a variant has candidates: give the search_seeds to try them with")
        return self

    def config(self, group: Group, variant: Variant, seed: int, candidate: int | None = None) -> TrainConfig:
        """The training run of a variant, its length in steps.

        Raises:
            InvalidInput: an unknown or wrong field; names group and variant.
        """
        layers = [self.overrides, group.overrides, variant.overrides]
        if candidate is not None:
            layers.append(variant.candidates[candidate])
        words: dict[str, str] = {}
        for layer in layers:
            for name, text in flat(layer).items():
                words.pop(name, None)  # the last one set stands last: `train.steps` takes back `train.tokens`
                words[name] = text
        try:
            config = load_recipe(self.base, words | {"train.seed": str(seed)})
        except InvalidInput as error:
            raise InvalidInput(f"set {self.name}, group {group.name}, {variant.name}: {error}") from None
        return with_steps(config, config.train.total_steps)


def load_set(
    name: str | Path, overrides: Mapping[str, str] | None = None, seeds: int | None = None
) -> AblationSet:
    """A set of the package, or a TOML file.

    Args:
        overrides: text by dotted field name, on top of the set's own; groups and variants still win.
        seeds: so many, 0 and up, instead of the set's.

    Raises:
        InvalidInput: no such set, or a wrong field in it or in one of its runs; named.
    """
    values, source = _read(name)
    ablation = parse(AblationSet, values, source)
    changes: dict[str, Any] = {"overrides": flat(ablation.overrides) | dict(overrides or {})}
    if seeds is not None:
        changes["seeds"] = tuple(range(seeds))
    ablation = parse(AblationSet, ablation.model_dump() | changes, source)
    for group in ablation.groups:
        for variant in group.variants:
            for candidate in range(len(variant.candidates)) if variant.candidates else (None,):
                ablation.config(group, variant, ablation.seeds[0], candidate)
    return ablation


def set_names() -> list[str]:
    """The sets that come with the package."""
    folder = files("openk3") / _FOLDER
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def with_steps(config: TrainConfig, steps: int) -> TrainConfig:
    """`config` for exactly so many steps."""
    return config.model_copy(
        update={"train": config.train.model_copy(update={"steps": steps, "tokens": None})}
    )


def flat(overrides: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested fields by dotted name, as the text that a command line would have."""
    words: dict[str, str] = {}
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            words |= flat(value, f"{prefix}{key}.")
        else:
            words[prefix + key] = value if isinstance(value, str) else json.dumps(value, default=str)
    return words


def _read(name: str | Path) -> tuple[dict[str, Any], str]:
    if os.path.isfile(name):
        return read_toml(Path(name)), str(name)
    known = set_names()
    short = str(name).removeprefix(f"{_FOLDER}/").removesuffix(".toml")
    if short in known:
        content = (files("openk3") / _FOLDER / f"{short}.toml").read_bytes()
        return parse_toml(content, f"set {short}"), f"set {short}"
    near = difflib.get_close_matches(short, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InvalidInput(f"{name}: neither a set of the package ({', '.join(known)}) nor a TOML file{hint}")


def _check_unique(what: str, values: list[Any]) -> None:
    if twice := sorted({str(value) for value in values if values.count(value) > 1}):
        raise ValueError(f"{what} {', '.join(twice)} stands twice")
