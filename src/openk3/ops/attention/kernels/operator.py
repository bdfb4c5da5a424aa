"""Attention of MLA as operators of torch: shapes, launches and autograd around the kernels of this folder."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from openk3.ops.attention.kernels.backward import gate_backward, key_backward, query_backward
from openk3.ops.attention.kernels.blocks import order_blocks
from openk3.ops.attention.kernels.forward import attention_forward
from openk3.ops.kernel_operator import kernel_operator

Tensor = torch.Tensor

# Passes that Hopper's own kernels take where they fit.
HOPPER = {"forward", "keys", "queries"}
FORWARD_HOPPER = {"ROWS": 128, "KEYS": 128, "STAGES": 2, "num_warps": 8}
QUERIES_HOPPER = {"ROWS": 128, "KEYS": 64, "STAGES": 3, "num_warps": 8}
KEYS_HOPPER = {"ROWS": 32, "KEYS": 128, "STAGES": 4, "num_warps": 8}

# Queries (ROWS) and keys of a tile: for half precisions on cards whose programs may have much shared memory,
# on others, and for fp32, whose products are sums of three.
_SMALL, _FP32 = ({"ROWS": rows, "KEYS": 32, "num_warps": 4} for rows in (64, 32))
FORWARD = {
    "large": {"ROWS": 128, "KEYS": 64, "num_warps": 8, "num_stages": 3},
    "small": _SMALL | {"num_stages": 2},
    "fp32": _FP32 | {"num_stages": 1},
}
QUERIES = {
    "large": {"ROWS": 128, "KEYS": 64, "num_warps": 8, "num_stages": 3},
    "small": _SMALL | {"num_stages": 2},
    "fp32": _FP32 | {"num_stages": 1},
}
KEYS = {
    "large": {"ROWS": 32, "KEYS": 128, "num_warps": 8, "num_stages": 2},
    "small": {"ROWS": 32, "KEYS": 64, "num_warps": 4, "num_stages": 2},
    "fp32": _FP32 | {"num_stages": 1},
}
GATE_ROWS = 32
MUCH = 210 << 10  # bytes of shared memory that a program of a large tile takes, at most,
MOST_CHANNELS = 320  # if K + SHARED + V are no more than these


def _tile(tiles: dict[str, dict[str, int]], x: Tensor, sizes: dict[str, int]) -> dict[str, int]:
    if x.element_size() == 4:
        return tiles["fp32"]
    if sum(sizes.values()) > MOST_CHANNELS:
        return tiles["small"]
    if x.device.type == "cuda":
        card = torch.cuda.get_device_properties(x.device)
        if getattr(card, "shared_memory_per_block_optin", 0) < MUCH:
            return tiles["small"]
    return tiles["large"]


def _precision(x: Tensor) -> str:
    return "tf32x3" if x.dtype == torch.float32 else "tf32"  # half precisions have one way alone


def _adjacent(x: Tensor) -> Tensor:
    """`x` with adjacent elements on its last axis; the others may stay apart."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _aligned(x: Tensor) -> Tensor:
    """`x` as the card can read boxes of it: adjacent channels, address and strides of whole 16 bytes."""
    x = _adjacent(x)
    places = x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1])
    return x.clone(memory_format=torch.contiguous_format) if any(at % 16 for at in places) else x


def _boxes(x: Tensor, first: int, channels: int, tokens: int) -> TensorDescriptor:
    """`channels` of an aligned `x` `[T, H, D]` or `[T, D]` from `first` on, by `tokens` of one head."""
    part = x.narrow(-1, first, channels)
    box = [tokens, *[1] * (x.dim() - 2), channels]
    return TensorDescriptor(part, [*part.shape], [*part.stride()], box)


def _on_hopper(part: str, q: Tensor, sizes: dict[str, int]) -> bool:
    fits = q.dtype == torch.bfloat16 and tuple(sizes.values()) == (128, 64, 128)
    return part in HOPPER and fits and q.is_cuda and torch.cuda.get_device_capability(q.device) == (9, 0)


def _sizes(q: Tensor, kv: Tensor, shared: Tensor) -> dict[str, int]:
    K = q.shape[2] - shared.shape[1]
    return {"K": K, "SHARED": shared.shape[1], "V": kv.shape[2] - K}


