"""Paged MLA decoding as operators of torch: shapes and launches around the kernels."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton

from openk3.ops.attention.kernels.paged import append_rows, attend_part, mix_parts

Tensor = torch.Tensor

TILE = 64
MIX = {"PARTS": 16, "COLUMNS": 128, "num_warps": 4}
# Parts a processor, and the tokens of a part: fewer cost launches, more are not worth a mix of their own.
PARTS_PER_PROCESSOR = 4
SMALLEST_PART, LARGEST_PART = 128, 8192


class Launch(NamedTuple):
    """ROWS queries and TOKENS cached tokens at a time."""

    ROWS: int
    TOKENS: int
    num_warps: int
    num_stages: int


def _power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def rows_of(H: int) -> int:
    """By heads alone: a longer window takes more programs, so that no query's sums depend on it."""
    return min(max(_power_of_two(H), 16), 64)


def launch(H: int, width: int, item_size: int, kilobytes: int) -> Launch:
    """The most tokens at a time, of which two tiles fit beside the queries; rows of `width` elements."""
    rows = rows_of(H)
    if item_size == 4:  # products by fused multiply-add: larger tiles do not fit in registers
        kilobytes = min(kilobytes, 99)
    while True:
        for tokens in (64, 32, 16):
            if (2 * tokens + rows) * width * item_size <= kilobytes * 1024:
                return Launch(rows, tokens, 8 if rows >= 32 else 4, 2)
        if rows == 16:  # one tile at a time
            return Launch(16, 16, 4, 1)
        rows //= 2


def split_for(N: int, tiles: int, max_length: int, processors: int) -> int:
    """Tokens of a part that keep the device busy; a power of two, so that few lengths compile anew."""
    parts = max(1, PARTS_PER_PROCESSOR * processors // max(1, N * tiles))
    tokens = _power_of_two(math.ceil(max_length / parts))
    return min(max(tokens, SMALLEST_PART), LARGEST_PART)


def card(x: Tensor) -> tuple[int, int]:
    """Processors, and KB of shared memory that a program may have; an H200's off CUDA."""
    if not x.is_cuda:
        return 132, 227
    properties = torch.cuda.get_device_properties(x.device)
    most = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return properties.multi_processor_count, int(most) // 1024


def with_rows(x: Tensor) -> Tensor:
    """`[N, W, H, D]` as `[N W, H, D]`, columns adjacent; heads and tokens may stay apart."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, *x.shape[2:])


@torch.library.custom_op("openk3::mla_decode", mutates_args=())
def _decode(
    q_latent: Tensor,
    q_shared: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    max_length: int,
    split: int,
) -> tuple[Tensor, Tensor]:
    (N, W, H, R), S, page_size = q_latent.shape, q_shared.shape[-1], cache.shape[1]
    queries = N * W * H
    out = q_latent.new_empty(N, W, H, R)
    lse = q_latent.new_empty(N, W, H, dtype=torch.float32)
    if not queries:
        return out, lse
    processors, kilobytes = card(q_latent)
    chosen = launch(H, R + S, cache.element_size(), kilobytes)
    tiles = triton.cdiv(W * H, chosen.ROWS)
    split = split or split_for(N, tiles, max_length, processors)
    parts = max(1, triton.cdiv(max_length, split))
    to, to_lse = out, lse
    if parts > 1:
        to = q_latent.new_empty(parts, queries, R, dtype=torch.float32)
        to_lse = q_latent.new_empty(parts, queries, dtype=torch.float32)
    latent, shared = with_rows(q_latent), with_rows(q_shared)
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    lengths = lengths.contiguous()
    attend_part[(tiles, N, parts)](
        latent, shared, cache, table, lengths, to, to_lse, scale * math.log2(math.e), max_length, queries,
        latent.stride(0), latent.stride(1), shared.stride(0), shared.stride(1), table.stride(0),
        W=W, H=H, R=R, S=S, PAGE=page_size, SPLIT=split, ONE_PART=parts == 1,
        PRECISION="ieee" if cache.dtype == torch.float32 else "tf32", **chosen._asdict(),
    )  # fmt: skip
    if parts > 1:
        columns = min(MIX["COLUMNS"], R)
        mix_parts[(queries, R // columns)](
            to, to_lse, lengths, out, lse, max_length, queries,
            W=W, H=H, R=R, SPLIT=split, **MIX | {"COLUMNS": columns},
        )  # fmt: skip
    return out, lse


@_decode.register_fake
def _(q_latent, q_shared, cache, block_table, lengths, scale, max_length, split):
    N, W, H, R = q_latent.shape
    return q_latent.new_empty(N, W, H, R), q_latent.new_empty(N, W, H, dtype=torch.float32)


@torch.library.custom_op("openk3::mla_append", mutates_args=("cache",))
def _append(latents: Tensor, cache: Tensor, slots: Tensor) -> None:
    T, D = latents.shape
    if T:
        latents = latents if latents.stride(1) == 1 else latents.contiguous()
        columns = min(1024, _power_of_two(D))
        append_rows[(T,)](
            latents, latents.stride(0), slots.contiguous(), cache, D=D, COLUMNS=columns, num_warps=2
        )


@_append.register_fake
def _(latents, cache, slots):
    return None


def decode(
    q_latent: Tensor,
    q_shared: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    max_length: int,
    split: int,
) -> tuple[Tensor, Tensor]:
    """See `openk3.ops.attention.paged.mla_decode`; split 0 is chosen by shapes."""
    mixed, lse = torch.ops.openk3.mla_decode(
        q_latent, q_shared, cache, block_table, lengths, scale, max_length, split
    )
    return mixed, lse


def append(latents: Tensor, cache: Tensor, slots: Tensor) -> None:
    """See `openk3.ops.attention.paged.mla_append`."""
    torch.ops.openk3.mla_append(latents.detach(), cache.detach(), slots)
