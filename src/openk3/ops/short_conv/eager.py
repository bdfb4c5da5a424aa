"""The short convolution on plain PyTorch, keeping its inputs and nothing else for the backward.

Only the first W - 1 tokens of a sequence, its head, look past its start. So the packed array goes through one
convolution as if it were a single sequence, and the heads, which that gets wrong, are done again from their
state. The backward takes the same two parts: gradients to heads leave the array before it is convolved back.

A convolution wants channels before tokens. Seen as an image of height 1 whose channels lie innermost in
memory, packed tokens need no copy, and the library's depthwise code for that format runs at memory speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from openk3.ops.packed import one_token_each
from openk3.ops.precision import cast, own_dtypes

Tensor = torch.Tensor

TOKENS_PER_BLOCK = 512  # of the weight gradient: with a few hundred channels its products stay in the cache


@dataclass(frozen=True)
class _Borders:
    """Index tables, all int64, of what meets the border of a sequence; S = W - 1 rows of state.

    A sequence's opening is its state followed by its head, `[N, 2 S, C]`, zero beyond a short sequence.
    """

    head_token: Tensor  # [M]: the token at each head position that exists
    head_sequence: Tensor  # [M]
    head_position: Tensor  # [M], in [0, S)
    long_sequence: Tensor  # [N_long]: sequences of S tokens or more, whose final state is tokens alone
    long_token: Tensor  # [N_long, S]: which
    short_sequence: Tensor  # [N_short]: the others
    short_row: Tensor  # [N_short, S]: the rows of the opening that are their final state

    @classmethod
    def build(cls, bounds: list[int], S: int, device: torch.device) -> _Borders:
        ends = torch.tensor(bounds)
        lengths, row = ends.diff(), torch.arange(S)
        sequence, position = (row < lengths[:, None]).nonzero().unbind(1)
        long, short = (lengths >= S).nonzero().flatten(), (lengths < S).nonzero().flatten()
        tables = (
            ends[sequence] + position,
            sequence,
            position,
            long,
            ends[long + 1, None] - S + row,
            short,
            lengths[short, None] + row,
        )
        return cls(*(table.to(device) for table in tables))

    def opening(self, x: Tensor, state: Tensor) -> Tensor:
        """`[N, 2 S, C]`."""
        S = state.shape[1]
        out = torch.cat([state, torch.zeros_like(state)], 1)
        out[self.head_sequence, S + self.head_position] = x[self.head_token]
        return out

    def final_state(self, x: Tensor, opening: Tensor) -> Tensor:
        """`[N, S, C]`."""
        out = opening.new_empty(len(opening), opening.shape[1] // 2, opening.shape[2])
        out[self.long_sequence] = x[self.long_token]
        out[self.short_sequence] = opening[self.short_sequence[:, None], self.short_row]
        return out


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, initial_state: Tensor, borders: _Borders, silu: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight, initial_state)
        ctx.borders, ctx.silu = borders, silu
        wide_x, taps, state = _widen(x, weight, initial_state)
        opening = borders.opening(wide_x, state)
        y = _convolve_sequences(wide_x, taps, opening, borders)
        final_state = borders.final_state(wide_x, opening)
        return (F.silu(y, inplace=True) if silu else y).to(x.dtype), final_state.to(x.dtype)

    @staticmethod
    @own_dtypes
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        borders = ctx.borders
        x, taps, state = _widen(*saved)
        W, S = taps.shape[1], state.shape[1]
        opening = borders.opening(x, state)
        d_pre, d_final = d_y.to(x.dtype), d_final.to(x.dtype)
        if ctx.silu:
            d_pre = torch.ops.aten.silu_backward(d_pre, _convolve_sequences(x, taps, opening, borders))
        elif d_pre is d_y:
            d_pre = d_y.clone()
        d_head = torch.zeros_like(state)
        d_head[borders.head_sequence, borders.head_position] = d_pre[borders.head_token]
        d_pre[borders.head_token] = 0

        d_x = _convolve(d_pre, taps.flip(1))[S:]
        d_taps = _correlate(d_pre[S:], x, W)
        d_opening = torch.zeros_like(opening)
        for j in range(W):
            d_opening[:, j : j + S] += d_head * taps[:, j]
            d_taps[:, j] += (d_head * opening[:, j : j + S]).sum((0, 1))
        # Final states of long sequences are tokens, those of short ones rows of the opening.
        d_x[borders.long_token] += d_final[borders.long_sequence]
        d_opening[borders.short_sequence[:, None], borders.short_row] += d_final[borders.short_sequence]
        d_x[borders.head_token] += d_opening[borders.head_sequence, S + borders.head_position]
        gradients = (d_x, d_taps, d_opening[:, :S])
        return *(d.to(of.dtype) for d, of in zip(gradients, saved, strict=True)), None, None


def _widen(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    dtype = torch.promote_types(dtype, state.dtype)
    return cast(x, dtype).contiguous(), cast(weight, dtype), cast(state, dtype)


def _convolve(x: Tensor, taps: Tensor) -> Tensor:
    """x `[T, C]` as one sequence between zeros: `[T + W - 1, C]`, row t made of x[t - (W - 1)] to x[t]."""
    (T, C), W = x.shape, taps.shape[1]
    if T == 0 or C == 0:  # the library's convolution takes neither
        return x.new_zeros(T + W - 1, C)
    image = x.view(1, 1, T, C).permute(0, 3, 1, 2)
    out = F.conv2d(image, taps.reshape(C, 1, 1, W), padding=(0, W - 1), groups=C)
    return out[0, :, 0].t().contiguous()


def _convolve_sequences(x: Tensor, taps: Tensor, opening: Tensor, borders: _Borders) -> Tensor:
    """The convolution before its activation, `[T, C]`."""
    S = opening.shape[1] // 2
    y = _convolve(x, taps)[: len(x)]
    heads = torch.zeros_like(opening[:, :S])
    for j in range(S + 1):
        heads += taps[:, j] * opening[:, j : j + S]
    y[borders.head_token] = heads[borders.head_sequence, borders.head_position]
    return y


def _correlate(d_y: Tensor, x: Tensor, W: int) -> Tensor:
    """Gradient to the taps, `[C, W]`: column j is the sum over t of d_y[t] * x[t + j]."""
    d_taps = x.new_zeros(W, x.shape[1])
    for start in range(0, len(d_y), TOKENS_PER_BLOCK):
        block = d_y[start : start + TOKENS_PER_BLOCK]
        for j in range(W):
            d_taps[j] += (block * x[start + j : start + j + len(block)]).sum(0)
    return d_taps.t()


def step(x: Tensor, weight: Tensor, state: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    """One token of each sequence: its window `[N, W, C]` is its state and itself. Returns as `short_conv`."""
    wide_x, taps, wide_state = _widen(x, weight, state)
    window = torch.cat([wide_state, wide_x.unsqueeze(1)], 1)
    y = (window * taps.t()).sum(1)
    return cast(F.silu(y) if silu else y, x.dtype), cast(window[:, 1:], x.dtype).contiguous()


def short_conv(
    x: Tensor, weight: Tensor, bounds: list[int], initial_state: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """See `openk3.ops.short_conv.short_conv`."""
    if one_token_each(bounds):
        return step(x, weight, initial_state, silu)
    borders = _Borders.build(bounds, weight.shape[1] - 1, x.device)
    result: tuple[Tensor, Tensor] = _ShortConv.apply(x, weight, initial_state, borders, silu)  # type: ignore[no-untyped-call]
    return result
