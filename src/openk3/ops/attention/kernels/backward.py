"""The backward pass: gate and row sums, then one kernel along keys and one along queries.

With P = softmax(S), o = P V, y = o sigmoid(gate) and delta = sum_c d_o o, the scores' gradient is
dS = P (d_o V^T - delta). The gradient to a query is a sum over keys and that to a key a sum over queries:
each kernel makes S and P again and adds in its own order, so that nothing is added atomically and a result
never depends on which program ran first. delta is taken from o in fp32 and d_o as rounded for the products,
so that each row of dS sums to zero but for rounding of its own.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from openk3.ops.attention.kernels.blocks import place
from openk3.ops.triton_math import short_exp2, sigmoid_pair


@triton.jit(do_not_specialize=["T"])
def gate_backward(
    d_y, o, gate, d_o, d_gate, delta, d_y_token, d_y_head, gate_token, gate_head, T, H,
    V: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """d_o `[T, H, V]`, d_gate `[T, H, V]` and delta `[H, T]` fp32, of ROWS tokens of a head."""
    h = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, V)
    inside = token[:, None] < T
    packed = (token[:, None] * H + h) * V + c[None, :]
    D = tl.load(d_y + token[:, None] * d_y_token + h * d_y_head + c[None, :], mask=inside, other=0.0)
    O = tl.load(o + packed, mask=inside, other=0.0)  # noqa: E741
    if GATED:
        at = gate + token[:, None] * gate_token + h * gate_head + c[None, :]
        G, closed = sigmoid_pair(tl.load(at, mask=inside, other=0.0).to(tl.float32))
        wide = D.to(tl.float32) * G
        tl.store(d_gate + packed, (wide * closed * O).to(d_gate.dtype.element_ty), mask=inside)
        D = wide.to(d_o.dtype.element_ty)
    tl.store(d_o + packed, D, mask=inside)
    tl.store(delta + h * T + token, tl.sum(D.to(tl.float32) * O, 1), mask=token < T)


@triton.jit(do_not_specialize=["Tq"])
def query_backward(
    q, k, v, shared, d_o, lse, delta, cu_seqlens_q, cu_seqlens_k, table, d_q, factor, scale,
    q_token, q_head, Tq, H,
    K: tl.constexpr, SHARED: tl.constexpr, V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_q `[Tq, H, K + SHARED]` of a block of queries of a head, walking along their keys.

    k, v and shared come as descriptors, as in the forward.
    """
    slot, h = tl.program_id(0), tl.program_id(1)
    if tl.load(table + 2 * slot) < 0:
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
    D = tl.load(d_o + (token[:, None] * H + h) * V + c_value[None, :], mask=inside, other=0.0)
    of_head = h.to(tl.int64) * Tq + token
    own_lse = tl.load(lse + of_head, mask=row < n_q, other=float("inf"))
    own_delta = tl.load(delta + of_head, mask=row < n_q, other=0.0)

    dQ, dQ_shared = tl.zeros([ROWS, K], tl.float32), tl.zeros([ROWS, SHARED], tl.float32)
    end = tl.minimum((block + 1) * ROWS, n_q) + ahead  # keys that the last query of the block sees
    for start in range(0, end, KEYS):
        t = (first_k + start).to(tl.int32)
        Kt, Ks = k.load([t, h, 0]).reshape(KEYS, K), shared.load([t, 0])
        Vt = v.load([t, h, 0]).reshape(KEYS, V)
        S = tl.dot(Q, tl.trans(Kt), input_precision=PRECISION)
        S = tl.dot(Q_shared, tl.trans(Ks), S, input_precision=PRECISION)
        dP = tl.dot(D, tl.trans(Vt), input_precision=PRECISION)
        P = short_exp2(S * factor - own_lse[:, None])
        P = tl.where((start + key)[None, :] <= row[:, None] + ahead, P, 0.0)
        dS = (P * (dP - own_delta[:, None])).to(Kt.dtype)
        dQ = tl.dot(dS, Kt, dQ, input_precision=PRECISION)
        dQ_shared = tl.dot(dS, Ks, dQ_shared, input_precision=PRECISION)
    to = d_q + (token[:, None] * H + h) * (K + SHARED)
    tl.store(to + c[None, :], (dQ * scale).to(d_q.dtype.element_ty), mask=inside)
    tl.store(to + K + c_shared[None, :], (dQ_shared * scale).to(d_q.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["Tq"])
def key_backward(
    q, q_shared, kv, shared, d_o, lse, delta, cu_seqlens_q, cu_seqlens_k, table, d_kv, d_shared,
    factor, scale, kv_token, kv_head, shared_token, Tq, H,
    K: tl.constexpr, SHARED: tl.constexpr, V: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_kv `[Tk, H, K + V]`, and each head's part of d_shared, `[Tk, H, SHARED]` fp32, of a block of keys.

    q, q_shared and d_o come as descriptors of `[Tq, H, channels]` with boxes of ROWS tokens of a head. A box
    that reaches past its sequence holds queries of the next one, which get no weight.
    """
    slot, h = tl.program_id(0), tl.program_id(1)
    if tl.load(table + 2 * slot) < 0:
        return
    block, first_q, n_q, first_k, n_k = place(table, slot, cu_seqlens_q, cu_seqlens_k)
    block = tl.cdiv(n_k, KEYS) - 1 - block  # the first keys are seen by the most queries
    ahead = n_k - n_q
    key = block * KEYS + tl.arange(0, KEYS)
    c, c_shared, c_value = tl.arange(0, K), tl.arange(0, SHARED), tl.arange(0, V)
    token = first_k + key
    inside = key[:, None] < n_k
    at = kv + token[:, None] * kv_token + h.to(tl.int64) * kv_head
    own_k = tl.load(at + c[None, :], mask=inside, other=0.0)
    own_v = tl.load(at + K + c_value[None, :], mask=inside, other=0.0)
    own_shared = tl.load(shared + token[:, None] * shared_token + c_shared[None, :], mask=inside, other=0.0)
    of_sequence = h.to(tl.int64) * Tq + first_q
    lse += of_sequence
    delta += of_sequence

    dK, dV = tl.zeros([KEYS, K], tl.float32), tl.zeros([KEYS, V], tl.float32)
    dK_shared = tl.zeros([KEYS, SHARED], tl.float32)
    begin = tl.maximum(block * KEYS - ahead, 0) // ROWS * ROWS  # queries before it see none of these keys
    for start in range(begin, n_q, ROWS):
        row = start + tl.arange(0, ROWS)
        place_q = (first_q + start).to(tl.int32)
        Q = q.load([place_q, h, 0]).reshape(ROWS, K)
        Q_shared = q_shared.load([place_q, h, 0]).reshape(ROWS, SHARED)
        D = d_o.load([place_q, h, 0]).reshape(ROWS, V)
        row_lse = tl.load(lse + row, mask=row < n_q, other=float("inf"))
        row_delta = tl.load(delta + row, mask=row < n_q, other=0.0)
        S = tl.dot(own_k, tl.trans(Q), input_precision=PRECISION)
        S = tl.dot(own_shared, tl.trans(Q_shared), S, input_precision=PRECISION)  # [keys, queries]
        P = short_exp2(S * factor - row_lse[None, :])
        P = tl.where(key[:, None] <= row[None, :] + ahead, P, 0.0)
        dP = tl.dot(own_v, tl.trans(D), input_precision=PRECISION)
        dV = tl.dot(P.to(D.dtype), D, dV, input_precision=PRECISION)
        dS = (P * (dP - row_delta[None, :])).to(Q.dtype)
        dK = tl.dot(dS, Q, dK, input_precision=PRECISION)
        dK_shared = tl.dot(dS, Q_shared, dK_shared, input_precision=PRECISION)
    to = d_kv + (token[:, None] * H + h) * (K + V)
    tl.store(to + c[None, :], (dK * scale).to(d_kv.dtype.element_ty), mask=inside)
    tl.store(to + K + c_value[None, :], dV.to(d_kv.dtype.element_ty), mask=inside)
    to = d_shared + (token[:, None] * H + h) * SHARED
    tl.store(to + c_shared[None, :], dK_shared * scale, mask=inside)
