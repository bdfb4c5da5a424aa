"""What the model asks of the floors above it, and the local answers.

Three seams, passed in when a model is built. `openk3.distributed` and `openk3.memory` implement them for many
ranks and for memory policies; the twins here are one device's. The model knows no rank, group or policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from openk3.ops.activation import Activation
from openk3.ops.kda import kda
from openk3.ops.moe import Routing, expert_ffn, plan

Tensor = torch.Tensor


@dataclass(frozen=True)
class ExpertWeights:
    """Stacked routed experts: gate `w1` and up `w3` `[E, F, l]`, down `w2` `[E, l, F]`."""

    w1: Tensor
    w3: Tensor
    w2: Tensor


class ExpertDispatch(Protocol):
    """Who computes which expert rows (report §5.2.1)."""

    def __call__(self, x: Tensor, routing: Routing, experts: ExpertWeights, activation: Activation) -> Tensor:
        """sum_i p_i E_i(x) over each token's experts: `[T, l]` to `[T, l]`, combined in fp32 in slot
        order."""
        ...


class SequenceContext(Protocol):
    """What a sequence's tokens need from the tokens before them, wherever those are (report §5.1.2)."""

    def conv_tail(self, x: Tensor, cu_seqlens: Tensor, width: int, tail: Tensor | None) -> Tensor | None:
        """The `[N, width - 1, C]` inputs before each local sequence; None when nothing precedes any."""
        ...

    def kda(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor,
        initial_state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The KDA recurrence with states folded in from before; see `openk3.ops.kda.kda`."""
        ...

    def latents(self, latents: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """All MLA latents that local queries may see, and their `cu_seqlens`."""
        ...


class ActivationTag(Protocol):
    """Names a tensor that will be saved for the backward, so that a memory policy can act on it (§5.2.2)."""

    def __call__(self, x: Tensor, name: str) -> Tensor: ...


class LocalDispatch:
    """All experts on this device."""

    def __call__(self, x: Tensor, routing: Routing, experts: ExpertWeights, activation: Activation) -> Tensor:
        table = plan(routing.ids, experts.w1.shape[0])
        return expert_ffn(x, routing.weights, table, experts.w1, experts.w3, experts.w2, activation)


class LocalContext:
    """Whole sequences on this device."""

    def conv_tail(self, x: Tensor, cu_seqlens: Tensor, width: int, tail: Tensor | None) -> Tensor | None:
        return tail

    def kda(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor,
        initial_state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        return kda(q, k, v, g, beta, cu_seqlens, initial_state=initial_state)

    def latents(self, latents: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        return latents, cu_seqlens


def untagged(x: Tensor, name: str) -> Tensor:
    """The tag when no memory policy listens: identity."""
    return x


@dataclass(frozen=True)
class Seams:
    """The three protocols a model is built with."""

    dispatch: ExpertDispatch
    context: SequenceContext
    tag: ActivationTag


LOCAL = Seams(dispatch=LocalDispatch(), context=LocalContext(), tag=untagged)
