"""What a slice of tokens does to any state, and to any gradient of a state (report §5.1.2).

Both are affine, with one transition M `[K, K]` for both ways:

    S_out = S_in M + L            dS_in = dS_out M^T + L'

so that slices of a sequence on several devices are made at once and joined after. Raw projections come in, as
in `gated_kda`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from openk3.ops.dispatch import Implementation, Kernel, choose
from openk3.ops.kda.gated import MOST_SEQUENCES, check_bound, check_raw, kernels_take
from openk3.ops.kda.recurrence import kda
from openk3.ops.kda_gate import kda_gate
from openk3.ops.norm import l2_norm
from openk3.ops.packed import check_offsets
from openk3.ops.precision import own_dtypes, wide

Tensor = torch.Tensor

KERNEL = Kernel(
    "kda_fragments, kda_reverse_fragments",
    takes="as gated_kda; reverse fragments: bf16",
    checked_on="H200 (sm_90)",
    compiles_for=("sm_80", "sm_86", "sm_89", "sm_100", "sm_120"),
)


class Fragments(NamedTuple):
    """Of each sequence, in at least fp32."""

    transition: Tensor  # M [N, H, K, K]
    added: Tensor  # L [N, H, V, K]: the last state from zero


@own_dtypes
@torch.no_grad()
def kda_fragments(
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    *,
    lower_bound: float | None = -5.0,
    implementation: Implementation | None = None,
) -> Fragments:
    """M and L of each sequence: from any S, the last state of `gated_kda` is S M + L.

    An empty sequence has the identity and zero. They carry no gradient: the way back has fragments of its
    own, `kda_reverse_fragments`.

    Args:
        k, v, z, b, A_log, dt_bias, cu_seqlens, lower_bound, implementation: as in `gated_kda`, but that
            "triton" runs only where it is asked for until a card has checked it.

    Raises:
        InvalidInput, KernelUnavailable: as `gated_kda` does.
    """
    operator = "kda_fragments"
    check_raw(operator, k, k, v, z, b, A_log, dt_bias)
    check_offsets(operator, k, cu_seqlens=cu_seqlens, checkpoint_at=None)
    check_bound(operator, lower_bound)
    N, H, K, V = len(cu_seqlens) - 1, *k.shape[1:], v.shape[2]
    fit = _kernels_fit(k, v, z, b, A_log, dt_bias, N)
    # A state of V + K rows: L from zero, and M from the identity without values.
    values = torch.cat([v, v.new_zeros(*v.shape[:2], K)], 2)
    chosen = choose(operator, k, implementation, kernels=fit, by_default=KERNEL.checked)
    if chosen == "triton":
        from openk3.ops.kda.kernels.operator import last_states

        start = _zero_and_identity(k, N, H, K, V, torch.float32)
        last = last_states(k, values, z, b, A_log, dt_bias, cu_seqlens, start, lower_bound)
    else:
        k, g, beta = _recurrent(k, z, b, A_log, dt_bias, lower_bound, chosen)
        start = _zero_and_identity(k, N, H, K, V, torch.promote_types(g.dtype, wide(v.dtype)))
        last = kda(k, k, values, g, beta, cu_seqlens, initial_state=start, implementation=chosen)[1]
    added, transition = last.split([V, K], 2)
    return Fragments(transition.contiguous(), added.contiguous())


@own_dtypes
@torch.no_grad()
def kda_reverse_fragments(
    q: Tensor,
    k: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    d_o: Tensor,
    *,
    lower_bound: float | None = -5.0,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Tensor:
    """L' `[N, H, V, K]`, at least fp32: the gradient that a state gets from its sequence's outputs alone.

    With M of `kda_fragments`, the gradient to a sequence's initial state is dS_out M^T + L', where dS_out is
    that to its last.

    Args:
        q, k, z, b, A_log, dt_bias, cu_seqlens, lower_bound, scale, implementation: as in `kda_fragments`.
            Kernels take bf16 alone on a card.
        d_o: `[T, H, V]`, the gradient to the outputs.

    Raises:
        InvalidInput, KernelUnavailable: as `gated_kda` does.
    """
    operator = "kda_reverse_fragments"
    check_raw(operator, q, k, d_o, z, b, A_log, dt_bias)
    check_offsets(operator, k, cu_seqlens=cu_seqlens, checkpoint_at=None)
    check_bound(operator, lower_bound)
    N, H, K, V = len(cu_seqlens) - 1, *k.shape[1:], d_o.shape[2]
    scale = K**-0.5 if scale is None else scale
    fit = q.dtype == k.dtype and _kernels_fit(k, d_o, z, b, A_log, dt_bias, N)
    fit = fit and (not k.is_cuda or k.dtype == torch.bfloat16)
    chosen = choose(operator, k, implementation, kernels=fit, by_default=KERNEL.checked)
    # The scale is taken out: the kernels' factors leave no room for a large or a small one.
    if chosen == "triton":
        from openk3.ops.kda.kernels.operator import gradient_to_states

        d_state: Tensor = gradient_to_states(q, k, z, b, A_log, dt_bias, cu_seqlens, d_o, lower_bound)
        return d_state.mul_(scale)
    q = l2_norm(q, implementation=chosen)
    k, g, beta = _recurrent(k, z, b, A_log, dt_bias, lower_bound, chosen)
    start = k.new_zeros(N, H, V, K, dtype=torch.promote_types(g.dtype, wide(d_o.dtype))).requires_grad_()
    with torch.enable_grad():
        o = kda(
            q, k, torch.zeros_like(d_o), g, beta, cu_seqlens,
            scale=1.0, initial_state=start, implementation=chosen,
        )[0]  # fmt: skip
    if not o.requires_grad:  # no token
        return torch.zeros_like(start, requires_grad=False)
    return torch.autograd.grad(o, start, d_o)[0].mul_(scale)


def _kernels_fit(k: Tensor, v: Tensor, z: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, N: int) -> bool:
    return 0 < N <= MOST_SEQUENCES and k.shape[1] > 0 and kernels_take(k, k, v, z, b, A_log, dt_bias, None)


def _zero_and_identity(k: Tensor, N: int, H: int, K: int, V: int, dtype: torch.dtype) -> Tensor:
    """`[N, H, V + K, K]`."""
    return torch.eye(V + K, K, dtype=dtype, device=k.device).roll(V, 0).expand(N, H, V + K, K).contiguous()


def _recurrent(
    k: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    chosen: Implementation,
) -> tuple[Tensor, Tensor, Tensor]:
    """Unit keys, log decays and write strengths."""
    g = kda_gate(z, A_log, dt_bias, lower_bound=lower_bound, implementation=chosen)
    return l2_norm(k, implementation=chosen), g, torch.sigmoid(b.to(wide(b.dtype)))
