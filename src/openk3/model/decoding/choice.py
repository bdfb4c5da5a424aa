"""The next token of many sequences at once, where the logits lie."""

from __future__ import annotations

import torch

from openk3.model.generate import Sampling
from openk3.ops.decoding import most_likely

Tensor = torch.Tensor

NO_TOKEN = -1  # as most_likely has it


def choose_tokens(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Tensor:
    """A token from each row of logits, without a look from the host.

    The distribution is that of `openk3.model.generate.draw`; a row's token is where its own uniform number
    falls in the cumulated probabilities, most likely first, so that it depends on no other row.

    Args:
        logits: `[n, V]`.
        uniform: `[n]` in [0, 1); temperature 0 needs none of them.

    Returns:
        int64 `[n]`; NO_TOKEN where the largest logit is not finite, NaN counting as the largest.
    """
    if sampling.temperature == 0:
        return most_likely(logits)
    ordered, ids = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
    probabilities = torch.softmax((ordered - ordered[:, :1]) / sampling.temperature, -1)
    kept = probabilities.cumsum(-1) - probabilities < sampling.top_p
    if sampling.top_k is not None:
        kept[:, sampling.top_k :] = False
    reached = probabilities.masked_fill(~kept, 0).cumsum(-1)
    index = torch.searchsorted(reached, uniform.unsqueeze(1).double() * reached[:, -1:], right=True)
    index = index.minimum(kept.sum(-1, keepdim=True) - 1).clamp(min=0)
    return torch.where(ordered[:, :1].isfinite(), ids.gather(1, index), NO_TOKEN).squeeze(1)
