"""What the tests of paged MLA decoding share: random caches, and the attention that they stand for, expanded.

Expanded: each head makes its own keys and values from the latents, as in training. Nothing is absorbed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass
class Case:
    """A layer's projections, queries before absorption, and a cache whose unused cells hold no numbers."""

    q: Tensor  # [N, W, H, nope + S] fp64
    key: Tensor  # [H, nope, R] fp64
    value: Tensor  # [H, R, V] fp64
    q_latent: Tensor
    q_shared: Tensor
    cache: Tensor
    block_table: Tensor
    lengths: Tensor

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.q_latent, self.q_shared, self.cache, self.block_table, self.lengths


def draw(
    lengths: list[int],
    *,
    W: int = 1,
    H: int = 2,
    R: int = 64,
    S: int = 16,
    page_size: int = 16,
    max_pages: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    make = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=device, generator=make)

    N, nope, V = len(lengths), 16, 8
    needed = [max(0, -(-length // page_size)) for length in lengths]
    max_pages = max([*needed, 1]) if max_pages is None else max_pages
    pages = sum(needed) + 2
    order = torch.randperm(pages, generator=make, device=device)
    cache = torch.full((pages, page_size, R + S), math.nan, dtype=dtype, device=device)
    table = torch.full((N, max_pages), -1, dtype=torch.int32, device=device)
    used = 0
    for n, length in enumerate(lengths):
        own = order[used : used + needed[n]]
        used += needed[n]
        table[n, : len(own)] = own.int()
        if length > 0:
            rows = torch.full((len(own) * page_size, R + S), math.nan, dtype=dtype, device=device)
            rows[:length] = normal(length, R + S).to(dtype)
            cache[own] = rows.view(-1, page_size, R + S)
    q = 2 * normal(N, W, H, nope + S)
    q[..., nope:] = q[..., nope:].to(dtype).double()
    key, value = normal(H, nope, R) / R**0.5, normal(H, R, V) / R**0.5
    q_latent = torch.einsum("nwhk,hkr->nwhr", q[..., :nope], key).to(dtype)
    return Case(
        q, key, value, q_latent, q[..., nope:].to(dtype), cache, table,
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )  # fmt: skip


def expanded(case: Case) -> tuple[Tensor, Tensor]:
    """o `[N, W, H, V]` and the log of the sum of exponentials `[N, W, H]`, in float64."""
    N, W, H, nope = *case.q.shape[:3], case.key.shape[1]
    R, page_size = case.key.shape[2], case.cache.shape[1]
    out = case.q.new_zeros(N, W, H, case.value.shape[2])
    lse = case.q.new_full((N, W, H), -math.inf)
    for n, length in enumerate(case.lengths.tolist()):
        if length <= 0:
            continue
        at = torch.arange(length, device=case.q.device)
        latents = case.cache[case.block_table[n, at // page_size].long(), at % page_size].double()
        for h in range(H):
            k = torch.cat([latents[:, :R] @ case.key[h].T, latents[:, R:]], 1)
            v = latents[:, :R] @ case.value[h]
            seen = length - W + 1 + torch.arange(W, device=at.device)[:, None]
            logits = (case.scale * case.q[n, :, h] @ k.T).masked_fill(at >= seen, -math.inf)
            lse[n, :, h] = logits.logsumexp(-1)
            weights = torch.where(seen > 0, logits, 0.0).softmax(-1) * (seen > 0)
            out[n, :, h] = weights @ v
    assert nope + case.q_shared.shape[3] == case.q.shape[3]
    return out, lse


def projected(case: Case, mixed: Tensor) -> Tensor:
    """The heads' outputs `[N, W, H, V]` from their mixes of latents."""
    return torch.einsum("nwhr,hrv->nwhv", mixed.double(), case.value)
