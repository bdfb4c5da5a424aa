"""Gradients of a step's micro-batches, which add up in at least fp32 where weights are bf16.

Autograd can write each out in fp32 first and add that: 18 bytes moved for an element of a bf16 gradient. Here
the first one is widened and the others are added to it as they are: 10 bytes, and the same bits.
"""

from __future__ import annotations

from openk3.model import K3
from openk3.ops.precision import wide
from openk3.ops.traces import named


def prepare_gradients(model: K3) -> None:
    """Before the first backward: let gradients come as they are made.

    The table's come from several products, look-up and head, whose gradients autograd adds before it hands
    over their sum; so those are written out in fp32 first.
    """
    shared = {model.embed_tokens.weight, model.head_weight}
    for parameter in model.parameters():
        parameter.grad_dtype = wide(parameter.dtype) if parameter in shared else None


@named
def widen_gradients(model: K3) -> None:
    """After the backward of a step's first micro-batch: what later ones are added to is at least fp32."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(wide(parameter.grad.dtype))
