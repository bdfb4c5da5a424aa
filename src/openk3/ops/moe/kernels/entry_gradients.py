"""The gradients of a mixture's entry, by two of cuBLAS's products.

    spread     [D_high | D_low | dZ], `[T, 2 E + l]`: the two bf16 terms of D, and the latent's gradient
    input      dX = that [W_r; W_r; W_d]
    weights    [dW_r; dW_r; dW_d] = that^T x in fp32, of which the first two are added

D `[T, E]`, the gradient of the logits, is zero but for the k chosen experts of a token. Two bf16 terms are
within 2^-16 of its fp32 values. To write it once and read it twice costs less than to make a tile of it in
registers for every tile of a product.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import"
from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

SPREAD = {"SIZE": 4096, "num_warps": 4}  # logits of a program


@triton.jit
def _terms(value, like):
    """`value` as the sum of two numbers of the dtype that `like` points to; fp32 needs one."""
    high = value.to(like)
    return high, (value - high.to(tl.float32)).to(like)


@triton.jit(do_not_specialize=["T"])
def _spread(
    ids, values, d_latent, terms, T, E, L,
    k: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    value = tl.zeros([TOKENS, EXPERTS], tl.float32)
    for s in tl.static_range(k):
        chosen = tl.load(ids + t * k + s, mask=t < T, other=-1).to(tl.int32)
        own = tl.load(values + t * k + s, mask=t < T, other=0.0)
        value = tl.where(chosen[:, None] == e[None, :], own[:, None], value)
    high, low = _terms(value, terms.dtype.element_ty)
    row = terms + t[:, None] * (2 * E + L)
    inside = (t < T)[:, None] & (e < E)[None, :]
    tl.store(row + e[None, :], high, mask=inside)
    tl.store(row + E + e[None, :], low, mask=inside)
    for first in range(0, L, COLUMNS):
        c = first + tl.arange(0, COLUMNS)
        there = (t < T)[:, None] & (c < L)[None, :]
        part = tl.load(d_latent + t[:, None] * L + c[None, :], mask=there)
        tl.store(row + 2 * E + c[None, :], part, mask=there)


def spread(ids: Tensor, values: Tensor, d_latent: Tensor, experts: int) -> Tensor:
    """`[T, 2 E + l]` in d_latent's dtype, of `ids` int64 and `values` fp32 `[T, k]` and `d_latent [T, l]`."""
    (T, k), L = ids.shape, d_latent.shape[1]
    terms = d_latent.new_empty(T, 2 * experts + L)
    if T:
        EXPERTS = max(32, triton.next_power_of_2(experts))
        TOKENS = max(1, SPREAD["SIZE"] // EXPERTS)
        _spread[(triton.cdiv(T, TOKENS),)](
            ids, values, d_latent, terms, T, experts, L, k=k, TOKENS=TOKENS, EXPERTS=EXPERTS,
            COLUMNS=min(256, triton.next_power_of_2(max(16, L))), num_warps=SPREAD["num_warps"],
        )  # fmt: skip
    return terms


def _fp32_product(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def gradients(
    ids: Tensor, values: Tensor, d_latent: Tensor, x: Tensor, router: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dX `[T, d]`, dW_r `[E, d]`, dW_d `[l, d]` in x's dtype."""
    E = len(router)
    terms = spread(ids, values, d_latent, E)
    d_x = terms @ torch.cat([router, router, down])
    high, low, d_down = _fp32_product(terms.T, x).split([E, E, len(down)])
    return d_x, (high + low).to(x.dtype), d_down.to(x.dtype)
