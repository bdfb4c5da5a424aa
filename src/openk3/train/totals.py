"""What the micro-batches of a step add up to, on this rank and then on all."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from openk3.config import ModelConfig
from openk3.data import Batch
from openk3.model import ForwardRecord, Loss
from openk3.train.flops import model_flops
from openk3.train.reduce import Reduction

Tensor = torch.Tensor


@dataclass
class StepTotals:
    """Sums, counts and maxima of a step.

    Attributes:
        next_token, mtp: sums of negative log-likelihood, nats. mtp_count: tokens in the latter.
        tokens: tokens read, padding left out.
        flops: of the model, as `openk3.train.flops` defines them.
        load, histogram: summed counts by layer. max_logit: largest by layer and head.
        sample: the record of the first micro-batch, for what is shown and not used.
    """

    next_token: Tensor | float = 0.0
    mtp: Tensor | float = 0.0
    mtp_count: Tensor | int = 0
    tokens: int = 0
    flops: int = 0
    load: dict[int, Tensor] = field(default_factory=dict)
    histogram: dict[int, Tensor] = field(default_factory=dict)
    max_logit: dict[int, Tensor] = field(default_factory=dict)
    sample: ForwardRecord | None = None

    def add(self, loss: Loss, record: ForwardRecord, batch: Batch, config: ModelConfig) -> None:
        """Take in one micro-batch; `batch` is the one on the host, so that nothing waits for the device."""
        self.next_token = self.next_token + loss.next_token.detach().double()
        if loss.mtp is not None:
            assert loss.mtp_count is not None
            self.mtp = self.mtp + loss.mtp.detach().double()
            self.mtp_count = self.mtp_count + loss.mtp_count
        mask = batch.token_mask
        self.tokens += batch.tokens.shape[0] if mask is None else int(mask.sum())
        self.flops += model_flops(config, batch.cu_seqlens.diff().tolist(), mtp=loss.mtp is not None).total
        for layer, counts in record.load.items():
            self.load[layer] = self.load[layer] + counts if layer in self.load else counts
        for layer, counts in record.histogram.items():
            self.histogram[layer] = self.histogram[layer] + counts if layer in self.histogram else counts
        for layer, logits in record.max_logit.items():
            before = self.max_logit.get(layer)
            self.max_logit[layer] = logits if before is None else torch.maximum(before, logits)
        if self.sample is None:
            self.sample = record

    def reduced(self, reduction: Reduction) -> StepTotals:
        """The same of the whole step, over all ranks."""
        local = [self.next_token, self.mtp, self.mtp_count, self.tokens, self.flops]
        sums = torch.tensor([float(value) for value in local], dtype=torch.float64)
        next_token, mtp, mtp_count, tokens, flops = reduction.sums(sums).tolist()
        return StepTotals(
            next_token=next_token,
            mtp=mtp,
            mtp_count=round(mtp_count),
            tokens=round(tokens),
            flops=round(flops),
            load=reduction.counts(self.load),
            histogram=reduction.counts(self.histogram),
            max_logit=reduction.maxima(self.max_logit),
            sample=self.sample,
        )