@kernel_operator("openk3::gated_mla")
def _gated_mla(
    q: Tensor,
    kv: Tensor,
    shared: Tensor,
    gate: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    return_max_logit: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y `[Tq, H, V]` and the largest logit `[H]`, empty unless asked for; o `[Tq, H, V]` and lse `[H, Tq]`
    fp32 for the backward, empty unless kept."""
    q, kv, shared = _aligned(q), _aligned(kv), _aligned(shared)
    gate = None if gate is None else _adjacent(gate)
    (Tq, H, _), sizes = q.shape, _sizes(q, kv, shared)
    K, S, V = sizes.values()
    hopper = _on_hopper("forward", q, sizes)
    tile = FORWARD_HOPPER if hopper else _tile(FORWARD, q, sizes)
    y = q.new_empty(Tq, H, V)
    o = q.new_empty(y.shape if keep else 0, dtype=torch.float32)
    lse = q.new_empty((H, Tq) if keep else 0, dtype=torch.float32)
    table = order_blocks(cu_seqlens_q, Tq, tile["ROWS"])
    largest = q.new_empty(len(table), H, dtype=torch.float32)
    outputs, factors = (y, o, lse, largest), (scale * math.log2(math.e), scale)
    gate_strides = (0, 0) if gate is None else gate.stride()[:2]
    flags = {"GATED": gate is not None, "KEEP": keep}
    if not (Tq and H and len(kv)):
        for x in (y, o):
            x.zero_()
        lse.fill_(math.inf)
        largest.fill_(-math.inf)
    elif hopper:
        from openk3.ops.attention.kernels.backward_hopper import boxes
        from openk3.ops.attention.kernels.forward_hopper import attention_forward_hopper

        operands = (q, K, "ROWS"), (q, S, "ROWS"), (kv, K, "KEYS"), (shared, S, "KEYS")
        attention_forward_hopper[(len(table), H)](
            *(boxes(x, tile[tokens], columns) for x, columns, tokens in operands), gate,
            cu_seqlens_q, cu_seqlens_k, table, *outputs, *factors, q.stride(1), kv.stride(1),
            *gate_strides, Tq, H, **flags, **tile,
        )  # fmt: skip
    else:
        parts = (kv, 0, K), (kv, K, V), (shared, 0, S)
        attention_forward[(len(table), H)](
            q, *(_boxes(*part, tile["KEYS"]) for part in parts), kv.narrow(2, K, V), gate,
            cu_seqlens_q, cu_seqlens_k, table, *outputs, *factors,
            q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), *gate_strides, Tq, H,
            PRECISION=_precision(q), **flags, **sizes, **tile,
        )  # fmt: skip
    if not return_max_logit:
        return y, q.new_empty(0, dtype=torch.float32), o, lse
    return y, largest.amax(0) if len(table) else largest.new_full((H,), -math.inf), o, lse


@_gated_mla.register_fake
def _(
    q: Tensor,
    kv: Tensor,
    shared: Tensor,
    gate: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    return_max_logit: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    Tq, H, V = q.shape[0], q.shape[1], kv.shape[2] - q.shape[2] + shared.shape[1]

    def fp32(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=torch.float32)

    kept = (fp32(Tq, H, V), fp32(H, Tq)) if keep else (fp32(0), fp32(0))
    return q.new_empty(Tq, H, V), fp32(H) if return_max_logit else fp32(0), *kept


@kernel_operator("openk3::gated_mla_backward")
def _gated_mla_backward(
    q: Tensor,
    kv: Tensor,
    shared: Tensor,
    gate: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    d_y: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients to q, kv, shared and gate; the last is empty without one."""
    q, kv, shared, d_y = _aligned(q), _aligned(kv), _aligned(shared), _adjacent(d_y)
    gate = None if gate is None else _adjacent(gate)
    (Tq, H, _), Tk, sizes = q.shape, len(kv), _sizes(q, kv, shared)
    K, S, V = sizes.values()
    d_q, d_kv = q.new_empty(q.shape), kv.new_empty(kv.shape)
    d_gate = q.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    d_shared = shared.new_empty(Tk, H, S, dtype=torch.float32)
    if not (Tq and Tk and H):
        for x in (d_q, d_kv, d_gate, d_shared):
            x.zero_()
        return d_q, d_kv, d_shared.sum(1).to(shared.dtype), d_gate
    d_o, delta = q.new_empty(o.shape), torch.empty_like(lse)
    gate_backward[(triton.cdiv(Tq, GATE_ROWS), H)](
        d_y, o, gate, d_o, d_gate, delta, *d_y.stride()[:2],
        *((0, 0) if gate is None else gate.stride()[:2]), Tq, H,
        V=V, GATED=gate is not None, ROWS=GATE_ROWS, num_warps=4,
    )  # fmt: skip
    rows, offsets = (lse, delta), (cu_seqlens_q, cu_seqlens_k)
    factors = scale * math.log2(math.e), scale
    fixed = sizes | {"PRECISION": _precision(q)}

    hopper = _on_hopper("keys", q, sizes)
    tile = KEYS_HOPPER if hopper else _tile(KEYS, q, sizes)
    table = order_blocks(cu_seqlens_k, Tk, tile["KEYS"])
    if hopper:
        from openk3.ops.attention.kernels.backward_hopper import boxes, key_backward_hopper

        operands = (q, K, "ROWS"), (q, S, "ROWS"), (kv, K, "KEYS"), (shared, S, "KEYS"), (d_o, V, "ROWS")
        key_backward_hopper[(len(table), H)](
            *(boxes(x, tile[tokens], columns) for x, columns, tokens in operands),
            *rows, *offsets, table, d_kv, d_shared, *factors, q.stride(1), kv.stride(1), Tq, H, **tile,
        )  # fmt: skip
    else:
        parts = (q, 0, K), (q, K, S), (d_o, 0, V)
        q_boxes, q_shared, d_o_boxes = (_boxes(*part, tile["ROWS"]) for part in parts)
        key_backward[(len(table), H)](
            q_boxes, q_shared, kv, shared, d_o_boxes, *rows, *offsets, table, d_kv, d_shared,
            *factors, kv.stride(0), kv.stride(1), shared.stride(0), Tq, H, **fixed, **tile,
        )  # fmt: skip
    hopper = _on_hopper("queries", q, sizes)
    tile = QUERIES_HOPPER if hopper else _tile(QUERIES, q, sizes)
    table = order_blocks(cu_seqlens_q, Tq, tile["ROWS"])
    if hopper:
        from openk3.ops.attention.kernels.backward_hopper import boxes, query_backward_hopper

        operands = (q, K, "ROWS"), (q, S, "ROWS"), (d_o, V, "ROWS"), (kv, K, "KEYS"), (shared, S, "KEYS")
        query_backward_hopper[(len(table), H)](
            *(boxes(x, tile[tokens], columns) for x, columns, tokens in operands),
            *rows, *offsets, table, d_q, *factors, q.stride(1), kv.stride(1), Tq, H, **tile,
        )  # fmt: skip
    else:
        parts = (kv, 0, K), (kv, K, V), (shared, 0, S)
        query_backward[(len(table), H)](
            q, *(_boxes(*part, tile["KEYS"]) for part in parts), d_o, *rows, *offsets, table, d_q,
            *factors, q.stride(0), q.stride(1), Tq, H, **fixed, **tile,
        )  # fmt: skip
    return d_q, d_kv, d_shared.sum(1).to(shared.dtype), d_gate


@_gated_mla_backward.register_fake
def _(
    q: Tensor,
    kv: Tensor,
    shared: Tensor,
    gate: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    d_y: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_gate = q.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    return q.new_empty(q.shape), kv.new_empty(kv.shape), shared.new_empty(shared.shape), d_gate


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scale, _, _ = inputs
    _, largest, o, lse = output
    ctx.save_for_backward(*tensors, o, lse)
    ctx.mark_non_differentiable(largest, o, lse)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_y: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 9
    if d_y is None:
        return nothing
    q, kv, shared, gate, *offsets, o, lse = ctx.saved_tensors
    gradients = torch.ops.openk3.gated_mla_backward(q, kv, shared, gate, *offsets, o, lse, ctx.scale, d_y)
    return *gradients[:3], None if gate is None else gradients[3], *nothing[4:]


_gated_mla.register_autograd(_differentiate, setup_context=_keep)


def gated_mla(
    q: Tensor,
    kv: Tensor,
    shared: Tensor,
    gate: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    return_max_logit: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `openk3.ops.attention.gated_mla`."""
    differentiated = (x for x in (q, kv, shared, gate) if x is not None)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in differentiated)
    y, largest, _, _ = torch.ops.openk3.gated_mla(
        q,
        kv,
        shared,
        gate,
        cu_seqlens_q.contiguous(),
        cu_seqlens_k.contiguous(),
        scale,
        return_max_logit,
        keep,
    )
    return y, largest if return_max_logit else None
