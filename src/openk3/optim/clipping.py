"""The global gradient norm, and scaling gradients down to a bound."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from openk3.errors import InvalidInput, TrainingDiverged
from openk3.ops.precision import wide
from openk3.ops.traces import named

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


def grad_norm(named_parameters: NamedParameters) -> float:
    """L2 norm over all gradients; may be inf or NaN. Summed in at least fp32, over tensors in float64."""
    return math.hypot(*_norms(named_parameters).values())


@named
def global_norm(named_parameters: NamedParameters) -> torch.Tensor:
    """`grad_norm` where the gradients are: float64 `[]`, unread by the host on a GPU."""
    named = list(named_parameters)
    grads = [p.grad for _, p in named if p.grad is not None]
    if not grads or not all(grad.is_cuda for grad in grads):
        return torch.tensor(grad_norm(named), dtype=torch.float64)
    norms: list[torch.Tensor] = []
    for dtype in {grad.dtype for grad in grads}:
        alike = [grad for grad in grads if grad.dtype == dtype]
        # To float64 together: one by one that is a launch for each.
        norms.append(torch.stack(torch._foreach_norm(alike, 2, dtype=wide(dtype))).double())
    total: torch.Tensor = torch.linalg.vector_norm(torch.cat(norms))
    return total


def clip_scale(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What multiplies gradients of this global norm so that they have at most `max_norm`: float64 `[]`.

    For `Optimizer.step`, which skips a step where this is 0 or NaN: where the norm is inf or NaN.

    Raises:
        InvalidInput: `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise InvalidInput(f"clip_scale: max_norm must be positive, got {max_norm}")
    return (max_norm / norm.double()).clamp(max=1.0)


def clip_grad_norm(named_parameters: NamedParameters, max_norm: float, norm: float | None = None) -> float:
    """Scale all gradients in place to a global L2 norm of at most `max_norm`.

    Args:
        norm: the global norm where it is known already; None measures it.

    Returns:
        The norm before.

    Raises:
        TrainingDiverged: the norm is not finite; names a gradient at fault. No gradient was touched.
        InvalidInput: `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise InvalidInput(f"clip_grad_norm: max_norm must be positive, got {max_norm}")
    named = list(named_parameters)
    norm = grad_norm(named) if norm is None else norm
    if not math.isfinite(norm):
        bad = nonfinite_gradients(named)
        raise TrainingDiverged(
            f"gradient norm is {norm}; not finite in: {', '.join(bad[:3]) or 'no tensor here'}"
        )
    if norm > max_norm:
        torch._foreach_mul_([p.grad for _, p in named if p.grad is not None], max_norm / norm)
    return norm


def nonfinite_gradients(named_parameters: NamedParameters) -> list[str]:
    """Names of the parameters whose gradients have no finite norm: to say where a run went wrong."""
    return [name for name, norm in _norms(named_parameters).items() if not math.isfinite(norm)]


def _norms(named_parameters: NamedParameters) -> dict[str, float]:
    norms = {
        name: torch.linalg.vector_norm(p.grad, dtype=wide(p.grad.dtype)).double()
        for name, p in named_parameters
        if p.grad is not None
    }
    values: list[float] = torch.stack(list(norms.values())).tolist() if norms else []
    return dict(zip(norms, values, strict=True))
