"""A mixture's entry as operators that torch.compile and checkpointing see, with their backward.

    forward    x [W_r; W_d]^T -> logits -> choice, weights, counts
    backward   gradients of the weights -> k values of d logits a token -> dX, and dW of both

Kept for the backward: what came in, and of the logits the chosen experts' scores.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Any, NamedTuple

import torch

from openk3.ops.kernel_operator import kernel_operator
from openk3.ops.moe.kernels import choice, entry_gradients
from openk3.ops.moe.kernels import entry_products as products

Tensor = torch.Tensor


class Made(NamedTuple):
    """latent `[T, l]`; the rest as in `choice.Decision`. `span`: assignments of a block of `counts`."""

    latent: Tensor
    weights: Tensor
    ids: Tensor
    cutoff: Tensor
    counts: Tensor
    table: Tensor
    span: int


def _aligned(*tensors: Tensor) -> list[Tensor]:
    """Contiguous from a 16-byte word on, as the copy engine wants them."""
    whole = (x.contiguous() for x in tensors)
    return [x.clone() if x.data_ptr() % 16 else x for x in whole]


@kernel_operator("openk3::route_and_project")
def _route_and_project(
    x: Tensor, router: Tensor, down: Tensor, bias: Tensor, mask: Tensor | None,
    k: int, scale: float, renormalize: bool, counted: bool, bins: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """latent, weights, ids, scores, cutoff, counts, table."""
    logits, latent = products.forward(*_aligned(x, router, down))
    made = choice.decide(logits, bias.contiguous(), mask, k, scale, renormalize, counted, bins)
    return latent, made.weights, made.ids, made.scores, made.cutoff, made.counts, made.table


@_route_and_project.register_fake
def _(
    x: Tensor, router: Tensor, down: Tensor, bias: Tensor, mask: Tensor | None,
    k: int, scale: float, renormalize: bool, counted: bool, bins: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    T, E = x.shape[0], router.shape[0]
    blocks = -(-T // choice.tokens_of_block(E, k))
    new = lambda *shape, dtype=torch.float32: x.new_empty(shape, dtype=dtype)  # noqa: E731
    return (
        x.new_empty(T, down.shape[0]),
        new(T, k),
        new(T, k, dtype=torch.int64),
        new(T, k),
        new(T),
        new(E, blocks, dtype=torch.int32),
        new(E if counted else 0, bins + 1, dtype=torch.int32),
    )


@kernel_operator("openk3::weigh_and_project")
def _weigh_and_project(
    x: Tensor, router: Tensor, down: Tensor, ids: Tensor, scale: float, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """latent, weights and scores of experts that were chosen before."""
    logits, latent = products.forward(*_aligned(x, router, down))
    weights, scores = choice.weigh(logits, ids.contiguous(), scale, renormalize)
    return latent, weights, scores


@_weigh_and_project.register_fake
def _(
    x: Tensor, router: Tensor, down: Tensor, ids: Tensor, scale: float, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    weights = x.new_empty(ids.shape, dtype=torch.float32)
    return x.new_empty(x.shape[0], down.shape[0]), weights, torch.empty_like(weights)


@kernel_operator("openk3::route_and_project_backward")
def _backward(
    x: Tensor, router: Tensor, down: Tensor, ids: Tensor, scores: Tensor, d_latent: Tensor, d_weights: Tensor,
    scale: float, renormalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients to x, router and down."""
    x, router, down, d_latent = _aligned(x, router, down, d_latent)
    values = choice.logit_gradients(d_weights.contiguous(), scores, scale, renormalize)
    ids = ids.contiguous()
    return entry_gradients.gradients(ids, values, d_latent, x, router, down)


@_backward.register_fake
def _(
    x: Tensor, router: Tensor, down: Tensor, ids: Tensor, scores: Tensor, d_latent: Tensor, d_weights: Tensor,
    scale: float, renormalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape), router.new_empty(router.shape), down.new_empty(down.shape)


def _differentiate(
    ctx: Any, d_latent: Tensor | None, d_weights: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if d_latent is None and d_weights is None:
        return None, None, None
    x, router, down, ids, scores = ctx.saved_tensors
    d_latent = x.new_zeros(len(x), len(down)) if d_latent is None else d_latent
    d_weights = torch.zeros_like(scores) if d_weights is None else d_weights
    made: tuple[Tensor, Tensor, Tensor] = torch.ops.openk3.route_and_project_backward(
        x, router, down, ids, scores, d_latent, d_weights, *ctx.scaling
    )
    return made


def _keep_routed(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, router, down, _, _, _, *scaling, _, _ = inputs
    _, _, ids, scores, cutoff, counts, table = output
    ctx.mark_non_differentiable(ids, scores, cutoff, counts, table)
    ctx.set_materialize_grads(False)  # or zeros would be made for those as well
    ctx.save_for_backward(x, router, down, ids, scores)
    ctx.scaling = scaling


def _differentiate_routed(
    ctx: Any, d_latent: Tensor | None, d_weights: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    return *_differentiate(ctx, d_latent, d_weights), *7 * (None,)


_route_and_project.register_autograd(_differentiate_routed, setup_context=_keep_routed)


def _keep_weighed(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, router, down, ids, *scaling = inputs
    _, _, scores = output
    ctx.mark_non_differentiable(scores)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, router, down, ids, scores)
    ctx.scaling = scaling


def _differentiate_weighed(
    ctx: Any, d_latent: Tensor | None, d_weights: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    return *_differentiate(ctx, d_latent, d_weights), None, None, None


_weigh_and_project.register_autograd(_differentiate_weighed, setup_context=_keep_weighed)


def _no_rows(router: Tensor, down: Tensor | None) -> Tensor:
    return router.new_empty(0, router.shape[1]) if down is None else down


def route_and_project(
    x: Tensor, router: Tensor, down: Tensor | None, bias: Tensor, mask: Tensor | None,
    k: int, scale: float, renormalize: bool, counted: bool, bins: int,
) -> Made:  # fmt: skip
    """See `openk3.ops.moe.entry.route_and_project`. The table's last column is the load."""
    latent, weights, ids, _, cutoff, counts, table = torch.ops.openk3.route_and_project(
        x, router, _no_rows(router, down), bias.detach(), mask, k, scale, renormalize, counted, bins
    )
    return Made(latent, weights, ids, cutoff, counts, table, k * choice.tokens_of_block(len(router), k))


def weigh_and_project(
    x: Tensor, router: Tensor, down: Tensor | None, ids: Tensor, scale: float, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """latent, and the weights of `ids`, which were chosen before: the bits of `route_and_project`."""
    latent, weights, _ = torch.ops.openk3.weigh_and_project(
        x, router, _no_rows(router, down), ids, scale, renormalize
    )
    return latent, weights
