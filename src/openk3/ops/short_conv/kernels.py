"""The short convolution on the GPU: one pass forward, one backward, each reading its inputs once.

A program walks down a block of tokens with a few hundred channels, the last W - 1 inputs in registers. Within
the block it goes from sequence to sequence: at the start of each the window is filled from its state, so that
the walk itself knows no borders. Rows are taken a few at a time, all loads before any store, because the
compiler moves no load across a store. The backward walks W - 1 tokens further than its block, making the
activation again, and hands an input on once all outputs that read it have passed; those that lie before the
sequence are its state.

Where its block begins in the packing, a program finds by binary search: log2 N loads that the cache answers,
and no table or kernel more. Offsets stay on the device, unread by the host. Nothing adds atomically: the
gradient to the weight is summed over blocks afterwards.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from openk3.ops.kernel_operator import kernel_operator

Tensor = torch.Tensor


@triton.jit
def _sequence_of(token, cu_seqlens, N):
    """The last sequence that starts at or before `token`."""
    first = token * 0
    beyond = first + N
    while beyond - first > 1:
        middle = (first + beyond) // 2
        starts_before = tl.load(cu_seqlens + middle) <= token
        first = tl.where(starts_before, middle, first)
        beyond = tl.where(starts_before, beyond, middle)
    return first


@triton.jit
def _row(x, x_stride, state, n, begin, row, c, C, W: tl.constexpr, HAS_STATE: tl.constexpr):
    """Input `row` of sequence n, from its state (zeros without one) where it lies before `begin`; fp32."""
    value = tl.load(x + row * x_stride + c, mask=c < tl.where(row >= begin, C, 0), other=0.0).to(tl.float32)
    if HAS_STATE:
        place = (n.to(tl.int64) * (W - 1) + (row - begin + W - 1)) * C
        value += tl.load(state + place + c, mask=c < tl.where(row < begin, C, 0), other=0.0).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["T", "N"])
def _forward(
    x, x_stride: tl.int64, taps, cu_seqlens, state, y, T, N, C,
    W: tl.constexpr, SILU: tl.constexpr, HAS_STATE: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    slices = tl.cdiv(C, CHANNELS)
    c = (tl.program_id(0) % slices) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < C
    y_stride = tl.cast(C, tl.int64)
    tap = ()
    for j in tl.static_range(W):
        tap += (tl.load(taps + j * C + c, mask=inside, other=0.0),)

    t = (tl.program_id(0) // slices) * TOKENS
    stop = tl.minimum(t + TOKENS, T)
    n = _sequence_of(t, cu_seqlens, N)
    while t < stop:
        begin = tl.load(cu_seqlens + n).to(tl.int32)
        last = tl.minimum(tl.load(cu_seqlens + n + 1).to(tl.int32), stop)
        window = ()
        for j in tl.static_range(W - 1):
            window += (_row(x, x_stride, state, n, begin, t - (W - 1) + j, c, C, W, HAS_STATE),)
        for row in range(t, last, ROWS):
            rows = ()
            for i in tl.static_range(ROWS):
                rows += (
                    tl.load(x + (row + i) * x_stride + c, mask=c < tl.where(row + i < last, C, 0), other=0.0),
                )
            for i in tl.static_range(ROWS):
                window += (rows[i].to(tl.float32),)
                out = tap[0] * window[0]
                for j in tl.static_range(1, W):
                    out += tap[j] * window[j]
                if SILU:
                    out = out * tl.sigmoid(out)
                place = y + (row + i) * y_stride + c
                tl.store(place, out.to(y.dtype.element_ty), mask=c < tl.where(row + i < last, C, 0))
                window = window[1:]
        t = last
        n += 1


@triton.jit(do_not_specialize=["N"])
def _tails(
    x, x_stride: tl.int64, cu_seqlens, offsets, state, out, N, C,
    W: tl.constexpr, AT_OFFSETS: tl.constexpr, HAS_STATE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Row m: the W - 1 inputs before offsets[m], or before the end of sequence m."""
    slices = tl.cdiv(C, CHANNELS)
    c = (tl.program_id(0) % slices) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < C
    m = tl.program_id(0) // slices
    if AT_OFFSETS:
        end = tl.load(offsets + m).to(tl.int32)
        n = _sequence_of(end - 1, cu_seqlens, N)
    else:
        end = tl.load(cu_seqlens + m + 1).to(tl.int32)
        n = m
    begin = tl.load(cu_seqlens + n).to(tl.int32)
    for j in tl.static_range(W - 1):
        value = _row(x, x_stride, state, n, begin, end - (W - 1) + j, c, C, W, HAS_STATE)
        place = out + (m.to(tl.int64) * (W - 1) + j) * C + c
        tl.store(place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "N"])
