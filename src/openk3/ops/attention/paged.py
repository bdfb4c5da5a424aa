"""Decoding with MLA: a window of new queries against cached latents, in pages (report §2.1.2).

In the absorbed form all heads share one key, a token's latent with its shared dims behind it, and mix that
latent itself: what a head adds is a projection before and one after, which the caller does. There are no
positions and no rotation. Knows neither projections, gates nor who owns a page.
"""

from __future__ import annotations

import math

import torch

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.dispatch import Implementation, Kernel, choose
from openk3.ops.inputs import check_floating
from openk3.ops.precision import own_dtypes

__all__ = ["mla_append", "mla_decode"]

LONGEST_WINDOW = 8
TILE = 64  # cached tokens; splits are whole tiles
KERNELS = tuple(
    Kernel(
        function,
        takes=takes,
        checked_on="H200 (sm_90)",
        compiles_for=("sm_80", "sm_86", "sm_89", "sm_100", "sm_120"),
    )
    for function, takes in (
        (
            "mla_decode",
            "latents of 64, 128, 256 or 512 with 16, 32, 64 or 128 shared dims, pages of 16, 32, 64 or 128; "
            "bf16, fp16 or fp32; no gradient",
        ),
        ("mla_append", "any widths; not float64"),
    )
)

Tensor = torch.Tensor


@own_dtypes
def mla_decode(
    q_latent: Tensor,
    q_shared: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    max_length: int | None = None,
    split: int | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor | None]:
    """softmax(scale q . latent) latent[:R] for the last W tokens of each of N sequences.

    Query w of a sequence of n tokens sees tokens j < n - W + 1 + w: the window's own latents are in the cache
    already (`mla_append`), and the last query sees all. A query that sees nothing gives zero, so a length of
    0 marks a row without a sequence.

    Kernels cut a sequence at multiples of `split` tokens, and mix the parts in order. What a query gets then
    depends on its head, the tokens it sees and `split`, to the bit: not on N, W, pages or neighbours. Lengths
    and tables are read on the device alone, and launches follow shapes, `max_length` and `split`.

    Args:
        q_latent: `[N, W, H, R]` queries with the key projection absorbed, 1 <= W <= 8.
        q_shared: `[N, W, H, S]` their shared dims, in q_latent's dtype. Heads and tokens of both may lie
            apart in memory.
        cache: `[pages, page_size, R + S]`, token-major: normed latent, then the raw shared key. q's dtype,
            contiguous. What lies beyond a length is never used, whatever it is.
        block_table: int32 `[N, max_pages]`: tokens [i page_size, (i + 1) page_size) of sequence n lie in page
            block_table[n, i]. Entries past a length are not followed; others are not checked.
        lengths: int32 `[N]`, the window included. Those beyond the table or `max_length` are not checked:
            they give a wrong result, not a wrong access.
        scale: factor of the logits, (key head size before absorption)**-0.5.
        max_length: no sequence is longer; by default what the table can hold.
        split: tokens, a multiple of 64, for results that do not depend on the batch. By default it follows
            shapes and `max_length`, to keep the device busy.
        return_lse: also return the log of the sum of exponentials.
        implementation: force "reference", "eager" or "triton"; by default the fastest for the device.

    Returns:
        mixed `[N, W, H, R]` in q's dtype, contiguous: computed in fp32 and rounded once, since the projection
        that reads it takes that dtype. lse `[N, W, H]` in at least fp32, -inf where nothing is seen, without
        gradient (None unless asked for). Kernels give no gradient to anything.

    Raises:
        InvalidInput: shapes, dtypes, devices or strides do not fit.
        KernelUnavailable: the forced implementation cannot run here.
    """
    name = "mla_decode"
    _check_queries(name, q_latent, q_shared, cache)
    _check_integers(name, cache, block_table=block_table, lengths=lengths)
    N, page_size = len(q_latent), cache.shape[1]
    if block_table.dim() != 2 or len(block_table) != N or lengths.shape != (N,):
        raise InvalidInput(
            f"{name}: block_table is {tuple(block_table.shape)} and lengths {tuple(lengths.shape)} "
            f"for {N} sequences; want [{N}, max_pages] and [{N}]"
        )
    capacity = block_table.shape[1] * page_size
    if not math.isfinite(scale):
        raise InvalidInput(f"{name}: scale is {scale}; want a finite number")
    if max_length is not None and max_length < 0:
        raise InvalidInput(f"{name}: max_length is {max_length}; want 0 or more")
    if split is not None and (split < TILE or split % TILE):
        raise InvalidInput(f"{name}: split is {split}; want a multiple of {TILE} tokens")
    max_length = capacity if max_length is None else min(max_length, capacity)
    no_kernel = _kernel_problem(q_latent, q_shared, cache)
    if implementation == "triton" and no_kernel:
        raise KernelUnavailable(f"{name}: {no_kernel}; ask for implementation='eager'")
    checked = all(kernel.checked for kernel in KERNELS)
    match choose(name, q_latent, implementation, kernels=no_kernel is None, by_default=checked):
        case "triton":
            from openk3.ops.attention.kernels.paged_operator import decode

            mixed, lse = decode(
                q_latent, q_shared, cache, block_table, lengths, scale, max_length, split or 0
            )
        case "reference":
            from openk3.ops.attention.paged_reference import mla_decode as by_definition

            mixed, lse = by_definition(q_latent, q_shared, cache, block_table, lengths, scale)
        case _:
            from openk3.ops.attention.paged_eager import mla_decode as run

            mixed, lse = run(q_latent, q_shared, cache, block_table, lengths, scale, max_length)
    return mixed, lse if return_lse else None


