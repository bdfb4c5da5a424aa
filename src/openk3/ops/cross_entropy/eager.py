"""Cross-entropy of a linear head, token chunk by token chunk, with the gradient formed in the forward.

A chunk's logits live once, in one buffer that the next chunk reuses, and turn in place into what the loss and
both gradients want: logits z, softmax p, then p minus the target's one-hot, which is d loss / d z. What the
backward keeps is the finished gradients `[T, d]` and `[V, d]`; it only scales them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from openk3.ops.precision import own_dtypes, widen

Tensor = torch.Tensor

CPU_CHUNK = 1 << 21  # logits alive at once: 8 MB in fp32, within the last-level cache
GPU_CHUNK = 1 << 28
MIN_TOKENS = (
    64  # each chunk reads the whole weight, so a wide vocabulary needs more tokens than the cache holds
)


def _loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    valid: Tensor,
    chunk_tokens: int | None,
    with_d_hidden: bool,
    with_d_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    wide_weight, V = widen(weight), len(weight)
    logits_alive = CPU_CHUNK if weight.device.type == "cpu" else GPU_CHUNK
    chunk = chunk_tokens or max(MIN_TOKENS, logits_alive // V)
    rows = valid.nonzero().squeeze(1)  # tokens without a target cost nothing
    buffer = wide_weight.new_empty(min(chunk, len(rows)), V)
    losses = wide_weight.new_empty(len(rows), 1)
    d_hidden = wide_weight.new_zeros(hidden.shape) if with_d_hidden else None
    d_weight = torch.zeros_like(wide_weight) if with_d_weight else None
    for start in range(0, len(rows), chunk):
        tokens = rows[start : start + chunk]
        x, target = widen(hidden.index_select(0, tokens)), targets.index_select(0, tokens).unsqueeze(1)
        z = torch.mm(x, wide_weight.T, out=buffer[: len(tokens)])
        target_logit, largest = z.gather(1, target), z.amax(1, keepdim=True)
        p = torch.softmax(z, 1, out=z)
        # -log p[target] would be infinite where p underflows; the row's log-sum-exp is largest - log max(p)
        losses[start : start + chunk] = (largest - target_logit) - p.amax(1, keepdim=True).log_()
        if d_hidden is not None or d_weight is not None:
            p.scatter_add_(1, target, p.new_full((1, 1), -1.0).expand_as(target))
        if d_hidden is not None:
            d_hidden.index_copy_(0, tokens, p @ wide_weight)
        if d_weight is not None:
            d_weight.addmm_(p.T, x)
    return losses.sum(), d_hidden, d_weight


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, valid: Tensor, chunk_tokens: int | None
    ) -> Tensor:
        needed = ctx.needs_input_grad[:2]
        loss, *gradients = _loss_and_gradients(hidden, weight, targets, valid, chunk_tokens, *needed)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss

    @staticmethod
    @own_dtypes
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (
            None if gradient is None else (gradient * d_loss).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *scaled, None, None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, valid: Tensor, chunk_tokens: int | None
) -> Tensor:
    """See `openk3.ops.cross_entropy.linear_cross_entropy`."""
    if not torch.is_grad_enabled():
        return _loss_and_gradients(hidden, weight, targets, valid, chunk_tokens, False, False)[0]
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, valid, chunk_tokens)  # type: ignore[no-untyped-call]
    return loss
