"""KDA from raw projections: norms, gate, write strength and recurrence in one (report §2.1.1 eq. 1-5).

What `kda` takes ready-made is made here, so that kernels can read the projections once. Short
convolution, output norm and output gate are the layer's.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import overload

import torch

from openk3.errors import InvalidInput
from openk3.ops.dispatch import Implementation, choose
from openk3.ops.inputs import check_floating
from openk3.ops.kda.recurrence import check_head_sizes, check_state, kda
from openk3.ops.kda_gate import kda_gate
from openk3.ops.norm import l2_norm
from openk3.ops.packed import check_offsets, sequence_bounds
from openk3.ops.precision import own_dtypes, wide

__all__ = ["CHECKPOINT_GRID", "gated_kda"]

# Tokens from a sequence's start between positions whose state can be asked for: the chunk of the kernels.
CHECKPOINT_GRID = 64

# Kernels take pairs of tokens with factors of up to 2^116, so that a large scale would leave fp32.
LARGEST_SCALE = 256.0

# Programs that a card starts along the axis of a grid that counts sequences.
MOST_SEQUENCES = 65535

Tensor = torch.Tensor


@overload
def gated_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    *,
    lower_bound: float | None = ...,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    checkpoint_at: None = ...,
    split_sequences: bool = ...,
    implementation: Implementation | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def gated_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    *,
    lower_bound: float | None = ...,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    checkpoint_at: Tensor,
    split_sequences: bool = ...,
    implementation: Implementation | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
@own_dtypes
def gated_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    *,
    lower_bound: float | None = -5.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    checkpoint_at: Tensor | None = None,
    split_sequences: bool = True,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """`kda` of l2_norm(q), l2_norm(k), v, kda_gate(z, A_log, dt_bias) and sigmoid(b).

    Args:
        q, k: `[T, H, K]`, not normalised.
        v: `[T, H, V]`.
        z: `[T, H, K]` decay logits.
        b: `[T, H]` logits of the write strength.
        A_log: `[H]`, dt_bias `[H, K]`: of the gate, at least fp32.
        cu_seqlens: int32 `[N + 1]` from 0 to T, non-decreasing; sequences may be empty. Kernels do not check
            it: reading it on the host would stall the device. They take up to 65,535 sequences.
        lower_bound: of the log decay, in [-5, 0); None for the unbounded gate.
        scale: factor of the outputs; K**-0.5 by default. Kernels take magnitudes of up to 256.
        initial_state: `[N, H, V, K]`, at least fp32; zeros by default. Empty sequences hand it on.
        checkpoint_at: int32 `[M]`, strictly ascending packed end offsets, each a positive multiple of
            CHECKPOINT_GRID tokens from its sequence's start, or its end: also return the states there. An
            offset that is none, or comes twice, gives NaN where the kernels run, since nobody looks on the
            host; elsewhere one that is none is an error.
        split_sequences: kernels may cut long sequences where few heads would leave the card idle. That sums
            in another order; False keeps results the same to the bit whatever else is in the batch.
        implementation: force "reference", "eager" or "triton"; by default the fastest for the device.

    Returns:
        o `[T, H, V]` in v's dtype, each sequence's last state `[N, H, V, K]` in the compute dtype, and with
        `checkpoint_at` the states `[M, H, V, K]`, which carry no gradient. o and the last state are
        differentiable, once. From "triton" without `split_sequences`, a checkpoint is bitwise the last state
        of a call that ends there, and a call that starts from it goes on bitwise as the unbroken one did.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit, or the bound is outside [-5, 0); without kernels
            also offsets that are not those of a packing.
        KernelUnavailable: the forced implementation cannot run here.
    """
    check_raw("gated_kda", q, k, v, z, b, A_log, dt_bias)
    check_offsets("gated_kda", q, cu_seqlens=cu_seqlens, checkpoint_at=checkpoint_at)
    check_bound("gated_kda", lower_bound)
    N, H, K, V = len(cu_seqlens) - 1, *k.shape[1:], v.shape[2]
    if initial_state is not None:
        check_state("gated_kda: initial_state", initial_state, (N, H, V, K), q.device)
    scale = K**-0.5 if scale is None else scale
    kernels_fit = 0 < N <= MOST_SEQUENCES and H > 0 and abs(scale) <= LARGEST_SCALE
    kernels_fit = kernels_fit and kernels_take(q, k, v, z, b, A_log, dt_bias, initial_state)
    if kernels_fit and q.is_cuda and torch.is_grad_enabled():
        trained = (q, k, v, z, b, A_log, dt_bias, initial_state)
        if any(x is not None and x.requires_grad for x in trained):
            # In fp32 the backward spills thousands of registers and takes minutes to compile.
            kernels_fit = q.dtype == torch.bfloat16
    chosen = choose("gated_kda", q, implementation, kernels=kernels_fit)
    if chosen == "triton":
        from openk3.ops.kda.kernels.operator import gated_kda as kernels

        return kernels(
            q, k, v, z, b, A_log, dt_bias, cu_seqlens, initial_state, checkpoint_at,
            lower_bound, scale, split_sequences,
        )  # fmt: skip
    beta = torch.sigmoid(b.to(wide(b.dtype)))
    g = kda_gate(z, A_log, dt_bias, lower_bound=lower_bound, implementation=chosen)
    q, k = (l2_norm(x, implementation=chosen) for x in (q, k))
    recurrence = partial(kda, scale=scale, implementation=chosen)
    o, S = recurrence(q, k, v, g, beta, cu_seqlens, initial_state=initial_state)
    if checkpoint_at is None:
        return o, S
    bounds = sequence_bounds("gated_kda: cu_seqlens", cu_seqlens, len(q))
    states = []
    with torch.no_grad():
        for end in checkpoint_at.tolist():
            n, start = _sequence_of(end, bounds)
            prefix = torch.tensor([0, end - start], dtype=torch.int32, device=q.device)
            before = None if initial_state is None else initial_state[n : n + 1]
            q_n, k_n, v_n, g_n, beta_n = (x[start:end] for x in (q, k, v, g, beta))
            states.append(recurrence(q_n, k_n, v_n, g_n, beta_n, prefix, initial_state=before)[1])
    return o, S, torch.cat(states) if states else S.new_empty(0, H, V, K)


def kernels_take(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
) -> bool:
    """What KERNELS of the package says in words."""
    of_one_dtype = q.dtype == k.dtype == v.dtype == z.dtype == b.dtype
    others = (A_log, dt_bias) if initial_state is None else (A_log, dt_bias, initial_state)
    fits = q.dtype in (torch.bfloat16, torch.float32) and all(x.dtype != torch.float64 for x in others)
    return of_one_dtype and fits and q.shape[2] == v.shape[2] and q.shape[2] in (64, 128)


def _sequence_of(end: int, bounds: list[int]) -> tuple[int, int]:
    """The sequence that a checkpoint at packed offset `end` belongs to, and where it starts."""
    for n, (start, stop) in enumerate(pairwise(bounds)):
        if start < end <= stop:
            if end == stop or (end - start) % CHECKPOINT_GRID == 0:
                return n, start
            raise InvalidInput(
                f"gated_kda: checkpoint_at {end} is {end - start} tokens into sequence {n}; "
                f"must be a multiple of {CHECKPOINT_GRID} or its end, {stop}"
            )
    raise InvalidInput(f"gated_kda: checkpoint_at {end} is in no sequence of {bounds[-1]} tokens")


def check_bound(operator: str, lower_bound: float | None) -> None:
    """Refuse a bound of the log decay that no kernel is made for."""
    if lower_bound is not None and not -5.0 <= lower_bound < 0.0:
        raise InvalidInput(f"{operator}: lower_bound must be in [-5, 0) or None, got {lower_bound}")


def check_raw(
    operator: str, q: Tensor, k: Tensor, v: Tensor, z: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> None:
    """Refuse raw projections whose shapes, dtypes or devices do not go together."""
    fits = k.dim() == v.dim() == 3 and q.shape == k.shape == z.shape and k.shape[:2] == v.shape[:2] == b.shape
    if not fits or A_log.shape != k.shape[1:2] or dt_bias.shape != k.shape[1:]:
        named = {"q": q, "k": k, "v": v, "z": z, "b": b, "A_log": A_log, "dt_bias": dt_bias}
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())
        raise InvalidInput(
            f"{operator}: q, k, z must be [T, H, K], v [T, H, V], b [T, H], A_log [H], dt_bias [H, K]; "
            f"got {shapes}"
        )
    check_head_sizes(operator, k, v)
    check_floating(operator, q=q, k=k, v=v, z=z, b=b, A_log=A_log, dt_bias=dt_bias)