@own_dtypes
def mla_append(
    latents: Tensor, cache: Tensor, slots: Tensor, *, implementation: Implementation | None = None
) -> None:
    """Write T tokens into the pages of `cache`, in place; kernels give no gradient.

    Args:
        latents: `[T, D]`, in the cache's dtype; rows may lie apart.
        cache: `[pages, page_size, D]`, contiguous.
        slots: int32 or int64 `[T]`, page * page_size + place in the page, no slot twice. One that is
            negative or beyond the cache writes nothing.
        implementation: force "eager" or "triton"; by default the fastest for the device.

    Raises:
        InvalidInput: shapes, dtypes, devices or strides do not fit.
        KernelUnavailable: the forced implementation cannot run here, or a gradient is asked of kernels.
    """
    name = "mla_append"
    check_floating(name, latents=latents, cache=cache)
    _check_integers(name, cache, slots=slots)
    _check_cache(name, cache)
    fits = latents.dim() == 2 and latents.dtype == cache.dtype and latents.shape[1] == cache.shape[2]
    if not fits or slots.shape != latents.shape[:1]:
        raise InvalidInput(
            f"{name}: latents are {tuple(latents.shape)} {latents.dtype} and slots {tuple(slots.shape)}; "
            f"want [T, {cache.shape[2]}] {cache.dtype} and [T]"
        )
    checked = all(kernel.checked for kernel in KERNELS)
    plain = not _differentiated(latents, cache)
    if implementation == "triton" and not plain:
        raise KernelUnavailable(f"{name}: the kernel has no gradient; ask for implementation='eager'")
    if choose(name, cache, implementation, kernels=plain, by_default=checked) == "triton":
        from openk3.ops.attention.kernels.paged_operator import append as write
    else:
        from openk3.ops.attention.paged_eager import mla_append as write
    write(latents, cache, slots)


def _kernel_problem(q_latent: Tensor, q_shared: Tensor, cache: Tensor) -> str | None:
    R, S, page_size = q_latent.shape[-1], q_shared.shape[-1], cache.shape[1]
    if R not in (64, 128, 256, 512) or S not in (16, 32, 64, 128):
        return (
            f"the kernel takes latents of 64 to 512 and 16 to 128 shared dims, powers of two, got {R} and {S}"
        )
    if page_size not in (16, 32, 64, 128):
        return f"the kernel takes pages of 16, 32, 64 or 128 tokens, got {page_size}"
    if q_latent.dtype == torch.float64:
        return "the kernel computes in fp32, not float64"
    if _differentiated(q_latent, q_shared, cache):
        return "the kernel has no gradient"
    return None


def _differentiated(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _check_queries(name: str, q_latent: Tensor, q_shared: Tensor, cache: Tensor) -> None:
    check_floating(name, q_latent=q_latent, q_shared=q_shared, cache=cache)
    _check_cache(name, cache)
    shapes = f"q_latent {tuple(q_latent.shape)}, q_shared {tuple(q_shared.shape)}, cache {tuple(cache.shape)}"
    if q_latent.dim() != 4 or q_shared.dim() != 4 or q_latent.shape[:3] != q_shared.shape[:3]:
        raise InvalidInput(f"{name}: want queries [N, W, H, R] and [N, W, H, S], got {shapes}")
    if cache.shape[2] != q_latent.shape[3] + q_shared.shape[3]:
        raise InvalidInput(f"{name}: the cache must be as wide as latent and shared dims, got {shapes}")
    if not 1 <= q_latent.shape[1] <= LONGEST_WINDOW:
        raise InvalidInput(f"{name}: W must lie in 1..{LONGEST_WINDOW}, got {shapes}")
    if not q_latent.dtype == q_shared.dtype == cache.dtype:
        raise InvalidInput(
            f"{name}: q_latent, q_shared and cache must share a dtype, "
            f"got {q_latent.dtype}, {q_shared.dtype} and {cache.dtype}"
        )


def _check_cache(name: str, cache: Tensor) -> None:
    if cache.dim() != 3 or not cache.is_contiguous() or not cache.numel():
        raise InvalidInput(
            f"{name}: cache must be [pages, page_size, D], contiguous and not empty, "
            f"got {tuple(cache.shape)} with strides {cache.stride()}"
        )


def _check_integers(name: str, cache: Tensor, **tensors: Tensor) -> None:
    for what, x in tensors.items():
        allowed = (torch.int32, torch.int64) if what == "slots" else (torch.int32,)
        if x.dtype not in allowed or x.device != cache.device:
            raise InvalidInput(f"{name}: {what} must be int32 on {cache.device}, got {x.dtype} on {x.device}")
