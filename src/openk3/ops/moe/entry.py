"""A mixture's entry, from the rows of the residual stream to what the experts work on: route, count, project.

    logits = W_r x         ids, weights, cutoff = route(logits, bias, k)    (report §2.3.3 eq. 13)
    latent = W_down x      load and histogram of the counted tokens         (eq. 11, Appendix D)

Both products read the same rows, and all that follows from the logits reads the same logits: kernels do it in
one pass each. Knows no layer and keeps no record.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.dispatch import Implementation, Kernel, choose
from openk3.ops.inputs import check_floating
from openk3.ops.moe.plan import BlockCounts
from openk3.ops.moe.route import WIDEST_CHOICE, Routing, route
from openk3.ops.precision import own_dtypes, wide

KERNEL = Kernel(
    "route_and_project",
    takes="bf16, a float32 bias, widths that 8 divides, 2 to 4,096 experts, compute capability 9.0 or more",
    checked_on="H200 (sm_90)",
)

Tensor = torch.Tensor


class Counted(NamedTuple):
    """What is counted of a forward in training.

    token_mask: bool `[T]`, the tokens that count; None: all.
    bins: of the histogram of required biases; None: no histogram.
    """

    token_mask: Tensor | None = None
    bins: int | None = None


class Entry(NamedTuple):
    """latent `[T, l]` in x's dtype (x itself without a down-projection).

    load: int64 `[E]`, the counted tokens of each expert. histogram: int64 `[E, bins]`. None if not asked for.
    """

    routing: Routing
    latent: Tensor
    load: Tensor | None
    histogram: Tensor | None


@own_dtypes
def route_and_project(
    x: Tensor,
    router: Tensor,
    down: Tensor | None,
    bias: Tensor,
    k: int,
    *,
    scaling_factor: float = 1.0,
    renormalize: bool = True,
    chosen: tuple[Tensor, Tensor] | None = None,
    counted: Counted | None = None,
    implementation: Implementation | None = None,
) -> Entry:
    """Route each token and project it, with gradients to x and both weights.

    Args:
        x: `[T, d]`.
        router: `[E, d]`. Logits are at least fp32: a product of two half precisions is exact in fp32, where
            it is added.
        down: `[l, d]`, or None where experts work on x itself.
        bias: `[E]` float32 or float64, see `route`.
        k, scaling_factor, renormalize, chosen: see `route`.
        counted: count load and histogram of this forward; the gradients do not see it. Not with `chosen`: a
            token is counted once.
        implementation: force "reference", "eager" or "triton".

    Raises:
        InvalidInput: a shape, dtype or device does not fit, or k is out of range.
        KernelUnavailable: the forced implementation cannot run here.
    """
    _check(x, router, down, bias)
    _check_options(x, k, chosen, counted)
    problem = _kernel_problem(x, router, down, bias, k)
    if implementation == "triton" and problem:
        raise KernelUnavailable(f"route_and_project: {problem}; ask for implementation='eager'")
    picked = choose(
        "route_and_project", x, implementation, kernels=problem is None, by_default=KERNEL.checked
    )
    if picked == "triton":
        return _by_kernels(x, router, down, bias, k, scaling_factor, renormalize, chosen, counted)
    precise = wide(x.dtype)
    logits = F.linear(x.to(precise), router.to(precise))
    routing = route(logits, bias, k, scaling_factor=scaling_factor, renormalize=renormalize, chosen=chosen)
    load, histogram = (None, None) if counted is None else _count(routing, bias, counted)
    return Entry(routing, x if down is None else F.linear(x, down), load, histogram)


def _count(routing: Routing, bias: Tensor, counted: Counted) -> tuple[Tensor, Tensor | None]:
    from openk3.ops.quantile_balance import required_bias_histogram  # whose reference takes the router

    # As bincount, which would stop a GPU to look for the largest id, and a selection for its length.
    ids, mask = routing.ids, counted.token_mask
    ones = torch.ones_like(ids) if mask is None else mask.long()[:, None].expand_as(ids)
    load = ids.new_zeros(len(bias)).scatter_add_(0, ids.flatten(), ones.flatten())
    if counted.bins is None:
        return load, None
    assert routing.scores is not None
    return load, required_bias_histogram(
        routing.scores.detach(), routing.cutoff, bias, token_mask=mask, bins=counted.bins
    )


def _by_kernels(
    x: Tensor,
    router: Tensor,
    down: Tensor | None,
    bias: Tensor,
    k: int,
    scaling_factor: float,
    renormalize: bool,
    chosen: tuple[Tensor, Tensor] | None,
    counted: Counted | None,
) -> Entry:
    from openk3.ops.moe.kernels import entry

    if chosen is not None:
        ids, cutoff = chosen
        latent, weights = entry.weigh_and_project(x, router, down, ids, scaling_factor, renormalize)
        return Entry(Routing(ids, weights, None, cutoff), x if down is None else latent, None, None)
    mask, bins = counted or Counted()
    made = entry.route_and_project(
        x, router, down, bias, mask, k, scaling_factor, renormalize, counted is not None, bins or 0
    )
    latent = x if down is None else made.latent
    routing = Routing(
        made.ids, made.weights, None, made.cutoff, BlockCounts(made.counts, made.span, made.ids)
    )
    if counted is None:
        return Entry(routing, latent, None, None)
    table = made.table.long()
    return Entry(routing, latent, table[:, -1], table[:, :-1] if bins else None)


def _kernel_problem(x: Tensor, router: Tensor, down: Tensor | None, bias: Tensor, k: int) -> str | None:
    """Why the kernels do not take these inputs, or None. fp32 is for their tests in Triton's interpreter."""
    dtypes = (torch.bfloat16,) if x.is_cuda else (torch.bfloat16, torch.float32)
    if x.dtype not in dtypes or bias.dtype != torch.float32:
        return f"x is {x.dtype} and bias {bias.dtype}; kernels take bfloat16 and float32"
    widths = (x.shape[1], *(() if down is None else (len(down),)))
    if any(width % 8 for width in widths) or not x.shape[1]:
        return f"widths are {widths}; kernels take widths that 8 divides"
    if not 2 <= len(router) <= WIDEST_CHOICE or not 1 <= k <= len(router):
        return (
            f"there are {len(router)} experts and k is {k}; kernels take 2 to {WIDEST_CHOICE} and k of them"
        )
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (9, 0):
        return "kernels need the copy engine of compute capability 9.0"
    return None


