"""The forward pass: a program takes a block of queries of one head and walks along the keys that they see.

A logit is the sum of two products: with the head's own part of the key, and with the part that all heads
share, which is read where it lies. The softmax runs along with m, the largest logit so far, and the sum of
exponentials under it. The largest logit of the block falls out of m.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from openk3.ops.attention.kernels.blocks import place
from openk3.ops.triton_math import short_exp2, short_sigmoid


@triton.jit
def _step(
    Q, Q_shared, acc, m, total, K, K_shared, V, key, row, n_k, ahead, factor,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    S = tl.dot(Q, tl.trans(K), input_precision=PRECISION)
    S = tl.dot(Q_shared, tl.trans(K_shared), S, input_precision=PRECISION)
    if MASKED:
        seen = (key[None, :] <= row[:, None] + ahead) & (key[None, :] < n_k)
        S = tl.where(seen, S, float("-inf"))
    largest = tl.maximum(m, tl.max(S, 1))
    shift = tl.where(largest == float("-inf"), 0.0, largest) * factor if MASKED else largest * factor
    P = short_exp2(S * factor - shift[:, None])
    decay = short_exp2(m * factor - shift)
    total = total * decay + tl.sum(P, 1)
    acc = tl.dot(P.to(V.dtype), V, acc * decay[:, None], input_precision=PRECISION)
    return acc, largest, total


@triton.jit(do_not_specialize=["Tq"])
def attention_forward(
    q, k, v, shared, values, gate, cu_seqlens_q, cu_seqlens_k, table, y, o, lse, largest, factor, scale,
    q_token, q_head, kv_token, kv_head, gate_token, gate_head, Tq, H,
    K: tl.constexpr, SHARED: tl.constexpr, V: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y `[Tq, H, V]` = o * sigmoid(gate); with KEEP also o fp32, and lse `[H, Tq]` fp32 to base 2,
    +inf where no key is seen. largest `[slots, H]`: of each block, -inf where there is none.

    factor = scale * log2(e); rows of q are `[K | SHARED]`. k, v and shared are descriptors with boxes of KEYS
    tokens (of a head); such a box may reach into the next sequence, whose values, times weights of zero,
    would still carry a NaN. So values near the diagonal are read with a mask, by the pointer `values`.
    """
    slot, h = tl.program_id(0), tl.program_id(1)
    if tl.load(table + 2 * slot) < 0:
        tl.store(largest + slot * H + h, float("-inf"))
        return
    block, first_q, n_q, first_k, n_k = place(table, slot, cu_seqlens_q, cu_seqlens_k)
    ahead = n_k - n_q
    row, key = block * ROWS + tl.arange(0, ROWS), tl.arange(0, KEYS)
    c, c_shared, c_value = tl.arange(0, K), tl.arange(0, SHARED), tl.arange(0, V)
    token = first_q + row
    inside = row[:, None] < n_q
    at = q + token[:, None] * q_token + h.to(tl.int64) * q_head
    Q = tl.load(at + c[None, :], mask=inside, other=0.0)
    Q_shared = tl.load(at + K + c_shared[None, :], mask=inside, other=0.0)
    values += first_k * kv_token + h.to(tl.int64) * kv_head

    acc = tl.zeros([ROWS, V], tl.float32)
    m, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    # Keys that every query of the block sees need no mask; the block's last query sees `end` keys.
    whole = tl.maximum(tl.minimum(block * ROWS + 1 + ahead, n_k), 0) // KEYS * KEYS
    end = tl.minimum((block + 1) * ROWS, n_q) + ahead
    for start in range(0, whole, KEYS):
        t = (first_k + start).to(tl.int32)
        Kt, Ks = k.load([t, h, 0]).reshape(KEYS, K), shared.load([t, 0])
        Vt = v.load([t, h, 0]).reshape(KEYS, V)
        acc, m, total = _step(
            Q, Q_shared, acc, m, total, Kt, Ks, Vt, start + key, row, n_k, ahead, factor,
            MASKED=False, PRECISION=PRECISION,
        )  # fmt: skip
    for start in range(whole, end, KEYS):
        t = (first_k + start).to(tl.int32)
        Kt, Ks = k.load([t, h, 0]).reshape(KEYS, K), shared.load([t, 0])
        at_v = values + (start + key).to(tl.int64)[:, None] * kv_token + c_value[None, :]
        Vt = tl.load(at_v, mask=(start + key)[:, None] < n_k, other=0.0)
        acc, m, total = _step(
            Q, Q_shared, acc, m, total, Kt, Ks, Vt, start + key, row, n_k, ahead, factor,
            MASKED=True, PRECISION=PRECISION,
        )  # fmt: skip

    any_nan = tl.max(tl.where((total != total) & (row < n_q), 1, 0), 0)  # tl.max passes NaN over
    most = scale * tl.max(tl.where(row < n_q, m, float("-inf")), 0)
    tl.store(largest + slot * H + h, tl.where(any_nan == 1, float("nan"), most))
    blind = total == 0.0
    acc = acc / tl.where(blind, 1.0, total)[:, None]
    place_o = (token[:, None] * H + h) * V + c_value[None, :]
    if KEEP:
        tl.store(o + place_o, acc, mask=inside)
        log_sum = tl.where(blind, float("inf"), m * factor + tl.log2(tl.where(blind, 1.0, total)))
        tl.store(lse + h.to(tl.int64) * Tq + token, log_sum, mask=row < n_q)
    if GATED:
        at_gate = gate + token[:, None] * gate_token + h.to(tl.int64) * gate_head + c_value[None, :]
        acc *= short_sigmoid(tl.load(at_gate, mask=inside, other=0.0).to(tl.float32))
    tl.store(y + place_o, acc.to(y.dtype.element_ty), mask=inside)
