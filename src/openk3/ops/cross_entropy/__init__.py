"""Cross-entropy of the language-model head; its logits, over K3's 163,840 entries, never exist whole.

Knows nothing of normalisation over a global batch: it returns the sum and the count, and the trainer divides
after it has reduced both over all ranks.
"""

from __future__ import annotations

import torch

from openk3.errors import InvalidInput
from openk3.ops.dispatch import Implementation, Kernel, choose
from openk3.ops.precision import own_dtypes

__all__ = ["IGNORE_INDEX", "linear_cross_entropy"]

KERNELS = (
    Kernel(
        "linear_cross_entropy",
        takes="bf16 or fp32",
        checked_on="H200 (sm_90)",
        compiles_for=("sm_80", "sm_86", "sm_89", "sm_100", "sm_120"),
    ),
)

IGNORE_INDEX = -100


@own_dtypes
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    chunk_tokens: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over tokens of -log softmax(hidden weight^T)[target].

    Args:
        hidden: `[T, d]`, floating; weight: `[V, d]`, same dtype and device. Softmax and the accumulated
            gradients are at least fp32, and so are logits but in "triton", which rounds them to the dtype of
            its inputs, as `K3.logits` does: in bf16, with logits of size 4 over K3's vocabulary, gradients
            are wrong by 6e-3 and the loss by 5e-5.
        targets: int64 `[T]` in [0, V), or -100 where a token carries no loss. "triton" leaves the values
            unchecked on a GPU, where to read them is to wait for the device: one out of range makes the
            loss and the gradients NaN.
        chunk_tokens: tokens whose logits exist at a time; by default what fits a budget of 8 MB of logits
            on a CPU and 1 GB on a GPU, but at least 64; in "triton" 2.5 GB and 128.
        implementation: force "reference", "eager" or "triton" (bf16 and fp32); by default the fastest that
            takes the inputs on their device.

    Returns:
        loss_sum: scalar, at least fp32; 0 when no token carries loss.
        count: int64 scalar, the tokens that carry loss.
        With gradients enabled the gradient is formed right here, and held (`[T, d]` and `[V, d]`, at least
        fp32) until the backward scales it.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit, a target is out of range (the text names the
            first; not from "triton" on a GPU), or chunk_tokens is not positive.
        KernelUnavailable: the forced implementation cannot run here.
    """
    _check(hidden, weight, targets, chunk_tokens)
    valid = targets != IGNORE_INDEX
    kernels = hidden.dtype in (torch.bfloat16, torch.float32)
    chosen = choose(
        "linear_cross_entropy", hidden, implementation, kernels=kernels, by_default=KERNELS[0].checked
    )
    if chosen != "triton" or targets.device.type == "cpu":
        _check_range(targets, valid, len(weight))
    match chosen:
        case "triton":
            from openk3.ops.cross_entropy.kernels import linear_cross_entropy as triton

            loss = triton(hidden, weight, targets, chunk_tokens)
        case "reference":
            from openk3.ops.cross_entropy.reference import linear_cross_entropy as reference

            loss = reference(hidden, weight, targets, valid)
        case _:
            from openk3.ops.cross_entropy.eager import linear_cross_entropy as eager

            loss = eager(hidden, weight, targets, valid, chunk_tokens)
    return loss, valid.sum()


def _check(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk_tokens: int | None
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise InvalidInput(
            f"linear_cross_entropy: hidden is {tuple(hidden.shape)}, weight is {tuple(weight.shape)}; "
            "they must be [T, d] and [V, d]"
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise InvalidInput(
            f"linear_cross_entropy: hidden is {hidden.dtype}, weight is {weight.dtype}; "
            "they must share one floating dtype"
        )
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise InvalidInput(
            f"linear_cross_entropy: targets is {tuple(targets.shape)} {targets.dtype}; "
            f"it must be ({len(hidden)},) int64"
        )
    if not hidden.device == weight.device == targets.device:
        raise InvalidInput(
            f"linear_cross_entropy: hidden is on {hidden.device}, weight on {weight.device}, "
            f"targets on {targets.device}; they must be on one device"
        )
    if chunk_tokens is not None and chunk_tokens < 1:
        raise InvalidInput(f"linear_cross_entropy: chunk_tokens must be positive, got {chunk_tokens}")


def _check_range(targets: torch.Tensor, valid: torch.Tensor, vocabulary: int) -> None:
    outside = valid & ((targets < 0) | (targets >= vocabulary))
    if outside.any():
        position = int(outside.nonzero()[0])
        raise InvalidInput(
            f"linear_cross_entropy: targets[{position}] is {int(targets[position])}; it must be in "
            f"[0, {vocabulary}), or {IGNORE_INDEX} for no loss"
        )
