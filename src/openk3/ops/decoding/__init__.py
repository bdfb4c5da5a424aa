"""What stands between the large operators of a decoding step: few rows, so that launches are what costs.

Each operator here is several of the model's in one launch: the mix of a stream with its norm and all products
that read it; two products into the stream with their norm, unit or gate; the router's choice with its
weights; a latent's norm with its way into the cache. All are forward only, write where they are told, and
never look at a value from the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from openk3.errors import InvalidInput
from openk3.ops.activation import Activation
from openk3.ops.decoding.checks import (
    check_experts,
    check_into,
    check_lists,
    check_places,
    check_rows,
    check_vectors,
)
from openk3.ops.decoding.tokens import MOST_LIKELY, most_likely
from openk3.ops.dispatch import NOWHERE, Implementation, Kernel, choose
from openk3.ops.inputs import check_floating
from openk3.ops.precision import own_dtypes

__all__ = [
    "ExpertLists",
    "Joined",
    "StreamMix",
    "append_latents",
    "choose_experts",
    "expert_sums",
    "experts_into",
    "mixed_products",
    "most_likely",
    "products",
    "products_into",
    "start_step",
]

KERNELS = tuple(
    Kernel(function, takes=takes, checked_on="H200 (sm_90)")
    for function, takes in (
        ("mixed_products", "even widths to 8,192, up to 32 sources; bf16, fp16 or fp32"),
        ("products", "any widths; bf16, fp16 or fp32"),
        ("products_into", "any widths; bf16, fp16 or fp32"),
        ("choose_experts", "float32 logits of up to 4,096 experts"),
        ("expert_sums", "experts of widths to 4,096, stacked and contiguous; bf16, fp16 or fp32"),
        ("append_latents", "latents of up to 8,192; bf16, fp16 or fp32"),
        ("start_step", "any width; not float64"),
    )
)
CHECKED = all(kernel.checked for kernel in KERNELS)
TOGETHER = Kernel("experts_into", takes="as expert_sums and products_into", checked_on=NOWHERE)
KERNELS += (TOGETHER, MOST_LIKELY)
WIDEST = 8192
FEW = 4  # rows that each program of a product prepares again, and that go to experts one by one
BLOCK = 16  # outputs of a program at least: what a matrix unit takes

Tensor = torch.Tensor


@dataclass(frozen=True)
class Joined:
    """Matrices `[width, d]` of one input, below each other.

    matrix: `[rows, d]`; each matrix begins at a multiple of 16 rows, the rest is zero.
    widths: of the outputs. precise: whether the last output is wanted in at least fp32.
    blocks: int32 `[rows / 16, 4]`: of each block of rows the widths of all outputs of its dtype before its
    own, its own width, its first column there, and whether it belongs to the precise one.
    """

    matrix: Tensor
    widths: tuple[int, ...]
    precise: bool
    blocks: Tensor

    @classmethod
    def of(cls, *weights: Tensor, precise: Tensor | None = None) -> Joined:
        """Copies of `weights`, and of one more whose output is wanted in at least fp32."""
        matrices = list(weights) if precise is None else [*weights, precise]
        first, before = matrices[0], 0
        parts: list[Tensor] = []
        blocks: list[list[int]] = []
        for index, matrix in enumerate(matrices):
            width, last = len(matrix), index == len(weights)
            parts += [matrix, first.new_zeros(-width % BLOCK, first.shape[1])]
            start = 0 if last else before
            blocks += [[start, width, column, int(last)] for column in range(0, width, BLOCK)]
            before += width
        table = torch.tensor(blocks, dtype=torch.int32, device=first.device)
        widths = tuple(len(matrix) for matrix in matrices)
        return cls(torch.cat(parts), widths, precise is not None, table)


class StreamMix(NamedTuple):
    """How a sublayer reads the stream; query and key_gain `[d]` and eps are those of `attnres_mix`."""

    query: Tensor
    key_gain: Tensor
    eps: float


@own_dtypes
def mixed_products(
    bank: Tensor,
    mix: StreamMix | None,
    gain: Tensor,
    eps: float,
    joined: Joined,
    *,
    implementation: Implementation | None = None,
) -> list[Tensor]:
    """W norm(mix of the bank) for each matrix W of `joined`.

    Args:
        bank: `[S, n, d]` sources of n rows, contiguous, one after the other.
        mix: see `attnres_mix`; None where there is one source, which is read as it is.
        gain, eps: of the RMSNorm, `[d]`.
        joined: in the bank's dtype.
        implementation: force "eager" or "triton"; by default the fastest that a card has run.

    Returns:
        `[n, width]` for each matrix, each contiguous, in the bank's dtype; a precise one in at least fp32,
        from products of the numbers as they are.

    Raises:
        InvalidInput: shapes do not fit.
        KernelUnavailable: the forced implementation cannot run here.
    """
    name = "mixed_products"
    if bank.dim() != 3 or not bank.is_contiguous() or joined.matrix.shape[1] != bank.shape[2]:
        raise InvalidInput(
            f"{name}: bank must be [S, n, {joined.matrix.shape[1]}], contiguous, got {tuple(bank.shape)}"
        )
    if mix is None and len(bank) != 1:
        raise InvalidInput(f"{name}: {len(bank)} sources are mixed by a query, got none")
    check_rows(name, bank, joined.matrix)
    check_vectors(name, bank.shape[2], gain, *(mix[:2] if mix is not None else ()))
    fits = bank.shape[2] <= WIDEST and not bank.shape[2] % 2 and len(bank) <= 32
    if choose(name, bank, implementation, kernels=fits, by_default=CHECKED) == "triton":
        from openk3.ops.decoding.kernels.products import mixed_products as run
    else:
        from openk3.ops.decoding.eager import mixed_products as run
    return run(bank, mix, gain, eps, joined)


@own_dtypes
def products(x: Tensor, joined: Joined, *, implementation: Implementation | None = None) -> list[Tensor]:
    """`mixed_products` of rows x `[n, d]`, contiguous, that are mixed and normed already."""
    if x.dim() != 2 or not x.is_contiguous() or joined.matrix.shape[1] != x.shape[1]:
        raise InvalidInput(
            f"products: x must be [n, {joined.matrix.shape[1]}], contiguous, got {tuple(x.shape)}"
        )
    check_rows("products", x, joined.matrix)
    if choose("products", x, implementation, by_default=CHECKED) == "triton":
        from openk3.ops.decoding.kernels.products import products as run
    else:
        from openk3.ops.decoding.eager import products as run
    return run(x, joined)


@own_dtypes
def products_into(
    out: Tensor,
    weight: Tensor,
    x: Tensor | None,
    *,
    add: bool,
    norm: tuple[Tensor, float] | None = None,
    gate: Tensor | None = None,
    unit: tuple[Tensor, Tensor, Activation] | None = None,
    implementation: Implementation | None = None,
) -> None:
    """out (+)= weight [f(x); act(gate, up)], rounded once before the addition.

    Args:
        out: `[n, d]`, contiguous, in the dtype of all.
        weight: `[d, a + b]`, contiguous.
        x: `[n, a]`, contiguous, or None with a = 0.
        add: to what `out` holds; otherwise in its place.
        norm: gain `[a]` and eps of an RMSNorm, if f is one.
        gate: `[n, a]` logits, if f is x * sigmoid(gate); not with a norm.
        unit: gate and up, each `[n, b]` contiguous, and the gated unit; None with b = 0.
        implementation: as in `mixed_products`.

    Raises:
        InvalidInput: shapes do not fit.
        KernelUnavailable: the forced implementation cannot run here.
    """
    name = "products_into"
    check_into(name, out, weight, x, norm, gate, unit)
    if choose(name, out, implementation, by_default=CHECKED) == "triton":
        from openk3.ops.decoding.kernels.products import products_into as run
    else:
        from openk3.ops.decoding.eager import products_into as run
    run(out, weight, x, add, norm, gate, unit)


class ExpertLists(NamedTuple):
    """Which rows go to an expert, for kernels that read an expert once for all its rows.

    rows: int32 `[E, n]`; of an expert's assignments (row * k + slot) the first `counts` count, in any order.
    counts: int32 `[E]`.
    """

    rows: Tensor
    counts: Tensor


@own_dtypes
def choose_experts(
    logits: Tensor,
    bias: Tensor,
    k: int,
    *,
    scaling_factor: float = 1.0,
    renormalize: bool = True,
    lists: ExpertLists | None = None,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor]:
    """The ids `[n, k]` int64 and weights `[n, k]` of `openk3.ops.moe.route`, whose arguments these are.

    lists: to be filled on the way; their counts are zero before.
    """
    if logits.dim() != 2 or bias.shape != logits.shape[1:] or not 1 <= k <= len(bias):
        raise InvalidInput(
            f"choose_experts: logits are {tuple(logits.shape)}, bias is {tuple(bias.shape)} and k is {k}; "
            "want [n, E], [E] and 1 to E"
        )
    check_floating("choose_experts", logits=logits, bias=bias)
    if lists is not None:
        check_lists("choose_experts", lists, *logits.shape)
    fits = logits.dtype == bias.dtype == torch.float32 and logits.shape[1] <= 4096
    if choose("choose_experts", logits, implementation, kernels=fits, by_default=CHECKED) == "triton":
        from openk3.ops.decoding.kernels import experts

        given = logits, bias, k, scaling_factor, renormalize
        if lists is None:
            ids, weights = experts.choose_experts(*given)
        else:
            ids, weights = experts.choose_and_list_experts(*given, *lists)
        return ids, weights
    from openk3.ops.decoding import eager

    ids, weights = eager.choose_experts(logits, bias, k, scaling_factor, renormalize)
    if lists is not None:
        eager.list_experts(ids, *lists)
    return ids, weights


@own_dtypes
def expert_sums(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    activation: Activation,
    *,
    implementation: Implementation | None = None,
) -> Tensor:
    """sum_s weights_s E_ids_s(x) of each row, as `expert_ffn`, without a plan.

    Args:
        x: `[n, l]`, contiguous. weights: `[n, k]`, at least fp32.
        ids: int64 `[n, k]`, no expert twice in a row; not checked.
        w1, w3: `[E, F, l]`, w2: `[E, l, F]`, in x's dtype.
        activation: the gated unit.
        implementation: as in `mixed_products`. Kernels read an expert once for all its rows, or of up to 4
            rows once for each.

    Returns:
        `[n, l]` in x's dtype, summed in at least fp32.

    Raises:
        InvalidInput: shapes do not fit.
        KernelUnavailable: the forced implementation cannot run here.
    """
    fits = check_experts("expert_sums", x, ids, weights, w1, w3, w2)
    if choose("expert_sums", x, implementation, kernels=fits, by_default=CHECKED) == "triton":
        from openk3.ops.decoding.kernels.experts import expert_sums as run
    else:
        from openk3.ops.decoding.eager import expert_sums as run
    return run(x, ids, weights, w1, w3, w2, activation)


@own_dtypes
def experts_into(
    out: Tensor,
    weight: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    activation: Activation,
    *,
    add: bool,
    norm: tuple[Tensor, float] | None = None,
    shared: tuple[Tensor, Tensor] | None = None,
    lists: ExpertLists | None = None,
    implementation: Implementation | None = None,
) -> None:
    """`products_into` of `expert_sums`, in one operator: sums stay in fp32 up to their norm.

    Args:
        out, weight, add, norm: as in `products_into`, of which the sums are x.
        x, ids, weights, w1, w3, w2, activation: as in `expert_sums`.
        shared: gate and up of a unit beside the sums, of the same activation, each `[n, b]` contiguous.
        lists: of these ids, as `choose_experts` has filled them; not checked.
        implementation: as in `mixed_products`. Where no card has checked the operator, the two that it
            consists of run.

    Raises:
        InvalidInput: shapes do not fit.
        KernelUnavailable: the forced implementation cannot run here.
    """
    name = "experts_into"
    fits = check_experts(name, x, ids, weights, w1, w3, w2)
    unit = None if shared is None else (*shared, activation)
    check_into(name, out, weight, x, norm, None, unit)
    if lists is not None:
        check_lists(name, lists, len(x), len(w1))
    if choose(name, x, implementation, kernels=fits, by_default=TOGETHER.checked) == "triton":
        from openk3.ops.decoding.kernels.many import experts_into as run

        run(out, weight, x, ids, weights, w1, w3, w2, activation, add, norm, shared, lists)
        return
    u = expert_sums(x, ids, weights, w1, w3, w2, activation, implementation=implementation)
    products_into(out, weight, u, add=add, norm=norm, unit=unit, implementation=implementation)


@own_dtypes
def append_latents(
    compressed: Tensor,
    gain: Tensor,
    eps: float,
    latents: Tensor,
    places: Tensor,
    seen: Tensor,
    *,
    implementation: Implementation | None = None,
) -> None:
    """latents[places, seen] = the RMSNorm of the first columns, then the others as they are.

    Args:
        compressed: `[n, r + shared]`, contiguous.
        gain, eps: of the norm, `[r]`.
        latents: `[slots, length, r + shared]`, contiguous, in compressed's dtype. What would lie behind the
            end of a slot is written at its end.
        places, seen: int64 `[n]`.
        implementation: as in `mixed_products`.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit.
        KernelUnavailable: the forced implementation cannot run here.
    """
    name = "append_latents"
    check_floating(name, compressed=compressed, gain=gain, latents=latents)
    if compressed.dim() != 2 or latents.dim() != 3 or latents.shape[2] != compressed.shape[1]:
        raise InvalidInput(
            f"{name}: compressed is {tuple(compressed.shape)} and latents are {tuple(latents.shape)}; "
            "want [n, r + shared] and [slots, length, r + shared]"
        )
    if not compressed.is_contiguous() or not latents.is_contiguous() or compressed.dtype != latents.dtype:
        raise InvalidInput(
            f"{name}: compressed and latents must be contiguous and of one dtype, got {compressed.dtype} "
            f"and {latents.dtype}"
        )
    check_vectors(name, min(gain.numel(), compressed.shape[1]), gain)
    check_places(name, compressed, torch.int64, places=places, seen=seen)
    fits = compressed.shape[1] <= WIDEST
    if choose("append_latents", compressed, implementation, kernels=fits, by_default=CHECKED) == "triton":
        from openk3.ops.decoding.kernels import rows

        rows.append_latents(compressed, gain, eps, latents, places, seen)
    else:
        from openk3.ops.decoding import eager

        eager.append_latents(compressed, gain, eps, latents, places, seen)


def start_step(
    tokens: Tensor,
    slots: Tensor,
    embedding: Tensor,
    lengths: Tensor,
    out: Tensor,
    *,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Embeds a token of each row into `out`, and counts it in its slot.

    Args:
        tokens: int64 `[n]`. slots: int32 `[n]`, no slot twice, -1 for none.
        embedding: `[V, d]`. out: `[n, d]`, contiguous, in its dtype.
        lengths: int64 `[slots + 1]`, the last for rows of no slot, which are not counted.
        implementation: as in `mixed_products`.

    Returns:
        places int64 `[n]`, each row's slot or the last place of `lengths`; seen int64 `[n]`, the tokens
        there before this one; filled int32 `[n]`, those with it, 0 for rows of no slot.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit.
        KernelUnavailable: the forced implementation cannot run here.
    """
    name = "start_step"
    check_floating(name, embedding=embedding, out=out)
    if embedding.dim() != 2 or out.dim() != 2 or out.shape[1] != embedding.shape[1]:
        raise InvalidInput(
            f"{name}: embedding is {tuple(embedding.shape)} and out is {tuple(out.shape)}; want [V, d] [n, d]"
        )
    if not embedding.is_contiguous() or not out.is_contiguous() or embedding.dtype != out.dtype:
        raise InvalidInput(
            f"{name}: embedding and out must be contiguous and of one dtype, got {embedding.dtype} and "
            f"{out.dtype}"
        )
    check_places(name, out, torch.int64, tokens=tokens)
    check_places(name, out, torch.int32, slots=slots)
    if lengths.dim() != 1 or not len(lengths) or lengths.dtype != torch.int64 or lengths.device != out.device:
        raise InvalidInput(
            f"{name}: lengths must be int64 [slots + 1] on {out.device}, got {lengths.dtype} "
            f"{tuple(lengths.shape)} on {lengths.device}"
        )
    if choose("start_step", out, implementation, by_default=CHECKED) == "triton":
        from openk3.ops.decoding.kernels import rows

        places, seen, filled = rows.start_step(tokens, slots, embedding, lengths, out)
        return places, seen, filled
    from openk3.ops.decoding import eager

    return eager.start_step(tokens, slots, embedding, lengths, out)
