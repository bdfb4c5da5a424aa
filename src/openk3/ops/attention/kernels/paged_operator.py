"""Paged MLA decoding as operators of torch: shapes and launches around the kernels."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton

from openk3.ops.attention.kernels.paged import append_rows, attend_part, mix_parts
from openk3.ops.kernel_operator import kernel_operator

Tensor = torch.Tensor

TILE = 64
MIX = {"PARTS": 16, "COLUMNS": 128, "num_warps": 4}
# Programs a processor, so that the last ones to end do not leave it idle for long, of the plain kernel as
# many as run there at once; and tokens of a part: fewer are not worth the mixing, more would gain nothing.
PROGRAMS_PER_PROCESSOR = 8
PLAIN_PROGRAMS_PER_PROCESSOR = 2
# Of the plain kernel on Hopper where a part is a whole sequence: a page's number is a load before its tokens,
# so that two stages have one tile on its way, five have two. Shorter parts lose by it.
STAGES_OF_WHOLE = 5
SMALLEST_PART, LARGEST_PART = 128, 8192
HOPPER_HEADS = 17  # from so many on; fewer leave its products idle, and smaller programs hide more latency


class Launch(NamedTuple):
    """ROWS queries and TOKENS cached tokens at a time."""

    ROWS: int
    TOKENS: int
    num_warps: int
    num_stages: int


def _power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def launch(H: int, width: int, item_size: int, kilobytes: int, generation: int) -> Launch:
    """The most tokens at a time, of which two tiles fit beside the queries; cached rows of `width` elements.

    By heads alone: a longer window takes more programs, so that no query's sums depend on it.
    """
    # On sm_100, 64 rows of a mix would fill the tensor memory and go through shared memory.
    rows = min(max(_power_of_two(H), 16), 32 if generation == 10 else 64)
    if item_size == 4:  # products by fused multiply-add: larger tiles do not fit in registers
        kilobytes = min(kilobytes, 99)
    while True:
        for tokens in (64, 32, 16):
            if (2 * tokens + rows) * width * item_size <= kilobytes * 1024:
                return Launch(rows, tokens, 8 if rows >= 32 else 4, 2)
        if rows == 16:  # one tile at a time
            return Launch(16, 16, 4, 1)
        rows //= 2


def split_for(N: int, tiles: int, max_length: int, places: int) -> int:
    """Tokens of a part, whole tiles, so that programs fill as many places."""
    parts = max(1, places // max(1, N * tiles))
    tokens = math.ceil(max_length / (parts * TILE)) * TILE
    return min(max(tokens, SMALLEST_PART), LARGEST_PART)


class Card(NamedTuple):
    processors: int
    kilobytes: int  # of shared memory that a program may have
    capability: tuple[int, int]


def card(x: Tensor) -> Card:
    """What x lies on; off CUDA, as many processors and as much memory as an H200 has."""
    if not x.is_cuda:
        return Card(132, 227, (0, 0))
    properties = torch.cuda.get_device_properties(x.device)
    most = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    capability = torch.cuda.get_device_capability(x.device)
    return Card(properties.multi_processor_count, int(most) // 1024, capability)


def hopper_fits(q_latent: Tensor, q_shared: Tensor, capability: tuple[int, int]) -> bool:
    """Whether the kernel in Hopper's layouts takes such queries."""
    H, R = q_latent.shape[2:]
    fits = R in (256, 512) and q_shared.shape[3] == 64 and H >= HOPPER_HEADS
    return fits and q_latent.dtype == torch.bfloat16 and capability == (9, 0)


def hopper_tiles(queries: int) -> tuple[int, int]:
    """Programs of 64 queries of a window, the last of them of 16, 32 or 64."""
    tiles = triton.cdiv(queries, 64)
    return tiles, min(max(_power_of_two(queries - 64 * (tiles - 1)), 16), 64)


def aligned(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in x.stride()[:-1])


def with_rows(x: Tensor) -> Tensor:
    """`[N, W, H, D]` as `[N W, H, D]`, columns adjacent; heads and tokens may stay apart."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, *x.shape[2:])


@kernel_operator("openk3::mla_decode", mutates_args=())
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
    if not queries or not max_length:
        return out.zero_(), lse.fill_(-math.inf)
    here = card(q_latent)
    hopper = hopper_fits(q_latent, q_shared, here.capability)
    chosen = launch(H, R + S, cache.element_size(), here.kilobytes, here.capability[0])
    tiles, last = hopper_tiles(W * H) if hopper else (triton.cdiv(W * H, chosen.ROWS), 0)
    programs = PROGRAMS_PER_PROCESSOR if hopper else PLAIN_PROGRAMS_PER_PROCESSOR
    split = split or split_for(N, tiles, max_length, programs * here.processors)
    parts = triton.cdiv(max_length, split)
    if parts == 1 and R <= 256 and here.capability == (9, 0) and chosen.num_stages == 2:  # wider ones spill
        chosen = chosen._replace(num_stages=STAGES_OF_WHOLE)
    to, to_lse = out, lse
    if parts > 1:
        to = q_latent.new_empty(parts, queries, R, dtype=torch.float32)
        to_lse = q_latent.new_empty(parts, queries, dtype=torch.float32)
    latent, shared = with_rows(q_latent), with_rows(q_shared)
    if hopper:  # copies 16 bytes at a time
        latent, shared = (x if aligned(x) else x.contiguous() for x in (latent, shared))
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    lengths = lengths.contiguous()
    read = table, lengths, to, to_lse, scale * math.log2(math.e), max_length, queries
    strides = *latent.stride()[:2], *shared.stride()[:2], table.stride(0)
    sizes = {"R": R, "PAGE": page_size, "ONE_PART": parts == 1}
    if hopper:
        from openk3.ops.attention.kernels.paged_hopper import attend_part_hopper, boxes

        attend_part_hopper[(tiles, N, parts)](
            latent,
            shared,
            *boxes(cache),
            *read,
            *strides,
            W,
            H,
            split,
            **sizes,
            SEVERAL=tiles > 1,
            LAST=last,
            num_warps=8,
        )
    else:
        precision = "ieee" if cache.dtype == torch.float32 else "tf32"
        attend_part[(tiles, N, parts)](
            latent,
            shared,
            cache,
            *read,
            *strides,
            W,
            H,
            split,
            **sizes,
            S=S,
            PRECISION=precision,
            **chosen._asdict(),
        )
    if parts > 1:
        columns = min(MIX["COLUMNS"], R)
        mix_parts[(queries, R // columns)](
            to, to_lse, lengths, out, lse, max_length, queries, W, H, split,
            R=R, **MIX | {"COLUMNS": columns},
        )  # fmt: skip
    return out, lse


@_decode.register_fake
def _(q_latent, q_shared, cache, block_table, lengths, scale, max_length, split):
    N, W, H, R = q_latent.shape
    return q_latent.new_empty(N, W, H, R), q_latent.new_empty(N, W, H, dtype=torch.float32)


@kernel_operator("openk3::mla_append", mutates_args=("cache",))
def _append(latents: Tensor, cache: Tensor, slots: Tensor) -> None:
    T, D = latents.shape
    if T:
        latents = latents if latents.stride(1) == 1 else latents.contiguous()
        columns = min(1024, _power_of_two(D))
        append_rows[(T,)](
            latents, latents.stride(0), slots.contiguous(), cache, cache.shape[0] * cache.shape[1],
            D=D, COLUMNS=columns, num_warps=2,
        )  # fmt: skip


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
