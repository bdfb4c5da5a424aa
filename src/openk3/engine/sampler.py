"""The next token from scores, as a request asks for it.

A draw is a number in [0, 1) that a request's seed and the token's place alone decide, looked up in the
distribution's running sum. So a text does not depend on what else is computed in a step, and a token that was
guessed is right exactly if it is the one that would have been drawn.

In this order: `logit_bias` and penalties on the scores, temperature, `top_k`, `top_p` of what is left,
`min_p` against the most likely.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from openk3.errors import InvalidInput

Tensor = torch.Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    temperature: 0 takes the most likely, the first of equals. top_k: 0 for all. top_p, min_p: shares.
    presence_penalty: off the scores of tokens that were written; frequency_penalty: for each time that they
    were. repetition_penalty: divides positive scores of tokens written or in the prompt, multiplies negative
    ones. logit_bias: onto scores. seed: of the draws.

    Raises:
        InvalidInput: one is out of its range; the text names it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        ranges: dict[str, tuple[float, bool]] = {
            "temperature, from 0": (self.temperature, 0 <= self.temperature < math.inf),
            "top_k, from 0": (self.top_k, self.top_k >= 0),
            "top_p, above 0 to 1": (self.top_p, 0 < self.top_p <= 1),
            "min_p, from 0 to 1": (self.min_p, 0 <= self.min_p <= 1),
            "presence_penalty, -2 to 2": (self.presence_penalty, -2 <= self.presence_penalty <= 2),
            "frequency_penalty, -2 to 2": (self.frequency_penalty, -2 <= self.frequency_penalty <= 2),
            "repetition_penalty, above 0": (self.repetition_penalty, 0 < self.repetition_penalty < math.inf),
            "seed, from 0 below 2^63": (self.seed, 0 <= self.seed < 2**63),
        }
        for name, (value, fits) in ranges.items():
            if not fits:
                raise InvalidInput(f"sampling: {name}: got {value}")
        wrong = {token: bias for token, bias in self.logit_bias.items() if not math.isfinite(bias)}
        if wrong:
            raise InvalidInput(f"sampling: logit_bias must be finite, got {wrong}")


def probabilities(
    scores: Tensor, params: SamplingParams, prompt: Sequence[int] = (), written: Sequence[int] = ()
) -> Tensor:
    """The distribution of the next token, `[V]` in float64, on the scores' device.

    Args:
        scores: `[V]`, floating; -inf for what must not be drawn.
        prompt, written: the tokens before, for the penalties.

    Raises:
        InvalidInput: no token may be drawn, or a score is NaN or +inf.
    """
    x = _penalised(scores.double(), params, prompt, written)
    largest = float(x.max())
    if not math.isfinite(largest):
        raise InvalidInput(f"sampling: the largest score is {largest}")
    if params.temperature == 0:
        return torch.zeros_like(x).index_fill_(0, x.argmax(), 1.0)
    p = torch.softmax((x - largest) / params.temperature, 0)
    if params.top_k or params.top_p < 1:
        sorted_p, order = p.sort(descending=True, stable=True)
        if params.top_k:
            sorted_p[params.top_k :] = 0
        if params.top_p < 1:
            before = sorted_p.cumsum(0) - sorted_p
            sorted_p[before >= params.top_p * sorted_p.sum()] = 0
        p = torch.zeros_like(p).index_copy_(0, order, sorted_p)
    if params.min_p:
        p[p < params.min_p * p.max()] = 0
    return p / p.sum()


def _penalised(x: Tensor, params: SamplingParams, prompt: Sequence[int], written: Sequence[int]) -> Tensor:
    if params.logit_bias:
        tokens = torch.tensor(list(params.logit_bias), device=x.device)
        x = x.index_add(0, tokens, x.new_tensor(list(params.logit_bias.values())))
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *written}), dtype=torch.int64, device=x.device)
        mine = x[seen]
        x = x.index_copy(
            0,
            seen,
            torch.where(mine > 0, mine / params.repetition_penalty, mine * params.repetition_penalty),
        )
    if (params.presence_penalty or params.frequency_penalty) and written:
        counts = Counter(written)
        less = [params.presence_penalty + params.frequency_penalty * n for n in counts.values()]
        x = x.index_add(0, torch.tensor(list(counts), device=x.device), -x.new_tensor(less))
    return x


def draw(seed: int, place: int) -> float:
    """The number in [0, 1) of a request's `place`-th token; multiples of 2^-53."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=[place, 0, 0, 0])).random())


def choose(
    scores: Tensor, params: SamplingParams, prompt: Sequence[int] = (), written: Sequence[int] = ()
) -> int:
    """The next token. Arguments and errors as of `probabilities`."""
    p = probabilities(scores, params, prompt, written)
    if params.temperature == 0:
        return int(p.argmax())
    sums = p.cumsum(0)
    place = torch.searchsorted(sums, sums.new_tensor(draw(params.seed, len(written))) * sums[-1], right=True)
    if int(place) < len(p) and p[place] > 0:
        return int(place)
    return int(p.nonzero()[-1])  # a number so near 1 that the sum's rounding swallowed it
