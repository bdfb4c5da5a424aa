"""SiTU-GLU on the GPU: one pass forward, one pass backward, fp32 inside.

Per element in bf16: 6 bytes forward, 10 bytes backward, and six special functions each way; on an H200 those,
not the bytes, set the time (measured; see README).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 2048  # elements a program handles: 8 warps x 32 lanes x 8 values, 16-byte loads in bf16


@triton.jit
def _tanh(x):
    # 2 sigmoid(2x) - 1 cancels near zero, where the odd series is exact to fp32.
    s = x * x
    series = x * (1.0 - s * (1 / 3 - s * (2 / 15 - s * (17 / 315 - s * (62 / 2835)))))
    return tl.where(s < 0.0625, series, 2.0 * tl.sigmoid(2.0 * x) - 1.0)


@triton.jit
def _sech2(x):
    # tanh'(x); 1 - tanh^2 would cancel where tanh saturates.
    return 4.0 * tl.sigmoid(2.0 * x) * tl.sigmoid(-2.0 * x)


@triton.jit
def _forward(gate, up, out, n, gate_cap, up_cap, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    g = tl.load(gate + i, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=inside, other=0.0).to(tl.float32)
    y = gate_cap * _tanh(g / gate_cap) * tl.sigmoid(g) * (up_cap * _tanh(u / up_cap))
    tl.store(out + i, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(gate, up, d_out, d_gate, d_up, n, gate_cap, up_cap, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    g = tl.load(gate + i, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(d_out + i, mask=inside, other=0.0).to(tl.float32)
    capped_gate, capped_up, sig = gate_cap * _tanh(g / gate_cap), up_cap * _tanh(u / up_cap), tl.sigmoid(g)
    dg = d * capped_up * sig * (_sech2(g / gate_cap) + capped_gate * tl.sigmoid(-g))
    du = d * capped_gate * sig * _sech2(u / up_cap)
    tl.store(d_gate + i, dg.to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_up + i, du.to(d_up.dtype.element_ty), mask=inside)


class _SituGlu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, gate_cap: float, up_cap: float
    ) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.caps = gate_cap, up_cap
        out = torch.empty_like(gate)
        if n := gate.numel():
            _forward[(triton.cdiv(n, BLOCK),)](gate, up, out, n, gate_cap, up_cap, BLOCK=BLOCK, num_warps=8)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        gate, up = ctx.saved_tensors
        d_out, d_gate, d_up = grads[0].contiguous(), torch.empty_like(gate), torch.empty_like(up)
        if n := gate.numel():
            grid = (triton.cdiv(n, BLOCK),)
            _backward[grid](gate, up, d_out, d_gate, d_up, n, *ctx.caps, BLOCK=BLOCK, num_warps=8)
        return d_gate, d_up, None, None


def situ_glu(gate: torch.Tensor, up: torch.Tensor, gate_cap: float, up_cap: float) -> torch.Tensor:
    """See `openk3.ops.situ.situ_glu`."""
    out: torch.Tensor = _SituGlu.apply(gate, up, gate_cap, up_cap)
    return out
