"""The balance bias of every router, set once per step from what the whole step counted (report §2.3.3).

The bias changes here and nowhere else: between two applied updates, never in evaluation. Its average needs no
state of its own: the bias that routes is the average. Counts are global before they come here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from openk3.model import K3
from openk3.model.moe import Router
from openk3.ops.quantile_balance import average_bias, bias_from_histogram, sign_update
from openk3.ops.traces import named

Tensor = torch.Tensor


def routers(model: K3) -> dict[int, Router]:
    """Every router by its layer (0-based), the MTP layer's included, as `ForwardRecord` keys them."""
    return {module.layer: module for module in model.modules() if isinstance(module, Router)}


@named
@torch.no_grad()
def update_biases(
    model: K3,
    load: Mapping[int, Tensor],
    histogram: Mapping[int, Tensor],
    updates: int,
    admitted: Tensor,
) -> None:
    """Set the bias of each router that counted, for the next step.

    Args:
        load: int64 `[E]` by layer, tokens per expert in the step.
        histogram: int64 `[E, bins]` by layer, counts of the required bias; of routers that QB balances.
        updates: how many times the biases were set before.
        admitted: bool `[]` on the model's device; where it is False every bias stays as it is.
    """
    together: list[Router] = []
    for layer, router in routers(model).items():
        bias, config = router.e_score_correction_bias, router.config
        match config.balancing:
            case "qb" if layer in histogram:
                together.append(router)
            case "sign" if layer in load:
                moved = sign_update(bias, load[layer], config.sign_step)
                bias.copy_(torch.where(admitted, moved, bias))
            case _:
                pass
    if together:  # all of one size; a router's vectors are small, and each operation on them is a launch
        biases, config = [router.e_score_correction_bias for router in together], together[0].config
        counts, before = torch.stack([histogram[router.layer] for router in together]), torch.stack(biases)
        wanted = bias_from_histogram(counts, before, config.experts_per_token)
        after = torch.where(admitted, average_bias(before, wanted, updates, config.qb_ema), before)
        torch._foreach_copy_(biases, after.unbind())
