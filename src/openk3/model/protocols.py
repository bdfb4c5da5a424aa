"""What the model asks of the floors above it, and the local answers.

Four seams, passed in when a model is built. `openk3.distributed` and `openk3.memory` implement them for many
ranks and for memory policies; the twins here are one device's. The model knows no rank, group or policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from openk3.model.state import MlaState
from openk3.ops.activation import Activation
from openk3.ops.kda import gated_kda
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
    """What a sequence's tokens need from the tokens before them, wherever those are (report §5.1.2).

    Local sequences are those of `cu_seqlens`. Tokens before one may lie in this pass but elsewhere, or in
    earlier calls of decoding: then the model hands in what it kept of them.
    """

    def continued(self, cu_seqlens: Tensor) -> Tensor | None:
        """bool `[N]`, which local sequences have tokens before them in this pass; None when none has."""
        ...

    def rows_before(self, x: Tensor, cu_seqlens: Tensor, rows: int, kept: Tensor | None) -> Tensor | None:
        """The `[N, rows, C]` of `x` before each local sequence, oldest first, zero where there are none; None
        when nothing precedes any. `x` is `[T, C]`, `kept` the same of earlier calls."""
        ...

    def kda(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        z: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        lower_bound: float | None,
        cu_seqlens: Tensor,
        initial_state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """KDA from raw projections, with states folded in from before; see `openk3.ops.kda.gated_kda`."""
        ...

    def latents(self, latents: Tensor, cu_seqlens: Tensor, kept: MlaState | None) -> MlaState:
        """All MLA latents that local queries may see: those before each local sequence, then its own."""
        ...


class ActivationTag(Protocol):
    """Names a tensor that will be saved for the backward, so that a memory policy can act on it (§5.2.2)."""

    def __call__(self, x: Tensor, name: str) -> Tensor: ...


class LocalDispatch:
    """All experts on this device."""

    def __call__(self, x: Tensor, routing: Routing, experts: ExpertWeights, activation: Activation) -> Tensor:
        table = plan(routing.ids, experts.w1.shape[0], counts=routing.counts)
        return expert_ffn(x, routing.weights, table, experts.w1, experts.w3, experts.w2, activation)


class LocalContext:
    """Whole sequences on this device."""

    def continued(self, cu_seqlens: Tensor) -> Tensor | None:
        return None

    def rows_before(self, x: Tensor, cu_seqlens: Tensor, rows: int, kept: Tensor | None) -> Tensor | None:
        return kept

    def kda(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        z: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        lower_bound: float | None,
        cu_seqlens: Tensor,
        initial_state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        return gated_kda(
            q, k, v, z, b, A_log, dt_bias, cu_seqlens, lower_bound=lower_bound, initial_state=initial_state
        )

    def latents(self, latents: Tensor, cu_seqlens: Tensor, kept: MlaState | None) -> MlaState:
        return MlaState(latents, cu_seqlens) if kept is None else kept.extended(latents, cu_seqlens)


class Overlap(Protocol):
    """Two functions of one input that need nothing of each other."""

    def __call__(
        self, x: Tensor, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """first(x), second(x)."""
        ...


def in_turn(
    x: Tensor, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """One after the other."""
    return first(x), second(x)


def untagged(x: Tensor, name: str) -> Tensor:
    """The tag when no memory policy listens: identity."""
    return x


@dataclass(frozen=True)
class Seams:
    """The protocols a model is built with.

    overlap: how a mixture runs its shared experts beside the routed ones; `SideStream` on a GPU.
    """

    dispatch: ExpertDispatch
    context: SequenceContext
    tag: ActivationTag
    overlap: Overlap = in_turn


LOCAL = Seams(dispatch=LocalDispatch(), context=LocalContext(), tag=untagged)
