"""How every tensor starts, and why: one table, one filler, one check.

Each tensor, and each routed expert, has a random stream of its own, named by the seed and its name: its
values depend on nothing else, neither on the order of construction nor on which layers or experts this
process holds. `check` compares what is in memory with the table; the trainer calls it before step 0,
because a tensor left as allocated can train, badly, without a sign.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from openk3.config import ModelConfig
from openk3.errors import InvalidInput
from openk3.model.decoder import K3

Tensor = torch.Tensor
STEP_RANGE = 1e-3, 1e-1
"""Initial decay per token, in nats: from forgetting over a thousand tokens to over ten."""


@dataclass(frozen=True)
class Distribution:
    """What a tensor's values follow. `mean` and `std` are those of one element; `low` and `high` bound it."""

    text: str
    draw: Callable[[tuple[int, ...], torch.Generator], Tensor]
    mean: float
    std: float
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True)
class Rule:
    """Tensors whose name matches `pattern` start from `distribution`, for the reason `why`."""

    pattern: str
    distribution: Distribution
    why: str


def table(config: ModelConfig) -> tuple[Rule, ...]:
    """The initialisation of every parameter and buffer of `config`'s model."""
    matrix = _normal(config.initializer_range)
    width = config.kda.conv_width if config.kda else 1
    bounded = config.kda is None or config.kda.gate == "bounded"
    bound = config.kda.gate_lower_bound if config.kda else -5.0
    return (
        Rule(
            r".*_res_proj\.weight", _constant(0), "a zero query averages its sources: no depth preferred yet"
        ),
        Rule(r".*norm\.weight", _constant(1), "gains of one leave the normed value as it is"),
        Rule(r".*_conv1d\.weight", _uniform(1 / math.sqrt(width)), "output variance of one tap's, any width"),
        Rule(
            r".*\.A_log",
            _constant(0) if bounded else _log_uniform_rate(1, 16),
            "bounded gate: slope one (report §2.1.1); softplus: rates spread over heads",
        ),
        Rule(
            r".*\.dt_bias",
            _bounded_step(bound) if bounded else _softplus_step(),
            "the step -g is log-uniform under the gate in use, so that channels forget at all speeds",
        ),
        Rule(r".*\.e_score_correction_bias", _constant(0), "no expert is preferred before a load was seen"),
        Rule(
            r"(embed_tokens|lm_head)\.weight|.*_proj(_with_mqa)?\.weight|.*\.experts\.w[123]|.*\.gate\.weight",
            matrix,
            "initializer_range of the config",
        ),
    )


def initialise(model: K3, seed: int) -> None:
    """Fill every parameter and buffer of `model` in place, as `table` says.

    Raises:
        InvalidInput: a tensor matches no rule.
    """
    for name, tensor, rule in _matched(model):
        # Routed experts are stacked, but each is a tensor of its own: a rank may hold some of them.
        parts = enumerate(tensor) if ".experts." in name else [(None, tensor)]
        for expert, part in parts:
            stream = name if expert is None else f"{name}.{expert}"
            generator = torch.Generator().manual_seed(_stream(seed, stream))
            values = rule.distribution.draw(tuple(part.shape), generator)
            with torch.no_grad():
                part.copy_(values)


def check(model: K3) -> list[str]:
    """What differs from the table, one line a tensor; empty when everything started as it should.

    Bounds hold for each element; mean and standard deviation within six standard errors of a sample that
    size.
    """
    findings = []
    for name, tensor, rule in _matched(model):
        want, x = rule.distribution, tensor.detach().double().flatten()
        n = max(x.numel(), 1)
        if not bool(torch.isfinite(x).all()):
            findings.append(f"{name}: holds values that are not finite; should be {want.text}")
            continue
        slack = 1e-2 * max(abs(want.mean), want.std, 1e-6)  # half precision rounds
        mean, std = float(x.mean()), float(x.std(correction=0)) if n > 1 else want.std
        outside = bool((x < want.low - slack).any() or (x > want.high + slack).any())
        # Kurtosis of all laws here is at most 3, so the deviation of a sample's std is at most std / sqrt(2
        # n).
        shifted = abs(mean - want.mean) > slack + 6 * want.std / math.sqrt(n)
        spread = abs(std - want.std) > slack + 6 * want.std / math.sqrt(2 * n)
        if outside or shifted or spread:
            findings.append(f"{name}: mean {mean:.4g}, std {std:.4g}; should be {want.text}")
    return findings


def _matched(model: K3) -> Iterator[tuple[str, Tensor, Rule]]:
    rules = table(model.config)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        for rule in rules:
            if re.fullmatch(rule.pattern, name):
                yield name, tensor, rule
                break
        else:
            raise InvalidInput(f"model.init: no rule says how {name} {tuple(tensor.shape)} starts")


def _stream(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")


def _constant(value: float) -> Distribution:
    return Distribution(
        f"{value:g}", lambda shape, _: torch.full(shape, float(value)), value, 0.0, value, value
    )


def _normal(std: float) -> Distribution:
    return Distribution(
        f"normal, std {std:g}", lambda shape, g: torch.empty(shape).normal_(0, std, generator=g), 0.0, std
    )


def _uniform(bound: float) -> Distribution:
    return Distribution(
        f"uniform in +-{bound:g}",
        lambda shape, g: torch.empty(shape).uniform_(-bound, bound, generator=g),
        0.0,
        bound / math.sqrt(3),
        -bound,
        bound,
    )


def _log_uniform_rate(low: float, high: float) -> Distribution:
    """log of a rate that is uniform in [low, high]."""
    span = high - low
    mean = (high * math.log(high) - low * math.log(low)) / span - 1
    square = sum(s * x * (math.log(x) ** 2 - 2 * math.log(x) + 2) for s, x in ((1, high), (-1, low))) / span
    return Distribution(
        f"log of uniform [{low:g}, {high:g}]",
        lambda shape, g: torch.empty(shape).uniform_(low, high, generator=g).log_(),
        mean,
        math.sqrt(square - mean**2),
        math.log(low),
        math.log(high),
    )


def _bounded_step(lower_bound: float) -> Distribution:
    """Bias b with -lower_bound sigmoid(b) = step."""
    return _step("logit", lambda step: torch.log(step / (-lower_bound - step)))


def _softplus_step() -> Distribution:
    """Bias b with softplus(b) = step."""
    return _step("inverse softplus", lambda step: step + torch.log(-torch.expm1(-step)))


def _step(name: str, inverse: Callable[[Tensor], Tensor]) -> Distribution:
    low, high = (math.log(s) for s in STEP_RANGE)
    # Moments by the midpoint rule over the log-uniform step.
    grid = inverse(torch.exp(low + (high - low) * (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000))
    return Distribution(
        f"{name} of a log-uniform step in [{STEP_RANGE[0]:g}, {STEP_RANGE[1]:g}]",
        lambda shape, g: inverse(torch.empty(shape).uniform_(low, high, generator=g).exp_()),
        float(grid.mean()),
        float(grid.std(correction=0)),
        float(grid.min()) - 1e-3,
        float(grid.max()) + 1e-3,
    )
