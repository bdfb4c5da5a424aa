"""Where a step begins, and how a latent gets into the cache."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment, misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from openk3.ops.decoding.kernels.early import early, let_next, wait, warps
from openk3.ops.kernel_operator import kernel_operator

Tensor = torch.Tensor


@triton.jit
def _append_latents(
    compressed, gain, latents, places, seen, length, r, width, eps,
    LATENT: tl.constexpr, SHARED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next(EARLY)
    wait(EARLY)
    n = tl.program_id(0).to(tl.int64)
    place = tl.load(places + n) * length + tl.minimum(tl.load(seen + n), length - 1)
    source, target = compressed + n * width, latents + place * width
    col = tl.arange(0, LATENT)
    v = tl.load(source + col, mask=col < r, other=0.0).to(tl.float32)
    v *= tl.rsqrt(tl.sum(v * v, 0) / r + eps)
    v *= tl.load(gain + col, mask=col < r, other=0.0).to(tl.float32)
    tl.store(target + col, v.to(latents.dtype.element_ty), mask=col < r)
    col = r + tl.arange(0, SHARED)
    tl.store(target + col, tl.load(source + col, mask=col < width, other=0.0), mask=col < width)


@triton.jit
def _start_step(
    tokens, slots, embedding, lengths, out, places, seen, filled, spare, d,
    D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next(EARLY)
    wait(EARLY)
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + n).to(tl.int64)
    place = tl.where(slot < 0, spare, slot)
    before = tl.load(lengths + place)
    tl.store(places + n, place)
    tl.store(seen + n, before)
    tl.store(filled + n, tl.where(slot < 0, 0, before + 1).to(tl.int32))
    if slot >= 0:
        tl.store(lengths + place, before + 1)
    row = embedding + tl.load(tokens + n) * d
    for start in range(0, d, D):
        col = start + tl.arange(0, D)
        tl.store(out + n * d + col, tl.load(row + col, mask=col < d, other=0.0), mask=col < d)


@kernel_operator("openk3::append_latents", mutates_args=("latents",))
def append_latents(
    compressed: Tensor, gain: Tensor, eps: float, latents: Tensor, places: Tensor, seen: Tensor
) -> None:
    """See `openk3.ops.decoding.append_latents`."""
    n, width = compressed.shape
    if n:
        r = len(gain)
        _append_latents[(n,)](
            compressed, gain, latents, places, seen, latents.shape[1], r, width, eps,
            LATENT=triton.next_power_of_2(r), SHARED=triton.next_power_of_2(max(1, width - r)),
            num_warps=warps(r), **early(latents),
        )  # fmt: skip


@append_latents.register_fake
def _(compressed, gain, eps, latents, places, seen):
    return None


@kernel_operator("openk3::start_step", mutates_args=("lengths", "out"))
def start_step(
    tokens: Tensor, slots: Tensor, embedding: Tensor, lengths: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `openk3.ops.decoding.start_step`."""
    n, d = out.shape
    places, seen, filled = torch.empty_like(tokens), torch.empty_like(tokens), torch.empty_like(slots)
    if n:
        D = min(triton.next_power_of_2(d), 2048)
        _start_step[(n,)](
            tokens, slots, embedding, lengths, out, places, seen, filled, len(lengths) - 1, d,
            D=D, num_warps=4, **early(out),
        )  # fmt: skip
    return places, seen, filled


@start_step.register_fake
def _(tokens, slots, embedding, lengths, out):
    return torch.empty_like(tokens), torch.empty_like(tokens), torch.empty_like(slots)