def _check(x: Tensor, router: Tensor, down: Tensor | None, bias: Tensor) -> None:
    if x.dim() != 2 or router.dim() != 2 or router.shape[1] != x.shape[1]:
        raise InvalidInput(
            f"route_and_project: x is {tuple(x.shape)}, router is {tuple(router.shape)}; "
            f"want [T, d] and [E, d]"
        )
    if down is not None and (down.dim() != 2 or down.shape[1] != x.shape[1]):
        raise InvalidInput(f"route_and_project: down is {tuple(down.shape)}; want [l, {x.shape[1]}]")
    if bias.shape != router.shape[:1]:
        raise InvalidInput(f"route_and_project: bias is {tuple(bias.shape)}; want ({len(router)},)")
    check_floating("route_and_project", x=x, router=router, down=down, bias=bias)
    for name, weight in {"router": router, "down": down}.items():
        if weight is not None and weight.dtype != x.dtype:
            raise InvalidInput(
                f"route_and_project: {name} is {weight.dtype}, x is {x.dtype}; they must match"
            )


def _check_options(x: Tensor, k: int, chosen: tuple[Tensor, Tensor] | None, counted: Counted | None) -> None:
    name = "route_and_project"
    if chosen is not None and counted is not None:
        raise InvalidInput(f"{name}: tokens that were routed before are not counted again")
    if chosen is not None:
        ids, cutoff = chosen
        fit = ids.shape == (len(x), k) and cutoff.shape == (len(x),) and ids.dtype == torch.int64
        if not fit or not ids.device == cutoff.device == x.device:
            raise InvalidInput(
                f"{name}: chosen ids are {tuple(ids.shape)} {ids.dtype} on {ids.device} and chosen cutoff is "
                f"{tuple(cutoff.shape)} on {cutoff.device}; want {(len(x), k)} int64 and {(len(x),)} "
                f"on {x.device}"
            )
    mask, bins = counted or Counted()
    if mask is not None and (
        mask.shape != x.shape[:1] or mask.dtype != torch.bool or mask.device != x.device
    ):
        raise InvalidInput(
            f"{name}: token_mask is {tuple(mask.shape)} {mask.dtype} on {mask.device}; "
            f"want ({len(x)},) torch.bool on {x.device}"
        )
    if bins is not None and bins < 1:
        raise InvalidInput(f"{name}: bins is {bins}; want at least 1")
