"""Causal attention in plain PyTorch, in tiles of scores that stay in cache, keeping q, k, v and o only.

A tile is a few dozen queries of some (sequence, head) pairs against *all* the keys that they see. Whole rows
make the softmax one library call and give the largest logit on the way; keys past a tile's last query are
never computed. The backward computes the softmax of each tile again from q and k: no row statistics are kept.

With P = softmax(S), dP = dO V^T and delta = sum_j P dP = dO . O:   dV = P^T dO,   dS = P (dP - delta),
dQ = scale dS K,   dK = scale dS^T Q.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from openk3.ops.attention.grouping import Group, gather, group_by_length, scatter
from openk3.ops.precision import own_dtypes, wide

CPU_TILE = 64, 1 << 19  # queries, scores: 2 MB in fp32, the second-level caches of two cores (measured best)
GPU_TILE = 512, 1 << 27
MIN_QUERIES = 16  # a matrix product with fewer rows wastes the machine: very long keys get larger tiles


class Tile(NamedTuple):
    pairs: slice  # of the G * H (sequence, head) pairs
    queries: slice
    keys: int  # the tile's last query sees keys [0, keys)


def _tiles(pairs: int, n_q: int, n_k: int, device: torch.device) -> Iterator[Tile]:
    most_queries, scores = CPU_TILE if device.type == "cpu" else GPU_TILE
    rows = min(most_queries, n_q, max(MIN_QUERIES, scores // n_k))
    step = max(1, scores // (rows * n_k))
    for pair in range(0, pairs, step):
        for query in range(0, n_q, rows):
            end = min(query + rows, n_q)
            yield Tile(slice(pair, pair + step), slice(query, end), end + n_k - n_q)


def _logits(q: torch.Tensor, k: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The tile's q k^T `[pairs, queries, keys]`, -inf where the key comes after the query."""
    q = q[tile.pairs, tile.queries]
    logits = torch.bmm(q, k[tile.pairs, : tile.keys].mT)
    n = q.shape[1]  # only the last n keys lie on the diagonal
    logits[..., -n:].add_(logits.new_full((n, n), -math.inf).triu_(1))
    return logits


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        groups: list[Group],
        scale: float,
        return_max_logit: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        o = v.new_zeros(q.shape[0], *v.shape[1:], dtype=wide(v.dtype))
        largest = q.new_full((q.shape[1],), -math.inf, dtype=wide(q.dtype)) if return_max_logit else None
        for group in groups:
            q_batch = gather(q, group.q_rows, group.n_q).mul_(scale)
            k_batch, v_batch = gather(k, group.k_rows, group.n_k), gather(v, group.k_rows, group.n_k)
            o_batch = v_batch.new_empty(len(q_batch), group.n_q, v.shape[-1])
            pair_largest = q_batch.new_full((len(q_batch),), -math.inf)
            for tile in _tiles(len(q_batch), group.n_q, group.n_k, q.device):
                logits = _logits(q_batch, k_batch, tile)
                if return_max_logit:
                    so_far = pair_largest[tile.pairs]
                    torch.maximum(so_far, logits.amax((1, 2)), out=so_far)
                weights = torch.softmax(logits, -1, out=logits)
                o_batch[tile.pairs, tile.queries] = torch.bmm(weights, v_batch[tile.pairs, : tile.keys])
            scatter(o, group.q_rows, o_batch)
            if largest is not None:
                largest = torch.maximum(largest, pair_largest.view(-1, q.shape[1]).amax(0))
        ctx.save_for_backward(q, k, v, o)
        ctx.groups, ctx.scale = groups, scale
        if largest is not None:
            ctx.mark_non_differentiable(largest)
        return o, largest

    @staticmethod
    @own_dtypes
    @once_differentiable
    def backward(
        ctx: Any, d_o: torch.Tensor, _: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None, None]:
        q, k, v, o = ctx.saved_tensors
        d_q, d_k, d_v = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        delta = (d_o * o).sum(-1, keepdim=True)
        for group in ctx.groups:
            q_batch = gather(q, group.q_rows, group.n_q).mul_(ctx.scale)
            k_batch, v_batch = gather(k, group.k_rows, group.n_k), gather(v, group.k_rows, group.n_k)
            d_o_batch, delta_batch = (gather(x, group.q_rows, group.n_q) for x in (d_o, delta))
            d_q_batch = torch.empty_like(q_batch)
            d_k_batch, d_v_batch = torch.zeros_like(k_batch), torch.zeros_like(v_batch)
            for tile in _tiles(len(q_batch), group.n_q, group.n_k, q.device):
                rows, columns = tile[:2], (tile.pairs, slice(tile.keys))
                weights = _logits(q_batch, k_batch, tile)
                torch.softmax(weights, -1, out=weights)
                # bmm, then add: baddbmm_ into a strided slice goes pair by pair, which wastes the second core
                d_v_batch[columns].add_(torch.bmm(weights.mT, d_o_batch[rows]))
                d_logits = torch.bmm(d_o_batch[rows], v_batch[columns].mT)
                d_logits.sub_(delta_batch[rows]).mul_(weights)
                d_k_batch[columns].add_(torch.bmm(d_logits.mT, q_batch[rows]))
                d_q_batch[rows] = torch.bmm(d_logits, k_batch[columns])
            scatter(d_q, group.q_rows, d_q_batch.mul_(ctx.scale))
            scatter(d_k, group.k_rows, d_k_batch)
            scatter(d_v, group.k_rows, d_v_batch)
        return d_q, d_k, d_v, None, None, None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: list[int],
    cu_seqlens_k: list[int],
    scale: float,
    return_max_logit: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `openk3.ops.attention.attention`."""
    groups = group_by_length(cu_seqlens_q, cu_seqlens_k, q.shape[1], q.device)
    return _Attention.apply(q, k, v, groups, scale, return_max_logit)  # type: ignore[no-untyped-call, no-any-return]
