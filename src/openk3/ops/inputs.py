"""What operators ask of all their tensors: floating point, on one device. Shapes are each operator's own."""

from __future__ import annotations

import torch

from openk3.errors import InvalidInput


def check_floating(operator: str, **tensors: torch.Tensor | None) -> None:
    """Refuse integers, complex numbers and a second device; None stands for an argument that was not given.

    Raises:
        InvalidInput: names the first tensor that does not fit, and the one that it must agree with.
    """
    named = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first, against = next(iter(named.items()))
    for name, tensor in named.items():
        if not tensor.is_floating_point() or tensor.device != against.device:
            raise InvalidInput(
                f"{operator}: inputs must be floating point on one device; "
                f"{name} is {tensor.dtype} on {tensor.device}, {first} on {against.device}"
            )
