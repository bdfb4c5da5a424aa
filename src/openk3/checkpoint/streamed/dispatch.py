"""The model's seam for routed experts, answered from slots: each expert loaded once for all its tokens."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise

import torch

from openk3.checkpoint.streamed.experts import ExpertSlots
from openk3.model.protocols import ExpertWeights
from openk3.ops.activation import Activation
from openk3.ops.moe import Routing, combine, plan

Tensor = torch.Tensor


class StreamedDispatch:
    """`ExpertDispatch` of layer `layer`. Forward only."""

    def __init__(self, layer: int, experts: ExpertSlots) -> None:
        self._layer = layer
        self._experts = experts

    def __call__(self, x: Tensor, routing: Routing, experts: ExpertWeights, activation: Activation) -> Tensor:
        """Of `experts` only the shape is looked at: the numbers are where `ExpertSlots` finds them."""
        table = plan(routing.ids, experts.w1.shape[0])
        ends = table.offsets.tolist()
        chosen = [e for e, (first, last) in enumerate(pairwise(ends)) if first < last]
        # Rows go where the plan says and are summed slot by slot, so that the order of arrival is no matter.
        rows = x.new_empty(table.order.shape[0], x.shape[1])
        with closing(self._experts.each(self._layer, chosen)) as arriving:
            for e, expert in arriving:
                mine = slice(ends[e], ends[e + 1])
                z = x.index_select(0, table.tokens[mine])
                hidden = activation.forward(expert.times(z, "w1"), expert.times(z, "w3"))
                rows[mine] = expert.times(hidden, "w2")
        return combine(rows, table, routing.weights).to(x.dtype)
