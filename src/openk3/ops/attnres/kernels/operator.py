"""The mixes as operators of torch: shapes, launches and autograd around the kernels of this folder."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from openk3.ops.attnres.kernels import bank as bank_kernels
from openk3.ops.attnres.kernels import one_query
from openk3.ops.kernel_operator import kernel_operator

Tensor = torch.Tensor

COLUMNS_PER_WARP = 1024  # 32 a thread
# Forward, rows are copied ahead to shared memory (STAGES - 1 of them), and two programs of 8 warps share a
# processor. Backward, they are loaded ahead to registers, of which such a row takes 16, and one has them all.
# Rows of WIDE columns or more have settings of their own, as measured at 7,168.
WIDE = 4096
FORWARD = {"STAGES": 6, "STAGES_WIDE": 4, "STAGES_WIDE_NORM": 3, "warps": 16, "maxnreg": 128}
BACKWARD = {"AHEAD": 4, "AHEAD_WIDE": 3, "warps": 8}
# Both ways with a token's rows in shared memory: columns a warp, warps a processor, rows between barriers.
RING = {"columns": 512, "warps": 16, "columns_wide": 1024, "warps_wide": 8, "GROUP": 2}
# All queries.
SLICES = 4  # of the columns
PRODUCTS = {"COLUMNS": 64, "STAGES": 4, "num_warps": 4}
MIXES = {"COLUMNS": 256, "STAGES": 4, "num_warps": 4}


def launch(d: int, T: int, device: torch.device, warps_per_processor: int) -> tuple[int, dict[str, int]]:
    """Programs, and the width D and warps of each."""
    D = triton.next_power_of_2(d)
    warps = min(max(D // COLUMNS_PER_WARP, 1), 16)
    return min(T, processors(device) * max(warps_per_processor // warps, 1)), {"D": D, "num_warps": warps}


def stages(D: int, x: Tensor, norm: bool) -> int:
    """One more than there are rows in the ring, which takes 160 KiB at most."""
    most = FORWARD["STAGES"] if D < WIDE else FORWARD["STAGES_WIDE_NORM" if norm else "STAGES_WIDE"]
    return max(2, min(most, 1 + shared_memory(x.device) // (D * x.element_size())))


def ahead(D: int, S: int) -> int:
    """Rows that are asked for before they are needed."""
    return min(BACKWARD["AHEAD" if D < WIDE else "AHEAD_WIDE"], 2 * S)


def shared_memory(device: torch.device) -> int:
    """Bytes for rows that are copied ahead: 160 KiB, or what the card has less than that."""
    if device.type != "cuda":
        return 160 << 10
    card = torch.cuda.get_device_properties(device)
    most = int(getattr(card, "shared_memory_per_block_optin", card.shared_memory_per_block))
    return min(160 << 10, most - (8 << 10))


def processors(device: torch.device) -> int:
    """Of the card; a few under Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def ring_launch(rows: Sequence[Tensor]) -> tuple[int, dict[str, int]] | None:
    """Programs and sizes of the kernels with rows in shared memory; None if they do not take these rows.

    They run on sm_90, and take half-precision rows of 256 columns or more, in whole lines of 16 bytes, if all
    lie in shared memory together: on an H200 up to 14 of width 7,168. Memory left takes the next token's.
    """
    T, d = rows[0].shape
    D, R = triton.next_power_of_2(d), len(rows)
    if not rows[0].is_cuda or torch.cuda.get_device_capability(rows[0].device) != (9, 0):
        return None
    if rows[0].element_size() != 2 or d % 16 or D < 256 or R > 32:
        return None
    if any(row.data_ptr() % 16 for row in rows):
        return None
    wide = "_wide" if D >= WIDE else ""
    warps, per_processor = max(D // RING["columns" + wide], 1), RING["warps" + wide]
    card = torch.cuda.get_device_properties(rows[0].device)
    row, sums = 2 * D, (2 * warps + 3) * 4 * (16 if R <= 17 else 32) + 256
    whole = int(card.shared_memory_per_multiprocessor) - (1 << 10)
    beside = min(per_processor // warps, whole // (R * row + sums + (1 << 10)))
    if beside < 1:
        return None
    double = min(R, (whole // beside - (1 << 10) - sums) // row - R)
    sizes = {"D": D, "DOUBLE": double, "GROUP": RING["GROUP"], "num_warps": warps}
    sizes["maxnreg"] = min(255, 65536 // (256 * per_processor) * 8)
    return min(T, card.multi_processor_count * beside), sizes


def as_rows(x: Tensor) -> Tensor:
    """Contiguous, and on a border of two numbers, as the kernels read it."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % (2 * x.element_size()) else x


@kernel_operator("openk3::attnres")
def _attnres(
    bank: Sequence[Tensor],
    prefix: Tensor,
    output: Tensor | None,
    query: Tensor,
    key_gain: Tensor,
    norm_gain: Tensor | None,
    lse: Tensor | None,
    eps: float,
    norm_eps: float,
    want_mix: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The mix, its norm, prefix + output, each empty if not asked for; scores and 1 / rms `[T, S, 2]`.

    Sources are the bank's rows and the prefix. With lse the bank is one row, itself a mix of that score.
    """
    (T, d), S = prefix.shape, len(bank) + 1
    rows = [*bank, prefix] if output is None else [*bank, output, prefix]
    mixed, normed, total, scalars = _attnres_outputs(
        prefix, S, want_mix, norm_gain is not None, output is not None
    )
    rows = [as_rows(row) for row in rows]
    vectors = query.contiguous(), key_gain.contiguous(), None if norm_gain is None else norm_gain.contiguous()
    given = tuple(rows), *vectors, None if lse is None else lse.contiguous()
    made = total, mixed, normed, scalars, T, d, eps, norm_eps
    flags = {"ADD": output is not None, "MERGE": lse is not None, "MIX": want_mix, "NORM": len(normed) > 0}
    ring = ring_launch(rows) if T else None
    if ring is not None:
        from openk3.ops.attnres.kernels.one_query_ring import forward_ring

        forward_ring[(ring[0],)](*given, *made, S=S, **flags, **ring[1])
    elif T:
        programs, sizes = launch(d, T, prefix.device, FORWARD["warps"])
        one_query.forward[(programs,)](
            *given, *made, S=S, STAGES=stages(sizes["D"], prefix, norm_gain is not None), **flags,
            maxnreg=FORWARD["maxnreg"], **sizes,
        )  # fmt: skip
    return mixed, normed, total, scalars


def _attnres_outputs(
    prefix: Tensor, S: int, want_mix: bool, want_norm: bool, want_total: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    T, d = prefix.shape
    mixed, normed, total = (
        prefix.new_empty((T, d) if wanted else (0, d)) for wanted in (want_mix, want_norm, want_total)
    )
    return mixed, normed, total, prefix.new_empty(T, S, 2, dtype=torch.float32)


@_attnres.register_fake
def _(
    bank: Sequence[Tensor],
    prefix: Tensor,
    output: Tensor | None,
    query: Tensor,
    key_gain: Tensor,
    norm_gain: Tensor | None,
    lse: Tensor | None,
    eps: float,
    norm_eps: float,
    want_mix: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _attnres_outputs(prefix, len(bank) + 1, want_mix, norm_gain is not None, output is not None)


@kernel_operator("openk3::attnres_backward")
def _attnres_backward(
    sources: Sequence[Tensor],
    query: Tensor,
    key_gain: Tensor,
    norm_gain: Tensor | None,
    scalars: Tensor,
    d_mixed: Tensor | None,
    d_normed: Tensor | None,
    d_bank: Sequence[Tensor],
    d_last: Tensor | None,
    norm_eps: float,
    merge: bool,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor]:
    """Gradients to sources, query, key_gain, norm_gain and lse; the last two empty without their inputs.

    d_bank and d_last reach the sources through later readers and are added to their gradients: the last
    source's, and all others' or none.
    """
    T, d = sources[0].shape
    S = len(sources)
    norm = d_normed is not None
    if d_mixed is None and d_normed is None:
        d_mixed = torch.zeros_like(sources[0])
    direction = query.to(torch.float32) * key_gain.to(torch.float32)
    d_sources = [torch.empty(T, d, dtype=x.dtype, device=x.device) for x in sources]
    d_lse = scalars.new_empty(T if merge else 0)
    rows = tuple(as_rows(x) for x in sources)
    # Gradients to both, the mix and its norm, are rare.
    ring = ring_launch(rows) if T and not (norm and d_mixed is not None) else None
    programs, sizes = launch(d, T, sources[0].device, BACKWARD["warps"]) if ring is None else ring
    d_direction = scalars.new_empty(programs, d)
    d_norm_gain = scalars.new_empty(programs if norm else 0, d)
    if programs:
        dtype = sources[0].dtype
        given = [None if g is None else as_rows(g.to(dtype)) for g in (d_mixed, d_normed)]
        later = [None if g is None else as_rows(g.to(dtype)) for g in (*d_bank, d_last)]
        arguments = (
            rows, tuple(d_sources), direction, None if norm_gain is None else norm_gain.contiguous(), scalars,
            *given, tuple(later[:-1]) or None, later[-1], d_lse, d_direction, d_norm_gain, T, d, norm_eps,
        )  # fmt: skip
        flags = {"MERGE": merge, "NORM": norm, "BANK": bool(d_bank), "LAST": d_last is not None}
        if ring is not None:
            from openk3.ops.attnres.kernels.one_query_ring import backward_ring

            backward_ring[(programs,)](*arguments, S=S, **flags, **sizes)
        else:
            flags["MIX"] = d_mixed is not None
            one_query.backward[(programs,)](*arguments, S=S, AHEAD=ahead(sizes["D"], S), **flags, **sizes)
    d_m = d_direction.sum(0)
    d_gain = d_norm_gain.sum(0).to(norm_gain.dtype) if norm_gain is not None else scalars.new_empty(0)
    return d_sources, (d_m * key_gain).to(query.dtype), (d_m * query).to(key_gain.dtype), d_gain, d_lse


@_attnres_backward.register_fake
def _(
    sources: Sequence[Tensor],
    query: Tensor,
    key_gain: Tensor,
    norm_gain: Tensor | None,
    scalars: Tensor,
    d_mixed: Tensor | None,
    d_normed: Tensor | None,
    d_bank: Sequence[Tensor],
    d_last: Tensor | None,
    norm_eps: float,
    merge: bool,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor]:
    d_sources = [x.new_empty(x.shape) for x in sources]
    d_gain = scalars.new_empty(0) if norm_gain is None else norm_gain.new_empty(norm_gain.shape)
    d_lse = scalars.new_empty(scalars.shape[0] if merge else 0)
    return d_sources, query.new_empty(query.shape), key_gain.new_empty(key_gain.shape), d_gain, d_lse


class _Attnres(torch.autograd.Function):
    """`_attnres` and its gradient, with the sources passed on.

    A later operator that reads what is passed on leaves its gradients to sources here, where they are added
    to this operator's own in the pass that writes those. With a source of many readers, autograd would add
    each one's gradient in a pass of its own. Gradients that come in are read only: autograd may have given
    them to others too. A custom operator could not do it, since its results must not be views of its inputs.
    """

    @staticmethod
    def forward(ctx: Any, output, query, key_gain, norm_gain, lse, eps, norm_eps, want_mix, *sources):
        *bank, prefix = sources
        mixed, normed, total, scalars = torch.ops.openk3.attnres(
            bank, prefix, output, query, key_gain, norm_gain, lse, eps, norm_eps, want_mix
        )
        last = prefix if output is None else total
        ctx.has_output, ctx.has_norm, ctx.merge = output is not None, norm_gain is not None, lse is not None
        ctx.want_mix, ctx.norm_eps = want_mix, norm_eps
        gains = () if norm_gain is None else (norm_gain,)
        ctx.save_for_backward(query, key_gain, scalars, *gains, *bank, last)
        ctx.mark_non_differentiable(scalars)
        if not torch.compiler.is_compiling():  # it does not know this call, and fills in zeros
            ctx.set_materialize_grads(False)
        passed = [row.view_as(row) for row in bank]
        return mixed, normed, scalars, *passed, last.view_as(last) if output is None else last

    @staticmethod
    def backward(ctx: Any, d_mixed, d_normed, _, *d_passed):
        query, key_gain, scalars, *rest = ctx.saved_tensors
        norm_gain, sources = (rest[0], rest[1:]) if ctx.has_norm else (None, rest)
        *d_bank, d_last = d_passed
        if all(g is None for g in d_bank):
            d_bank = []
        else:
            d_bank = [
                torch.zeros_like(x) if g is None else g for g, x in zip(d_bank, sources[:-1], strict=True)
            ]
        d_sources, d_query, d_key_gain, d_norm_gain, d_lse = torch.ops.openk3.attnres_backward(
            sources, query, key_gain, norm_gain, scalars,
            d_mixed if ctx.want_mix else None, d_normed if ctx.has_norm else None,
            d_bank, d_last, ctx.norm_eps, ctx.merge,
        )  # fmt: skip
        return (
            d_sources[-1] if ctx.has_output else None, d_query, d_key_gain,
            d_norm_gain if ctx.has_norm else None, d_lse if ctx.merge else None, None, None, None, *d_sources,
        )  # fmt: skip


def attnres(
    bank: Sequence[Tensor],
    prefix: Tensor,
    output: Tensor | None,
    query: Tensor,
    key_gain: Tensor,
    norm_gain: Tensor | None,
    lse: Tensor | None,
    eps: float,
    norm_eps: float,
    want_mix: bool,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """The mix, its norm and scalars as of `_attnres`; and the sources after the addition, passed on."""
    vectors, sources = (output, query, key_gain, norm_gain, lse), (*bank, prefix)
    if torch.is_grad_enabled():
        if torch.compiler.is_compiling():  # it takes no tensor twice, but two views of one
            given = [x if x is None else x.view_as(x) for x in vectors]
            sources = tuple(x.view_as(x) for x in sources)
        else:
            given = list(vectors)
        mixed, normed, scalars, *passed = _Attnres.apply(*given, eps, norm_eps, want_mix, *sources)
        return mixed, normed, scalars, tuple(passed)
    mixed, normed, total, scalars = torch.ops.openk3.attnres(
        list(bank), prefix, *vectors, eps, norm_eps, want_mix
    )
    return mixed, normed, scalars, (*bank, prefix if output is None else total)


@kernel_operator("openk3::attnres_bank_mixes")
def _bank_mixes(
    bank: Sequence[Tensor], queries: Tensor, key_gains: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    (T, d), Q, S = bank[0].shape, len(queries), len(bank)
    values = bank[0].new_empty(Q, T, d)
    lse = bank[0].new_empty(Q, T, dtype=torch.float32)
    if not T:
        return values, lse
    bank = tuple(as_rows(row) for row in bank)
    # Triton's interpreter multiplies bf16 wrongly.
    split = bank[0].dtype == torch.bfloat16 and bank[0].is_cuda
    QUERIES = max(16, triton.next_power_of_2(Q))
    parts = torch.empty(
        3 if split else 1, QUERIES, d, device=lse.device, dtype=torch.bfloat16 if split else torch.float32
    )
    bank_kernels.directions[(QUERIES, triton.cdiv(d, 1024))](
        queries.contiguous(), key_gains.contiguous(), parts, d, Q, QUERIES=QUERIES, COLUMNS=1024
    )
    TOKENS = min(8, 64 // S)
    tiles = triton.cdiv(T, TOKENS)
    products, squares = (lse.new_empty(tiles, SLICES, 64, n) for n in (QUERIES, 1))
    shape = tiles, TOKENS, 1 if len(parts) == 1 else 2, QUERIES, 16 if S <= 16 else 32
    weights = torch.empty(shape, device=lse.device, dtype=parts.dtype)
    sizes = {"S": S, "QUERIES": QUERIES, "TOKENS": TOKENS, "SLICES": SLICES}
    programs = (tiles * SLICES,)
    bank_kernels.slice_products[programs](bank, parts, products, squares, T, d, Q, 1.0, **sizes, **PRODUCTS)
    bank_kernels.slice_mixes[programs](
        bank, products, squares, weights, values, lse, T, d, Q, eps, **sizes, **MIXES
    )
    return values, lse


@_bank_mixes.register_fake
def _(bank: Sequence[Tensor], queries: Tensor, key_gains: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    T, d = bank[0].shape
    Q = queries.shape[0]
    return bank[0].new_empty(Q, T, d), bank[0].new_empty(Q, T, dtype=torch.float32)


def bank_mixes(
    bank: Sequence[Tensor], queries: Tensor, key_gains: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `openk3.ops.attnres.attnres_bank_mixes`: mixes `[Q, T, d]` and sums `[Q, T]`."""
    mixes: tuple[Tensor, Tensor] = torch.ops.openk3.attnres_bank_mixes(list(bank), queries, key_gains, eps)
    return mixes
