"""The routed experts of a mixture: route, plan, expert_ffn (report §2.3 eq. 11, §2.3.3 eq. 13).

`route_and_project` is `route` with the products around it, and with the counts that balancing wants.

routing = route(logits, bias, k)
u = expert_ffn(x, routing.weights, plan(routing.ids, E), w1, w3, w2, Activation())
"""

from __future__ import annotations

import torch

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.activation import Activation
from openk3.ops.dispatch import Implementation, Kernel, choose
from openk3.ops.inputs import check_floating
from openk3.ops.moe.combine import combine
from openk3.ops.moe.entry import KERNEL as ENTRY_KERNEL
from openk3.ops.moe.entry import Counted, Entry, route_and_project
from openk3.ops.moe.few import expert_ffn_few
from openk3.ops.moe.mx import KERNEL as MX_KERNEL
from openk3.ops.moe.mx import MxExperts, mx_expert_ffn
from openk3.ops.moe.plan import KERNEL as PLAN_KERNEL
from openk3.ops.moe.plan import DispatchPlan, plan
from openk3.ops.moe.route import KERNEL as ROUTE_KERNEL
from openk3.ops.moe.route import Routing, route
from openk3.ops.precision import own_dtypes

__all__ = [
    "Activation",
    "Counted",
    "DispatchPlan",
    "Entry",
    "MxExperts",
    "Routing",
    "combine",
    "expert_ffn",
    "expert_ffn_few",
    "mx_expert_ffn",
    "plan",
    "route",
    "route_and_project",
]

KERNEL = Kernel(
    "expert_ffn",
    takes="bf16 or fp16, widths that 8 divides, compute capability 9.0 or more",
    checked_on="H200 (sm_90)",
)
KERNELS = (ENTRY_KERNEL, ROUTE_KERNEL, PLAN_KERNEL, KERNEL, MX_KERNEL)


@own_dtypes
def expert_ffn(
    x: torch.Tensor,
    weights: torch.Tensor,
    plan: DispatchPlan,
    w1: torch.Tensor,
    w3: torch.Tensor,
    w2: torch.Tensor,
    activation: Activation,
    *,
    recompute: bool = True,
    implementation: Implementation | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, u_t = sum_s p_ts w2_e act(w1_e x_t, w3_e x_t).

    Args:
        x: `[T, l]`, the dispatched input (the latent in LatentMoE).
        weights: `[T, k]` router weights p, at least fp32 in practice; differentiable, 0 allowed.
        plan: of the same `[T, k]` ids.
        w1, w3: `[E, F, l]` gate and up projections; w2: `[E, l, F]` down projection; x's dtype, contiguous.
        activation: the gated unit; computed in at least fp32.
        recompute: the backward keeps the arguments and nothing else, and multiplies gate and up out again.
            With False it keeps both, `[T k, F]` each, to save two products in eleven. Same bits either way.
            The kernels always multiply them out again.
        implementation: force "reference", "eager" or "triton"; by default the kernels on a CUDA device, for
            bf16 and fp16, where l and F are multiples of 8.

    Returns:
        `[T, l]` in x's dtype. The sum over slots runs in at least fp32, from slot 0 on: equal calls
        give equal bits.

    Raises:
        InvalidInput: a shape or dtype does not fit.
        KernelUnavailable: the forced implementation does not exist.
    """
    _check(x, weights, plan, w1, w3, w2)
    problem = _kernel_problem(x, w1)
    if implementation == "triton" and problem:
        raise KernelUnavailable(f"expert_ffn: {problem}; ask for implementation='eager'")
    match choose("expert_ffn", x, implementation, kernels=problem is None, by_default=KERNEL.checked):
        case "reference":
            from openk3.ops.moe import reference

            return reference.expert_ffn(x, weights, plan, w1, w3, w2, activation)
        case "triton":
            from openk3.ops.moe.kernels import operator

            return operator.expert_ffn(x, weights, plan, w1, w3, w2, activation)
        case _:
            from openk3.ops.moe import eager

            return eager.expert_ffn(x, weights, plan, w1, w3, w2, activation, recompute)


def _kernel_problem(x: torch.Tensor, w1: torch.Tensor) -> str | None:
    """Why the kernels do not take these inputs, or None. fp32 is for their tests in Triton's interpreter."""
    dtypes = (torch.bfloat16, torch.float16) if x.is_cuda else (torch.bfloat16, torch.float16, torch.float32)
    if x.dtype not in dtypes:
        return f"x is {x.dtype}; kernels take bfloat16 and float16"
    if w1.shape[1] % 8 or w1.shape[2] % 8:
        return f"w1 is {tuple(w1.shape)}; kernels take widths that 8 divides"
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (9, 0):
        return "kernels need the copy engine of compute capability 9.0"
    return None


def _check(
    x: torch.Tensor,
    weights: torch.Tensor,
    plan: DispatchPlan,
    w1: torch.Tensor,
    w3: torch.Tensor,
    w2: torch.Tensor,
) -> None:
    if x.dim() != 2 or w1.dim() != 3:
        raise InvalidInput(
            f"expert_ffn: x is {tuple(x.shape)}, w1 is {tuple(w1.shape)}; want [T, l] and [E, F, l]"
        )
    T, width = x.shape
    E, F, _ = w1.shape
    wanted = {
        "weights": (weights, (T, plan.rows.shape[1])),
        "plan.rows": (plan.rows, (T, plan.rows.shape[1])),
        "plan.offsets": (plan.offsets, (E + 1,)),
        "w1": (w1, (E, F, width)),
        "w3": (w3, (E, F, width)),
        "w2": (w2, (E, width, F)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape:
            raise InvalidInput(f"expert_ffn: {name} is {tuple(tensor.shape)}; x and w1 want {shape}")
    check_floating("expert_ffn", x=x, weights=weights, w1=w1, w3=w3, w2=w2)
    for name, tensor in {"w1": w1, "w3": w3, "w2": w2}.items():
        if tensor.dtype != x.dtype:
            raise InvalidInput(f"expert_ffn: {name} is {tensor.dtype}, x is {x.dtype}; they must match")
