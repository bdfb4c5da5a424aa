"""KDA in chunks on plain PyTorch, forward and backward by hand (report §2.1.1 eq. 1-4).

With the write vector w = beta k, eq. 1 is

    S <- diag(alpha) S;    e = v - S^T k;    S <- S + w e^T;    o = scale S^T q

`layout` cuts sequences into chunks, `halving` works inside them, `scan` between them; this file runs them,
one slab at a time, both ways. Kept for the backward: the inputs, and the state that enters each chunk,
`[V, K]` per tile (K / chunk size times as much as v in the compute dtype); the rest is made again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from openk3.ops.kda.halving import Rows, join, join_backward
from openk3.ops.kda.layout import ChunkLayout, Slab
from openk3.ops.kda.scan import errors_again, outputs, scan, scan_backward
from openk3.ops.kda.step import step
from openk3.ops.packed import one_token_each
from openk3.ops.precision import own_dtypes

# Measured on two cores, K = V = 64: 16 and 32 tie, 64 takes 1.1x, 128 1.35x. Longer chunks keep fewer states.
CHUNK_SIZE = 32

# Elements of one [B, R, K] array of a slab. On a CPU 0.5 MB in fp32, so that the dozen arrays in flight stay
# in the cache: half as much costs 1.1x, twice as much the same, the whole batch at once 1.15x. Elsewhere
# launches cost more than memory does.
SLAB_ELEMENTS = {"cpu": 1 << 17}
SLAB_ELEMENTS_ELSEWHERE = 1 << 24

Tensor = torch.Tensor


class _Kda(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor,
        layout: ChunkLayout,
        scale: float,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        inputs = _by_row(q, k, v, g, beta)
        state = layout.to_lanes(initial_state)
        o = torch.empty_like(inputs[2])
        kept = []
        for slab in layout.slabs:
            rows, values, _ = _gather(slab, inputs, state.dtype)
            chunks, _ = join(rows)
            errors, entering = scan(chunks, values, slab.steps, state)
            slab.scatter(outputs(chunks, errors, entering, scale), o)
            if keep:
                kept.append(entering)
        ctx.save_for_backward(q, k, v, g, beta, *kept)
        ctx.layout, ctx.scale = layout, scale
        return o.view(v.shape), layout.to_sequences(state)

    @staticmethod
    @own_dtypes
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # read once: under recompute a second look is an error
        saved, kept = tensors[:5], tensors[5:]
        inputs = _by_row(*saved)
        (d_o,) = _by_row(d_o)
        grads = [torch.empty_like(x) for x in inputs]
        d_state = ctx.layout.to_lanes(d_final)
        for slab, entering in zip(reversed(ctx.layout.slabs), reversed(kept), strict=True):
            rows, values, beta = _gather(slab, inputs, d_state.dtype)
            chunks, joints = join(rows)
            errors = errors_again(chunks, values, entering)
            d_out = slab.gather(d_o).to(d_state.dtype).mul_(ctx.scale)
            d_read, d_leaving = scan_backward(chunks, d_out, slab.steps, d_state)
            d_reads, d_writes, d_g = join_backward(
                rows,
                chunks,
                joints,
                d_read,
                errors,
                d_left=(d_read.flatten(1, 2) @ entering).view_as(chunks.left),
                d_right=errors @ d_leaving,
                d_log_decay=(entering * d_leaving).sum(1).mul_(chunks.decay),
            )
            d_beta = (d_writes * rows.reads[:, 0]).sum(-1, keepdim=True)
            d_k = d_reads[:, 0].addcmul_(d_writes, beta)
            d_v = d_read[:, 0].neg()
            for tiles, grad in zip((d_reads[:, 1], d_k, d_v, d_g, d_beta), grads, strict=True):
                slab.scatter(tiles, grad)
        d_inputs = (grad.view(x.shape) for grad, x in zip(grads, saved, strict=True))
        return *d_inputs, ctx.layout.to_sequences(d_state), None, None, None


def _by_row(*inputs: Tensor) -> list[Tensor]:
    """Each `[T, H, F]` as `[T * H, F]` and `[T, H]` as `[T * H, 1]`, no copy where contiguous."""
    return [x.reshape(x.shape[0] * x.shape[1], x.shape[2] if x.dim() == 3 else 1) for x in inputs]


def _gather(slab: Slab, inputs: list[Tensor], dtype: torch.dtype) -> tuple[Rows, Tensor, Tensor]:
    """A slab's tokens in the compute dtype: rows for `halving`, values `[B, R, V]`, beta `[B, R, 1]`."""
    q, k, v, g, beta = (slab.gather(x).to(dtype) for x in inputs)
    return Rows(torch.stack([k, q], 1), k * beta, g.exp_()), v, beta


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    bounds: list[int],
    scale: float,
    initial_state: Tensor,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """See `openk3.ops.kda.kda`. Computes in the dtype of `initial_state`."""
    if one_token_each(bounds):
        return step(q, k, v, g, beta, initial_state, scale)
    elements = SLAB_ELEMENTS.get(q.device.type, SLAB_ELEMENTS_ELSEWHERE)
    slab_rows = elements // max(q.shape[2], v.shape[2])
    layout = ChunkLayout.build(bounds, chunk_size or CHUNK_SIZE, q.shape[1], slab_rows, q.device)
    tensors = (q, k, v, g, beta, initial_state)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    result: tuple[Tensor, Tensor] = _Kda.apply(*tensors, layout, scale, keep)  # type: ignore[no-untyped-call]
    return result
