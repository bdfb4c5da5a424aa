"""GPU kernels as operators that torch knows, launched on the card that holds their tensors.

Triton launches on the current device and its current stream, whatever device its tensors are on. Knows no
operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef


def _card(args: tuple[Any, ...]) -> int:
    """The index of the CUDA device of the first tensor, alone or in a list; -1 for a CPU's."""
    for x in args:
        first = x[0] if isinstance(x, list) and x else x
        if isinstance(first, torch.Tensor):
            return first.get_device()
    raise TypeError("an operator with kernels takes a tensor")


def kernel_operator(
    name: str, *, mutates_args: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """`torch.library.custom_op` for a function that launches kernels, with its first tensor's device current.

    Where it is already, that is two reads on the host. Autograd, fakes, torch.compile and CUDA graphs see
    what they see of any custom operator: the device changes inside it.

    Args:
        name: as in "openk3::norm".
        mutates_args: those that the kernels write to.
    """

    def register(body: Callable[..., Any]) -> CustomOpDef:
        @functools.wraps(body)
        def on_its_card(*args: Any) -> Any:
            card = _card(args)
            if card < 0 or card == torch.cuda.current_device():
                return body(*args)
            with torch.cuda.device(card):
                return body(*args)

        # Of the body: torch looks for the types that annotations name beside the function it is given.
        schema = torch.library.infer_schema(body, mutates_args=mutates_args)
        return torch.library.custom_op(name, on_its_card, mutates_args=mutates_args, schema=schema)

    return register
