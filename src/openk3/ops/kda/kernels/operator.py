"""The kernels as operators that autograd, torch.compile and export see.

The backward keeps raw inputs and outputs only and prepares the chunks again: kept, they would be four times
the size of an input.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from openk3.ops.kda.hopper import hopper_fits
from openk3.ops.kda.kernels.backward import backward
from openk3.ops.kda.kernels.pieces import fragments, pieces_that_fill
from openk3.ops.kda.kernels.plan import ChunkPlan, mark_checkpoints, plan_chunks
from openk3.ops.kda.kernels.prepare import prepare
from openk3.ops.kda.kernels.scan import Pieces, scan
from openk3.ops.kda.kernels.scan_backward import scan_backward
from openk3.ops.kernel_operator import kernel_operator

# Below it, factors of down to 2^-116 would take queries under what fp32 and bf16 hold.
SMALLEST_SCALE = 2.0**-6


def _pieces(v: Tensor, plan: ChunkPlan, split: bool) -> Pieces | None:
    if not (split and v.is_cuda):
        return None
    processors = torch.cuda.get_device_properties(v.device).multi_processor_count
    return pieces_that_fill(plan, v.shape[1], v.shape[2], processors)


@kernel_operator("openk3::gated_kda")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    checkpoint_at: Tensor | None,
    lower_bound: float | None,
    scale: float,
    split: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    plan = plan_chunks(cu_seqlens, len(q))
    prepared = prepare(q, k, z, b, A_log, dt_bias, plan, lower_bound, scale)
    marks = None if checkpoint_at is None else mark_checkpoints(plan, checkpoint_at)
    scanned = scan(
        v, prepared, plan, initial_state, pieces=_pieces(v, plan, split),
        checkpoint_of_chunk=marks, checkpoints=0 if checkpoint_at is None else len(checkpoint_at),
    )  # fmt: skip
    checkpoints = scanned.final_state.new_empty(0) if scanned.checkpoints is None else scanned.checkpoints
    return scanned.o, scanned.final_state, checkpoints


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    checkpoint_at: Tensor | None,
    lower_bound: float | None,
    scale: float,
    split: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    H, V, K = v.shape[1], v.shape[2], k.shape[2]
    final_state = v.new_empty(len(cu_seqlens) - 1, H, V, K, dtype=torch.float32)
    shape = (0,) if checkpoint_at is None else (len(checkpoint_at), H, V, K)
    return v.new_empty(v.shape), final_state, final_state.new_empty(shape)


@kernel_operator("openk3::gated_kda_backward")
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    o: Tensor,
    d_o: Tensor,
    d_final_state: Tensor,
    lower_bound: float | None,
    scale: float,
    split: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    plan = plan_chunks(cu_seqlens, len(q))
    prepared = prepare(q, k, z, b, A_log, dt_bias, plan, lower_bound, scale)
    pieces = _pieces(v, plan, split)
    scanned = scan(
        v, prepared, plan, initial_state, pieces=pieces,
        store_states=True, store_errors=True, output=False,
    )  # fmt: skip
    assert scanned.states is not None and scanned.errors is not None
    grads = backward(
        q, k, v, z, b, A_log, dt_bias, o, prepared, scanned.states, scanned.errors, d_o, d_final_state,
        plan, lower_bound, scale, pieces, scanned.fragments,
    )  # fmt: skip
    d = grads.inputs
    of_gate = d.A_log.to(A_log.dtype), d.dt_bias.to(dt_bias.dtype)
    return d.q, d.k, grads.v, d.z, d.b, *of_gate, grads.initial_state


@_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    o: Tensor,
    d_o: Tensor,
    d_final_state: Tensor,
    lower_bound: float | None,
    scale: float,
    split: bool,
) -> tuple[Tensor, ...]:
    raw = (x.new_empty(x.shape) for x in (q, k, v, z, b, A_log, dt_bias))
    return *raw, d_final_state.new_empty(d_final_state.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, _, lower_bound, scale, split = inputs
    ctx.save_for_backward(*tensors, output[0])
    ctx.constants = lower_bound, scale, split
    ctx.set_materialize_grads(True)
    ctx.mark_non_differentiable(output[2])


def _gradients(ctx: Any, d_o: Tensor, d_final_state: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, o = ctx.saved_tensors
    initial_state = tensors[8]
    *grads, d_initial = _backward(*tensors, o, d_o.contiguous(), d_final_state.contiguous(), *ctx.constants)
    return *grads, None, None if initial_state is None else d_initial, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)


def gated_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    checkpoint_at: Tensor | None,
    lower_bound: float | None,
    scale: float,
    split: bool,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """See `openk3.ops.kda.gated.gated_kda`."""
    q, k, v, z = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, z))
    state = None if initial_state is None else initial_state.to(torch.float32).contiguous()
    offsets = None if checkpoint_at is None else checkpoint_at.to(torch.int32).contiguous()
    # Of a smaller scale, the power of two is the outputs': it changes no digit.
    inner, exponent = math.frexp(scale) if abs(scale) < SMALLEST_SCALE else (scale, 0)
    o, final_state, checkpoints = _forward(
        q, k, v, z, b.contiguous(), A_log.contiguous(), dt_bias.contiguous(),
        cu_seqlens.to(torch.int32).contiguous(), state, offsets, lower_bound, inner, split,
    )  # fmt: skip
    if exponent:
        o = o * 2.0**exponent
    return (o, final_state) if checkpoint_at is None else (o, final_state, checkpoints)


@kernel_operator("openk3::kda_last_states")
def last_states(
    k: Tensor,
    values: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor,
    lower_bound: float | None,
) -> Tensor:
    """The last states `[N, H, V, K]` fp32 of `gated_kda`, for any V that tiles divide, without outputs."""
    plan = plan_chunks(cu_seqlens.to(torch.int32).contiguous(), len(k))
    k, z = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, z))
    prepared = prepare(
        k, k, z, b.contiguous(), A_log.contiguous(), dt_bias.contiguous(), plan, lower_bound, 1.0
    )
    pieces = _pieces(values, plan, split=True)
    return scan(values, prepared, plan, initial_state, output=False, pieces=pieces).final_state


@last_states.register_fake
def _(
    k: Tensor,
    values: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor,
    lower_bound: float | None,
) -> Tensor:
    return initial_state.new_empty(initial_state.shape)


@kernel_operator("openk3::kda_gradient_to_states")
def gradient_to_states(
    q: Tensor,
    k: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    d_o: Tensor,
    lower_bound: float | None,
) -> Tensor:
    """The gradient to initial states `[N, H, V, K]` fp32 from outputs of scale 1 alone."""
    plan = plan_chunks(cu_seqlens.to(torch.int32).contiguous(), len(q))
    q, k, z = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, z))
    prepared = prepare(
        q, k, z, b.contiguous(), A_log.contiguous(), dt_bias.contiguous(), plan, lower_bound, 1.0
    )
    d_o = d_o.contiguous()
    pieces = _pieces(d_o, plan, split=True)
    both = None
    if pieces is not None:  # of these, transitions alone
        both = fragments(d_o, prepared, plan, pieces, hopper_fits(d_o, k.shape[2]))
    return scan_backward(d_o, prepared, plan, None, pieces=pieces, fragments=both).d_initial_state


@gradient_to_states.register_fake
def _(
    q: Tensor,
    k: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    d_o: Tensor,
    lower_bound: float | None,
) -> Tensor:
    return d_o.new_empty(len(cu_seqlens) - 1, k.shape[1], d_o.shape[2], k.shape[2], dtype=torch.float32)
