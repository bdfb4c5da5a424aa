"""Validation: loss in nats per token and bits per byte, every token of the documents once.

Bits per byte are a code length: what it takes to write the documents' bytes with this model. A document's
first token is predicted from nothing, so it is charged the uniform price ln(vocabulary). Training state is
not touched: no gradient, no counting, no bias update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from openk3.data import validation_batches
from openk3.model import K3
from openk3.train.reduce import OneProcess, Reduction


class HeldOut(Protocol):
    """Token documents and the bytes they stand for; `openk3.data.TokenSplit` is one."""

    @property
    def lengths(self) -> NDArray[np.int64]: ...

    @property
    def byte_counts(self) -> NDArray[np.int64]: ...

    def tokens(self, document: int) -> NDArray[np.uint32]: ...


class FirstDocuments:
    """The first documents of `documents` up to about `tokens` tokens: whole ones, and at least one."""

    def __init__(self, documents: HeldOut, tokens: int) -> None:
        n = max(1, int(np.searchsorted(np.cumsum(documents.lengths), tokens, side="right")))
        self.lengths, self.byte_counts = documents.lengths[:n], documents.byte_counts[:n]
        self.tokens = documents.tokens


@dataclass(frozen=True)
class Evaluation:
    """`loss`: nats per predicted token. `tokens`, `bytes`: of the documents."""

    loss: float
    bits_per_byte: float
    tokens: int
    bytes: int


@torch.no_grad()
def evaluate(
    model: K3,
    sources: Iterable[HeldOut],
    *,
    context: int,
    windows: int,
    reduction: Reduction | None = None,
) -> Evaluation:
    """Measure `model` on all documents of all `sources`.

    Args:
        context: tokens of a window; a longer document goes on in the next window without its past.
        windows: of one forward.
    """
    reduction = reduction or OneProcess()
    device = model.embed_tokens.weight.device
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # nats, predicted tokens
    documents = tokens = size = 0
    training = model.training
    model.eval()
    try:
        for source in sources:
            documents += len(source.lengths)
            tokens += int(source.lengths.sum())
            size += int(source.byte_counts.sum())
            batches = validation_batches(source, context, windows, rank=reduction.rank, world=reduction.ranks)
            for batch in batches:
                local = batch.to(device)
                loss = model.loss(local.tokens, local.targets, local.cu_seqlens)
                sums += torch.stack([loss.next_token.double(), loss.count.double()])
    finally:
        model.train(training)
    nll, count = reduction.sums(sums).tolist()
    nats = nll + documents * math.log(model.config.vocab_size)
    return Evaluation(nll / max(count, 1), nats / math.log(2) / max(size, 1), tokens, size)
