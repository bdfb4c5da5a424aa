"""The experts of many rows, into the stream: their sums, the norm and a unit beside them are made once.

What experts give each row is written row by row; a kernel of a warp or two a row then makes of it what goes
into the stream, so that this is a plain product. Sums are fp32's and in one order, so that equal calls give
equal bits; what a row gets depends on how many rows there are and on itself, not on which others share its
experts.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment, misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from openk3.ops.activation import Activation
from openk3.ops.decoding import ExpertLists
from openk3.ops.decoding.kernels.early import FEW, early, let_next, narrow, wait
from openk3.ops.decoding.kernels.experts import expert_sums, list_rows, listed_experts
from openk3.ops.decoding.kernels.products import launch_into, products_into
from openk3.ops.kda.hopper import on_hopper
from openk3.ops.kernel_operator import kernel_operator
from openk3.ops.moe.kernels.units import unit as gated_unit
from openk3.ops.triton_math import PTX

Tensor = torch.Tensor

JOINED = 2**31  # rows up to which sums, norm and unit are a kernel of their own
WIDEST = 4096  # of a row of sums


@triton.jit
def _joined_rows(
    rows, weights, gain, unit_gate, unit_up, out, L, b, eps, gate_cap, up_cap,
    k: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, B: tl.constexpr, NORM: tl.constexpr,
    UNIT: tl.constexpr, COARSE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """[norm(sum_s weights_s rows_s); act(gate, up)] of a row, all asked for at once."""
    let_next(EARLY)
    col = tl.arange(0, WIDTH)[None, :]
    s = tl.arange(0, K)[:, None]
    further = tl.arange(0, B)
    if NORM:
        factor = tl.load(gain + col, mask=col < L, other=0.0).to(tl.float32)
    wait(EARLY)
    t = tl.program_id(0).to(tl.int64)
    parts = tl.load(rows + (t * k + s) * L + col, mask=(s < k) & (col < L), other=0.0)
    shares = tl.load(weights + t * k + s, mask=s < k, other=0.0)
    if UNIT != "none":
        g = tl.load(unit_gate + t * b + further, mask=further < b, other=0.0).to(tl.float32)
        u = tl.load(unit_up + t * b + further, mask=further < b, other=0.0).to(tl.float32)
    total = tl.sum(parts.to(tl.float32) * shares, 0, keep_dims=True)
    if NORM:
        total *= tl.rsqrt(tl.sum(total * total, 1, keep_dims=True) / L + eps) * factor
    tl.store(out + t * (L + b) + col, total.to(out.dtype.element_ty), mask=col < L)
    if UNIT != "none":
        y = gated_unit(g, u, gate_cap, up_cap, UNIT, COARSE)
        tl.store(out + t * (L + b) + L + further, y.to(out.dtype.element_ty), mask=further < b)


def experts_into(
    out: Tensor,
    weight: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    activation: Activation,
    add: bool,
    norm: tuple[Tensor, float] | None,
    shared: tuple[Tensor, Tensor] | None,
    lists: ExpertLists | None,
) -> None:
    """See `openk3.ops.decoding.experts_into`."""
    if not FEW < len(x) <= JOINED or x.shape[1] > WIDEST or not narrow(x):
        u = expert_sums(x, ids, weights, w1, w3, w2, activation)
        unit = None if shared is None else (*shared, activation)
        products_into(out, weight, u, add, norm, None, unit)
        return
    gain, eps = norm or (None, 0.0)
    gate, up = shared or (None, None)
    torch.ops.openk3.experts_into(
        out, weight, x, ids, weights, *(lists or (None, None)), w1, w3, w2, add, gain, eps, gate, up,
        activation.kind, activation.gate_cap, activation.up_cap,
    )  # fmt: skip


def streams_fit(x: Tensor, E: int, F: int) -> bool:
    """Whether `streams` takes rows like x of E experts of width F, where x lies."""
    L = x.shape[1]
    return x.element_size() == 2 and L <= 256 and F <= 512 and not (L | F) % 8 and E <= 1024 and on_hopper(x)


@kernel_operator("openk3::experts_into", mutates_args=("out",))
def _experts_into_op(
    out: Tensor, weight: Tensor, x: Tensor, ids: Tensor, weights: Tensor, lists: Tensor | None,
    counts: Tensor | None, w1: Tensor, w3: Tensor, w2: Tensor, add: bool, gain: Tensor | None, eps: float,
    gate: Tensor | None, up: Tensor | None, kind: str, gate_cap: float, up_cap: float,
) -> None:  # fmt: skip
    (n, L), k, (E, F, _) = x.shape, ids.shape[1], w1.shape
    if not n:
        return
    b = 0 if gate is None else gate.shape[1]
    coarse, options = bool(PTX) and x.dtype == torch.bfloat16, early(x)
    if lists is None or counts is None:
        lists, counts = list_rows(ids, E)
    joined = x.new_empty(n, L + b)
    make = listed_experts
    if streams_fit(x, E, F):
        from openk3.ops.decoding.kernels.streams import stream_experts as make
    rows = make(x, lists, counts, w1, w3, w2, k, kind, gate_cap, up_cap)
    WIDTH, K, B = (triton.next_power_of_2(max(1, size)) for size in (L, k, b))
    _joined_rows[(n,)](
        rows, weights, gain, gate, up, joined, L, b, eps, gate_cap, up_cap,
        k=k, K=K, WIDTH=WIDTH, B=B, NORM=gain is not None, UNIT="none" if gate is None else kind,
        COARSE=coarse, num_warps=min(max(1, K * WIDTH // 4096), 16), **options,
    )  # fmt: skip
    launch_into(out, weight, joined, None, add)


@_experts_into_op.register_fake
def _(
    out, weight, x, ids, weights, lists, counts, w1, w3, w2, add, gain, eps, gate, up, kind, gate_cap, up_cap
):
    return None
