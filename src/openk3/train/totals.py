"""What the micro-batches of a step add up to, on this rank and then on all. Nothing waits for the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from openk3.config import ModelConfig
from openk3.model import ForwardRecord, Loss
from openk3.train.feed import Fed
from openk3.train.flops import model_flops
from openk3.train.reduce import Reduction

Tensor = torch.Tensor


@dataclass
class StepTotals:
    """Sums, counts and maxima of a step, where they were computed; scalars are float64 `[]`.

    Attributes:
        next_token, mtp: sums of negative log-likelihood, nats. mtp_count: tokens in the latter.
        tokens: tokens read, padding left out.
        flops: of the model, as `openk3.train.flops` defines them.
        load, histogram: summed counts by layer. max_logit: largest by layer and head.
        sample: the record of the first micro-batch, for what is shown and not used.
    """

    next_token: Tensor
    mtp: Tensor
    mtp_count: Tensor
    tokens: Tensor
    flops: Tensor
    load: dict[int, Tensor] = field(default_factory=dict)
    histogram: dict[int, Tensor] = field(default_factory=dict)
    max_logit: dict[int, Tensor] = field(default_factory=dict)
    sample: ForwardRecord | None = None

    @classmethod
    def nothing(cls, device: torch.device) -> StepTotals:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return cls(zero, zero, zero, zero, zero)

    def add(self, loss: Loss, record: ForwardRecord, fed: Fed, config: ModelConfig) -> None:
        """Take in one micro-batch."""
        self.next_token = self.next_token + loss.next_token.detach().double()
        if loss.mtp is not None:
            assert loss.mtp_count is not None
            self.mtp = self.mtp + loss.mtp.detach().double()
            self.mtp_count = self.mtp_count + loss.mtp_count
        self.tokens = self.tokens + fed.tokens
        lengths = fed.host.cu_seqlens.diff().tolist()
        self.flops = self.flops + model_flops(config, lengths, mtp=loss.mtp is not None).total
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
        next_token, mtp, mtp_count, tokens, flops = reduction.sums(torch.stack(local)).unbind()
        return StepTotals(
            next_token,
            mtp,
            mtp_count,
            tokens,
            flops,
            load=reduction.counts(self.load),
            histogram=reduction.counts(self.histogram),
            max_logit=reduction.maxima(self.max_logit),
            sample=self.sample,
        )
