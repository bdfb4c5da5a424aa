"""Cross-entropy of a linear head on the GPU, token chunk by token chunk, the gradient formed in the forward.

The three products are cuBLAS's. Between them one kernel reads each row of a chunk's logits twice, for its
log-sum-exp and for softmax minus one-hot, which it writes over them: no other tensor of that size exists. The
gradient to the weight is accumulated over chunks in fp32 by the product itself.

Logits are kept in the dtype of the inputs, as `K3.logits` makes them, unless `LOGITS` says otherwise; all
that follows is fp32, up to the operands of the next products. Nothing waits for the host: tokens without a
target go through the products as zeros, and a target out of range makes loss and gradients NaN.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from openk3.ops.cross_entropy import IGNORE_INDEX
from openk3.ops.kernel_operator import kernel_operator

Tensor = torch.Tensor

# 8,192 tokens of K3's vocabulary in bf16. With a product's tile of 128 x 256 that is what occupies all
# multiprocessors of an H200 in d hidden at d = 512, and the weight's gradient is read and written 16 times
# for 131,072 tokens.
LOGIT_BYTES = 5 << 29
MIN_TOKENS = 128
LOGITS: torch.dtype | None = None  # dtype of a chunk's logits; None: that of the inputs
ROWS = {"BLOCK": 8192, "REVERSED": True, "num_warps": 16}

IGNORED = tl.constexpr(IGNORE_INDEX)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _softmax_rows(
    logits, targets, losses, gradient, V,
    WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr, REVERSED: tl.constexpr,
):  # fmt: skip
    """A row's loss, and softmax minus one-hot to `gradient`, which may be `logits`.

    REVERSED: from the row's end, which was read last and may still be in the cache.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    logits += row * V
    gradient += row * V
    if target == IGNORED:
        tl.store(losses + row, 0.0)
        if WITH_GRADIENT:
            for start in range(0, V, BLOCK):
                i = start + lane
                tl.store(gradient + i, tl.zeros([BLOCK], gradient.dtype.element_ty), mask=i < V)
    else:
        in_range = (target >= 0) & (target < V)
        target_logit = tl.load(logits + target, mask=in_range, other=float("nan")).to(tl.float32)
        # Each lane has its own maximum: one exponential an element, and no reduction before the end.
        largest = tl.full([BLOCK], -1.0e38, tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            i = start + lane
            z = tl.load(logits + i, mask=i < V, other=float("-inf")).to(tl.float32)
            apart = tl.exp2(-tl.abs(z - largest) * LOG2_E)
            total = tl.where(z > largest, total * apart + 1.0, total + apart)
            largest = tl.maximum(largest, z)
        row_largest = tl.max(largest, 0)
        row_total = tl.sum(total * tl.exp2((largest - row_largest) * LOG2_E), 0)
        loss = (row_largest - target_logit) + tl.log(row_total)
        tl.store(losses + row, loss)
        if WITH_GRADIENT:
            scale = tl.where(in_range, 1.0 / row_total, float("nan"))
            column = tl.where(in_range, target, -1).to(tl.int32)
            blocks = tl.cdiv(V, BLOCK)
            for block in range(0, blocks):
                if REVERSED:
                    i = (blocks - 1 - block) * BLOCK + lane
                else:
                    i = block * BLOCK + lane
                z = tl.load(logits + i, mask=i < V, other=float("-inf")).to(tl.float32)
                p = tl.exp2((z - row_largest) * LOG2_E) * scale
                p = tl.where(i == column, p - 1.0, p)
                tl.store(gradient + i, p.to(gradient.dtype.element_ty), mask=i < V)


def _multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> None:
    """out = a b, or out += a b; `out` may be fp32 where a and b are half precisions."""
    if a.dtype != out.dtype and not a.is_cuda:  # the overloads below are CUDA's alone
        a, b = a.to(out.dtype), b.to(out.dtype)
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif add:  # self in fp32: torch 2.10 or newer
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _default_chunk(V: int, size: int) -> int:
    """Tokens whose logits are alive at once, a multiple of a product's tile."""
    return max(MIN_TOKENS, LOGIT_BYTES // (V * size) // MIN_TOKENS * MIN_TOKENS)


@kernel_operator("openk3::linear_cross_entropy")
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_tokens: int | None,
    with_d_hidden: bool,
    with_d_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and fp32 gradients to hidden and weight; those not asked for are empty."""
    T, V = len(hidden), len(weight)
    dtype, fp32 = LOGITS or hidden.dtype, torch.float32
    chunk = max(1, min(chunk_tokens or _default_chunk(V, dtype.itemsize), T))
    weight, targets = weight.contiguous(), targets.contiguous()
    losses = hidden.new_empty(T, dtype=fp32)
    d_hidden = hidden.new_empty(hidden.shape if with_d_hidden else 0, dtype=fp32)
    d_weight = hidden.new_empty(weight.shape if with_d_weight else 0, dtype=fp32)
    logits = hidden.new_empty(chunk, V, dtype=dtype)
    gradient = logits if dtype == hidden.dtype else hidden.new_empty(chunk, V)
    for start in range(0, T, chunk):
        part = slice(start, min(start + chunk, T))
        n = part.stop - start
        # Whatever stands where there is no target would else reach the weight's gradient, were it NaN.
        x = hidden[part].masked_fill((targets[part] == IGNORE_INDEX)[:, None], 0.0)
        _multiply(x, weight.T, logits[:n])
        _softmax_rows[(n,)](
            logits, targets[part], losses[part], gradient, V,
            WITH_GRADIENT=with_d_hidden or with_d_weight, **ROWS,
        )  # fmt: skip
        if with_d_hidden:
            _multiply(gradient[:n], weight, d_hidden[part])
        if with_d_weight:
            _multiply(gradient[:n].T, x, d_weight, add=start > 0)
    if T == 0:
        d_weight.zero_()
    return losses.sum(), d_hidden, d_weight


@_linear_cross_entropy.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_tokens: int | None,
    with_d_hidden: bool,
    with_d_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(hidden.shape if with_d_hidden else 0, dtype=torch.float32),
        hidden.new_empty(weight.shape if with_d_weight else 0, dtype=torch.float32),
    )


@kernel_operator("openk3::linear_cross_entropy_scaled")
def _scaled(gradient: Tensor, factor: Tensor, like: Tensor) -> Tensor:
    """gradient * factor in the dtype of `like`, rounded once. An operator, so that it has no derivative."""
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=like.dtype))


@_scaled.register_fake
def _(gradient: Tensor, factor: Tensor, like: Tensor) -> Tensor:
    return torch.empty_like(gradient, dtype=like.dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *_, ctx.with_d_hidden, ctx.with_d_weight = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])
    ctx.dtype = inputs[0].dtype
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    needed = (ctx.with_d_hidden, ctx.with_d_weight)
    if d_loss is None:
        return None, None, None, None, None, None
    like = d_loss.new_empty(0, dtype=ctx.dtype)
    scaled = (
        torch.ops.openk3.linear_cross_entropy_scaled(gradient, d_loss, like) if wanted else None
        for gradient, wanted in zip(ctx.saved_tensors, needed, strict=True)
    )
    return *scaled, None, None, None, None


_linear_cross_entropy.register_autograd(_differentiate, setup_context=_keep)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int | None) -> Tensor:
    """See `openk3.ops.cross_entropy.linear_cross_entropy`."""
    needed = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight)]
    loss: Tensor = torch.ops.openk3.linear_cross_entropy(hidden, weight, targets, chunk_tokens, *needed)[0]
    return loss
