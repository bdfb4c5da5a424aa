"""What decoding carries from call to call, per sequence and layer.

KDA keeps a fixed-size state and a convolution tail; MLA keeps its latents. States are values: a layer returns
a new one and never writes into the old. Paging and sharing between requests belong to the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class KdaState:
    """`S`: `[N, H, V, K]`, at least fp32, V-first. `conv`: `[N, W - 1, 3 H K]`, q, k, v channels, oldest
    first."""

    S: Tensor
    conv: Tensor


@dataclass(frozen=True)
class MlaState:
    """`latents`: `[tokens, r + shared]` packed by `cu_seqlens` `int32 [N+1]`: normed latent, then raw shared
    key."""

    latents: Tensor
    cu_seqlens: Tensor

    def extended(self, latents: Tensor, cu_seqlens: Tensor) -> MlaState:
        """With each sequence's new tokens behind its old ones."""
        if len(cu_seqlens) == 2:
            return MlaState(torch.cat([self.latents, latents]), self.cu_seqlens + cu_seqlens)
        old, new = self.cu_seqlens.diff(), cu_seqlens.diff()
        total = torch.zeros_like(cu_seqlens)
        total[1:] = (old + new).cumsum(0)
        joined = latents.new_empty(self.latents.shape[0] + latents.shape[0], latents.shape[1])
        joined[_rows(self.cu_seqlens, total[:-1])] = self.latents
        joined[_rows(cu_seqlens, total[:-1] + old)] = latents
        return MlaState(joined, total)


LayerState = KdaState | MlaState


@dataclass(frozen=True)
class DecodeState:
    """One state per layer, and how many tokens each sequence has seen (`int32 [N]`)."""

    layers: tuple[LayerState, ...]
    lengths: Tensor


def _rows(cu_seqlens: Tensor, starts: Tensor) -> Tensor:
    """Where packed rows go when sequence i is moved to `starts[i]`: `[T]`."""
    lengths = cu_seqlens.diff()
    offsets = torch.repeat_interleave(starts - cu_seqlens[:-1], lengths)
    return (torch.arange(offsets.shape[0], device=offsets.device) + offsets).long()