def _backward(
    x, x_stride: tl.int64, taps, cu_seqlens, state, d_y, d_y_stride: tl.int64, d_final,
    d_x, d_taps, d_state, T, N, C,
    W: tl.constexpr, SILU: tl.constexpr, HAS_STATE: tl.constexpr, HAS_D_FINAL: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    slices = tl.cdiv(C, CHANNELS)
    c = (tl.program_id(0) % slices) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < C
    C64 = tl.cast(C, tl.int64)
    block = tl.program_id(0) // slices
    tap = ()
    d_tap = ()
    for j in tl.static_range(W):
        tap += (tl.load(taps + j * C + c, mask=inside, other=0.0),)
        d_tap += (tl.zeros([CHANNELS], tl.float32),)

    t = block * TOKENS
    stop = tl.minimum(t + TOKENS, T)
    n = _sequence_of(t, cu_seqlens, N)
    while t < stop:
        begin = tl.load(cu_seqlens + n).to(tl.int32)
        end = tl.load(cu_seqlens + n + 1).to(tl.int32)
        last = tl.minimum(end, stop)
        window = ()
        d_window = ()
        for j in tl.static_range(W - 1):
            window += (_row(x, x_stride, state, n, begin, t - (W - 1) + j, c, C, W, HAS_STATE),)
            d_window += (tl.zeros([CHANNELS], tl.float32),)
        for row in range(t, last + W - 1, ROWS):
            rows = ()
            d_rows = ()
            for i in tl.static_range(ROWS):
                read = c < tl.where(row + i < tl.minimum(last + W - 1, end), C, 0)
                rows += (tl.load(x + (row + i) * x_stride + c, mask=read, other=0.0),)
                d_rows += (tl.load(d_y + (row + i) * d_y_stride + c, mask=read, other=0.0),)
            for i in tl.static_range(ROWS):
                window += (rows[i].to(tl.float32),)
                d_out = d_rows[i].to(tl.float32)
                if SILU:
                    out = tap[0] * window[0]
                    for j in tl.static_range(1, W):
                        out += tap[j] * window[j]
                    sigmoid = tl.sigmoid(out)
                    d_out *= sigmoid * (1.0 + out * (1.0 - sigmoid))
                # Tokens beyond the block are here for the inputs before them; their weight gradient is not.
                counted = tl.where(row + i < last, d_out, 0.0)
                summed = ()
                for j in tl.static_range(W):
                    summed += (d_tap[j] + counted * window[j],)
                d_tap = summed
                d_window += (d_out,)
                # Input `source` has now met all W outputs that read it.
                source = row + i - (W - 1)
                d_in = tap[W - 1] * d_window[0]
                for j in tl.static_range(1, W):
                    d_in += tap[W - 1 - j] * d_window[j]
                if HAS_D_FINAL:
                    kept = source - (end - (W - 1))  # its row in the final state
                    place = d_final + (n * (W - 1) + kept) * C64 + c
                    is_kept = c < tl.where((kept >= 0) & (source < end), C, 0)
                    d_in += tl.load(place, mask=is_kept, other=0.0).to(tl.float32)
                place = d_x + source * C64 + c
                owned = (source >= t) & (source < last)
                tl.store(place, d_in.to(d_x.dtype.element_ty), mask=c < tl.where(owned, C, 0))
                if HAS_STATE:
                    place = d_state + (n * (W - 1) + row + i - t) * C64 + c
                    before = (source < t) & (t == begin)
                    tl.store(place, d_in.to(d_state.dtype.element_ty), mask=c < tl.where(before, C, 0))
                window = window[1:]
                d_window = d_window[1:]
        t = last
        n += 1
    for j in tl.static_range(W):
        tl.store(d_taps + (block.to(tl.int64) * W + j) * C + c, d_tap[j], mask=inside)


# Tokens and channels of a program, rows of a group, warps.
FORWARD = {"TOKENS": 128, "CHANNELS": 128, "ROWS": 8, "num_warps": 1}
BACKWARD = {"TOKENS": 128, "CHANNELS": 128, "ROWS": 4, "num_warps": 1}
TAILS = {"CHANNELS": 512, "num_warps": 2}


def _taps(weight: Tensor) -> Tensor:
    """`[W, C]` fp32, so that the channels of a program lie side by side."""
    return weight.t().to(torch.float32, memory_format=torch.contiguous_format).contiguous()


def _with_rows(x: Tensor) -> Tensor:
    """`x` with adjacent channels; rows may stay apart."""
    return x if x.stride(1) == 1 else x.contiguous()


def _tail_rows(x: Tensor, cu_seqlens: Tensor, offsets: Tensor | None, state: Tensor | None, W: int) -> Tensor:
    """`[M, W - 1, C]` at `offsets` `[M]`, or `[N, W - 1, C]` at the ends of the sequences."""
    N, C = len(cu_seqlens) - 1, x.shape[1]
    out = x.new_empty(N if offsets is None else len(offsets), W - 1, C)
    if grid := len(out) * triton.cdiv(C, TAILS["CHANNELS"]):
        _tails[(grid,)](
            x, x.stride(0), cu_seqlens, offsets, state, out, N, C,
            W=W, AT_OFFSETS=offsets is not None, HAS_STATE=state is not None, **TAILS,
        )  # fmt: skip
    return out


@kernel_operator("openk3::short_conv")
def _short_conv(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor, initial_state: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    (T, C), W, N = x.shape, weight.shape[1], len(cu_seqlens) - 1
    x = _with_rows(x)
    state = None if initial_state is None else initial_state.contiguous()
    y = x.new_empty(T, C)
    if grid := triton.cdiv(T, FORWARD["TOKENS"]) * triton.cdiv(C, FORWARD["CHANNELS"]):
        _forward[(grid,)](
            x, x.stride(0), _taps(weight), cu_seqlens, state, y, T, N, C,
            W=W, SILU=silu, HAS_STATE=state is not None, **FORWARD,
        )  # fmt: skip
    return y, _tail_rows(x, cu_seqlens, None, state, W)


@_short_conv.register_fake
def _(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor, initial_state: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    tails = (cu_seqlens.shape[0] - 1, weight.shape[1] - 1, x.shape[1])
    return x.new_empty(x.shape), x.new_empty(tails)


@kernel_operator("openk3::short_conv_backward")
def _short_conv_backward(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    silu: bool,
    d_y: Tensor,
    d_final: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to x, weight and initial_state; the last is empty without one."""
    (T, C), W, N = x.shape, weight.shape[1], len(cu_seqlens) - 1
    x, d_y = _with_rows(x), _with_rows(d_y)
    state = None if initial_state is None else initial_state.contiguous()
    d_final = None if d_final is None else d_final.contiguous()
    # An empty sequence hands its gradient on; the kernel writes those of all others.
    if state is None:
        d_state = x.new_empty(0)
    else:
        d_state = torch.zeros_like(state) if d_final is None else d_final.to(state.dtype, copy=True)
    d_x = x.new_empty(T, C)
    blocks = triton.cdiv(T, BACKWARD["TOKENS"])
    d_taps = x.new_empty(blocks, W, C, dtype=torch.float32)
    if grid := blocks * triton.cdiv(C, BACKWARD["CHANNELS"]):
        _backward[(grid,)](
            x, x.stride(0), _taps(weight), cu_seqlens, state, d_y, d_y.stride(0), d_final,
            d_x, d_taps, d_state, T, N, C,
            W=W, SILU=silu, HAS_STATE=state is not None, HAS_D_FINAL=d_final is not None, **BACKWARD,
        )  # fmt: skip
    return d_x, d_taps.sum(0).t().to(weight.dtype).contiguous(), d_state


@_short_conv_backward.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    silu: bool,
    d_y: Tensor,
    d_final: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    d_state = x.new_empty(0) if initial_state is None else initial_state.new_empty(initial_state.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), d_state


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, cu_seqlens, initial_state, ctx.silu = inputs
    ctx.save_for_backward(x, weight, cu_seqlens, initial_state)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_y: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, cu_seqlens, initial_state = ctx.saved_tensors
    d_y = torch.zeros_like(x) if d_y is None else d_y
    arguments = (x, weight, cu_seqlens, initial_state, ctx.silu, d_y, d_final)
    d_x, d_weight, d_state = torch.ops.openk3.short_conv_backward(*arguments)
    return d_x, d_weight, None, None if initial_state is None else d_state, None


_short_conv.register_autograd(_differentiate, setup_context=_keep)


@kernel_operator("openk3::short_conv_states_at")
def _states_at(
    x: Tensor, cu_seqlens: Tensor, initial_state: Tensor | None, offsets: Tensor, width: int
) -> Tensor:
    state = None if initial_state is None else initial_state.contiguous()
    return _tail_rows(_with_rows(x), cu_seqlens, offsets, state, width)


@_states_at.register_fake
def _(x: Tensor, cu_seqlens: Tensor, initial_state: Tensor | None, offsets: Tensor, width: int) -> Tensor:
    return x.new_empty(offsets.shape[0], width - 1, x.shape[1])


def short_conv(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor, initial_state: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """See `openk3.ops.short_conv.short_conv`."""
    y, final_state = torch.ops.openk3.short_conv(x, weight, cu_seqlens.contiguous(), initial_state, silu)
    return y, final_state


def states_at(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor, initial_state: Tensor | None, offsets: Tensor
) -> Tensor:
    """The W - 1 inputs before each offset `[M]`, `[M, W - 1, C]` in x's dtype; without gradient."""
    state = None if initial_state is None else initial_state.detach()
    states: Tensor = torch.ops.openk3.short_conv_states_at(
        x.detach(), cu_seqlens.contiguous(), state, offsets.contiguous(), weight.shape[1]
    )
    return states
