"""What one forward pass leaves behind for the trainer: routing decisions, load and margin counts, maxima.

A record belongs to one forward of one micro-batch in training. When activations are recomputed the layers run
again with the same record: they find their routing decision in it, take it, and count nothing twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

Tensor = torch.Tensor


@dataclass
class ForwardRecord:
    """Filled by the layers, keyed by 0-based layer (the MTP layer follows the last).

    Attributes:
        token_mask: bool `[T]`, the tokens that count (None: all). Padding must not shift a cross-token
            statistic.
        detail: also fill `source_weights` and `state_norm`, which cost a pass over the activations.
        chosen: expert ids `[T, k]` and cut-offs `[T]` of each router.
        load: int64 `[E]`, counted tokens per expert.
        histogram: int64 `[E, bins]`, counts of the required bias (Appendix D); only where QB balances.
        max_logit: `[H]`, largest scaled attention logit of each MLA head.
        source_weights: `[S]`, mean AttnRes weight of each source, keyed by mix name.
        state_norm: `[H]`, mean Frobenius norm of the final KDA states.
    """

    token_mask: Tensor | None = None
    detail: bool = False
    chosen: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    load: dict[int, Tensor] = field(default_factory=dict)
    histogram: dict[int, Tensor] = field(default_factory=dict)
    max_logit: dict[int, Tensor] = field(default_factory=dict)
    source_weights: dict[str, Tensor] = field(default_factory=dict)
    state_norm: dict[int, Tensor] = field(default_factory=dict)

    def counting(self, tokens: Tensor) -> ForwardRecord:
        """This record for layers in which only `tokens` (bool `[T]`) count; what they leave lands in this
        one."""
        return replace(self, token_mask=tokens if self.token_mask is None else self.token_mask & tokens)
