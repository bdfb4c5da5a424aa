"""What products in Triton with the softmax in their epilogue would take, in place of logits in memory.

    PYTHONPATH=src python bench/cross_entropy_lab.py

The two kernels of design C of LOG.md ("Linear cross-entropy"), for 131,072 tokens of width 512 and 163,840
entries in bf16. `row_sums`: the log-sum-exp of every row of hidden weight^T, nothing of size tokens x entries
being written. `gradient`: the product again, and softmax minus one-hot from it, in bf16, over chunks of 8,192
tokens. Beside them the product alone by cuBLAS, logits in bf16. Correct first, then times by tile.
"""

# mypy: ignore-errors
from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from gpu_timing import milliseconds
from triton.tools.tensor_descriptor import TensorDescriptor

T, D, V, CHUNK = 131072, 512, 163840, 8192
# Tokens, entries and width of a tile, stages, warps.
TILES = [
    (128, 256, 64, 3, 8),
    (128, 256, 64, 4, 8),
    (128, 128, 64, 2, 4),
    (128, 128, 64, 3, 4),
    (128, 128, 64, 4, 8),
    (64, 256, 64, 3, 4),
    (128, 128, 128, 2, 4),
    (256, 128, 64, 3, 8),
]
SLICES = 8  # of the vocabulary: a program takes one for a block of tokens
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_sums(
    hidden, weight, largest_out, total_out, T, V, D: tl.constexpr, SLICES: tl.constexpr,
    TOKENS: tl.constexpr, ENTRIES: tl.constexpr, WIDTH: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Largest logit of a slice of the vocabulary, and sum of exp2((z - largest) log2 e), `[SLICES, T]`.

    Programs that run together share a slice, whose 21 MB the L2 holds.
    """
    blocks = tl.cdiv(T, TOKENS)
    row = (tl.program_id(0) % blocks) * TOKENS
    part = tl.program_id(0) // blocks
    entries = tl.cdiv(tl.cdiv(V, SLICES), ENTRIES) * ENTRIES
    first = part * entries
    last = tl.minimum(first + entries, V)
    largest = tl.full([TOKENS], -1.0e38, tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    for entry in tl.range(first, last, ENTRIES, flatten=FLATTEN):
        z = tl.zeros([TOKENS, ENTRIES], tl.float32)
        for k in range(0, D, WIDTH):
            z = tl.dot(hidden.load([row, k]), weight.load([entry, k]).T, z)
        z *= LOG2_E
        if entry + ENTRIES > last:
            z = tl.where((entry + tl.arange(0, ENTRIES) < last)[None, :], z, float("-inf"))
        higher = tl.maximum(largest, tl.max(z, 1))
        total = total * tl.exp2(largest - higher) + tl.sum(tl.exp2(z - higher[:, None]), 1)
        largest = higher
    i = row + tl.arange(0, TOKENS)
    place = part.to(tl.int64) * T + i
    tl.store(largest_out + place, largest, mask=i < T)
    tl.store(total_out + place, total, mask=i < T)


@triton.jit
def gradient(
    hidden, weight, log_sums, columns, out, T, V, D: tl.constexpr, SLICES: tl.constexpr,
    TOKENS: tl.constexpr, ENTRIES: tl.constexpr, WIDTH: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """exp2(z log2 e - log_sums), less 1 in each row's column; a row of log_sums = inf is zeros."""
    blocks = tl.cdiv(T, TOKENS)
    row = (tl.program_id(0) % blocks) * TOKENS
    part = tl.program_id(0) // blocks
    entries = tl.cdiv(tl.cdiv(V, SLICES), ENTRIES) * ENTRIES
    first = part * entries
    last = tl.minimum(first + entries, V)
    i = row + tl.arange(0, TOKENS)
    log_sum = tl.load(log_sums + i, mask=i < T, other=0.0)
    column = tl.load(columns + i, mask=i < T, other=-1)
    for entry in tl.range(first, last, ENTRIES, flatten=FLATTEN):
        z = tl.zeros([TOKENS, ENTRIES], tl.float32)
        for k in range(0, D, WIDTH):
            z = tl.dot(hidden.load([row, k]), weight.load([entry, k]).T, z)
        p = tl.exp2(z * LOG2_E - log_sum[:, None])
        p = tl.where((entry + tl.arange(0, ENTRIES))[None, :] == column[:, None], p - 1.0, p)
        out.store([row, entry], p.to(out.dtype))


def softmax_gradient(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    log_sums: torch.Tensor,
    columns: torch.Tensor,
    out: torch.Tensor,
    tile: tuple[int, ...],
    flatten: bool,
) -> None:
    """`out` `[T, V]` from int32 columns and fp32 log-sum-exps in units of log 2, `[T]` each."""
    tokens, entries, width, stages, warps = tile
    gradient[(triton.cdiv(len(hidden), tokens) * SLICES,)](
        TensorDescriptor.from_tensor(hidden, [tokens, width]),
        TensorDescriptor.from_tensor(weight, [entries, width]),
        log_sums, columns, TensorDescriptor.from_tensor(out, [tokens, entries]),
        len(hidden), len(weight), D=hidden.shape[1], SLICES=SLICES,
        TOKENS=tokens, ENTRIES=entries, WIDTH=width, FLATTEN=flatten,
        num_stages=stages, num_warps=warps,
    )  # fmt: skip


def log_sum_exp(
    hidden: torch.Tensor, weight: torch.Tensor, tile: tuple[int, ...], flatten: bool
) -> torch.Tensor:
    """Of every row of hidden `[T, d]` weight `[V, d]`^T, fp32 `[T]`; d a multiple of the tile's width."""
    tokens, entries, width, stages, warps = tile
    largest, total = hidden.new_empty(2, SLICES, len(hidden), dtype=torch.float32)
    row_sums[(triton.cdiv(len(hidden), tokens) * SLICES,)](
        TensorDescriptor.from_tensor(hidden, [tokens, width]),
        TensorDescriptor.from_tensor(weight, [entries, width]),
        largest, total, len(hidden), len(weight), D=hidden.shape[1], SLICES=SLICES,
        TOKENS=tokens, ENTRIES=entries, WIDTH=width, FLATTEN=flatten,
        num_stages=stages, num_warps=warps,
    )  # fmt: skip
    top = largest.amax(0)
    return (top + (total * (largest - top).exp2()).sum(0).log2()) / LOG2_E.value


def draw(tokens: int, width: int, vocabulary: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden and weight whose logits are of size 4."""
    return tuple(2 * torch.randn(n, width, device=device) / width**0.25 for n in (tokens, vocabulary))


def by_cublas(hidden: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor) -> None:
    for start in range(0, len(hidden), CHUNK):
        torch.mm(hidden[start : start + CHUNK], weight.T, out=logits)


def attempt(name: str, call: Callable[[], str]) -> None:
    try:
        print(f"{name}: {call()}", flush=True)
    except Exception as failure:  # noqa: BLE001
        print(f"{name} failed: {type(failure).__name__}: {str(failure)[:200]}", flush=True)


def main() -> int:
    if not torch.cuda.is_available():
        print("bench/cross_entropy_lab.py needs a CUDA device")
        return 0
    flops = 2 * T * D * V
    small = [x.bfloat16() for x in draw(300, D, 50008, "cuda")]
    z = small[0].double() @ small[1].double().T
    exact = z.logsumexp(1)
    columns = torch.arange(T, device="cuda", dtype=torch.int32) * 7 % 50008
    exact_gradient = z.softmax(1)
    exact_gradient[torch.arange(300), columns[:300].long()] -= 1
    small_out = small[0].new_empty(300, 50008)
    hidden, weight = (x.bfloat16() for x in draw(T, D, V, "cuda"))
    logits, log_sums = hidden.new_empty(CHUNK, V), torch.full((T,), 20.0, device="cuda")

    def timed(call: Callable[[], object]) -> str:
        time = milliseconds(call, 1, 300)
        return f"{time:.1f} ms, {flops / time / 1e9:.0f} TFLOP/s"

    def sums(tile: tuple[int, ...], flatten: bool) -> str:
        error = float((log_sum_exp(*small, tile, flatten) - exact).abs().max())
        return f"{timed(lambda: log_sum_exp(hidden, weight, tile, flatten))}, error {error:.1e} nats"

    def gradients(tile: tuple[int, ...], flatten: bool) -> str:
        softmax_gradient(*small, (exact * LOG2_E.value).float(), columns, small_out, tile, flatten)
        error = float((small_out.double() - exact_gradient).norm() / exact_gradient.norm())

        def all_chunks() -> None:
            for start in range(0, T, CHUNK):
                part = slice(start, start + CHUNK)
                softmax_gradient(hidden[part], weight, log_sums[part], columns[part], logits, tile, flatten)

        return f"{timed(all_chunks)}, error {error:.1e}"

    attempt("cuBLAS, logits in bf16", lambda: timed(lambda: by_cublas(hidden, weight, logits)))
    for run in (sums, gradients):
        for tile in TILES:
            for flatten in (True, False):
                attempt(f"{run.__name__} {tile} flatten {flatten}", partial(run, tile, flatten))
    return 0


if __name__ == "__main__":
    sys.exit(main())
