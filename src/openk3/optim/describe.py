"""The table of rules as it falls on one model: rows to print before a run, so that nobody has to guess."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from openk3.config import ModelConfig
from openk3.optim.config import OptimConfig
from openk3.optim.rules import Shape, Split, assign


@dataclass(frozen=True)
class Row:
    """Parameters of one rule and one shape.

    Attributes:
        pattern, why: of the rule.
        parameters: how many there are.
        method: "muon" or "adamw".
        blocks: the matrices that Newton-Schulz sees in each, as "4 x [32, 128]"; empty under AdamW.
    """

    pattern: str
    shape: Shape
    parameters: int
    method: str
    blocks: str
    weight_decay: float
    lr_scale: float
    why: str

    @property
    def elements(self) -> int:
        return self.parameters * math.prod(self.shape)


def describe(
    named_parameters: Iterable[tuple[str, torch.Tensor]], config: OptimConfig, model: ModelConfig
) -> list[Row]:
    """How these parameters will be trained, in their order; meta tensors serve.

    Raises:
        InvalidInput: as `openk3.optim.rules.assign`.
    """
    shapes = {name: tuple(p.shape) for name, p in named_parameters}
    treatments = assign(shapes, config, model)
    counts = Counter((treatment, shapes[name]) for name, treatment in treatments.items())
    return [
        Row(
            pattern=treatment.rule.pattern,
            shape=shape,
            parameters=count,
            method="muon" if treatment.split else "adamw",
            blocks=_blocks(treatment.split, shape) if treatment.split else "",
            weight_decay=treatment.weight_decay,
            lr_scale=treatment.lr_scale,
            why=treatment.rule.why,
        )
        for (treatment, shape), count in counts.items()
    ]


def _blocks(split: Split, shape: Shape) -> str:
    return " + ".join(f"{split.groups} x [{band}, {shape[-1]}]" for band in split.bands)
