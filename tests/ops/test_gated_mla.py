"""Gated MLA between its projections, in plain PyTorch: shared key, output gate, one rounding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_attention import PACKINGS, offsets, one_query_at_a_time

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.attention import gated_mla

NAMES = ("q", "kv", "shared", "gate")


def draw(pairs, H=2, K=16, S=16, V=16, dtype=torch.float32, gated=True) -> dict[str, Any]:
    """q, kv, shared, gate; logits spread wide enough for a peaked softmax."""
    make = torch.Generator().manual_seed(len(pairs))
    n_q, n_k = (sum(lengths) for lengths in zip(*pairs, strict=True)) if pairs else (0, 0)
    shapes = (n_q, H, K + S), (n_k, H, K + V), (n_k, S), (n_q, H, V)
    drawn = [torch.randn(shape, generator=make) for shape in shapes]
    drawn[0] *= 2
    inputs = dict(zip(NAMES, (x.to(dtype) for x in drawn), strict=True))
    return inputs if gated else inputs | {"gate": None}


def packed(pairs) -> tuple[torch.Tensor, torch.Tensor]:
    return offsets([n for n, _ in pairs]), offsets([n for _, n in pairs])


def results(function, inputs, pairs, d_y=None, **options) -> dict[str, torch.Tensor]:
    """y, the largest logits, and the gradients of a fixed projection of y."""
    own = {n: None if x is None else x.detach().requires_grad_() for n, x in inputs.items()}
    y, largest = function(**own, cu_seqlens_q=packed(pairs)[0], cu_seqlens_k=packed(pairs)[1], **options)
    if d_y is None:
        d_y = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    leaves = {n: x for n, x in own.items() if x is not None}
    gradients = torch.autograd.grad(y, list(leaves.values()), d_y)
    named = dict(zip((f"d_{n}" for n in leaves), gradients, strict=True))
    return {"y": y.detach(), "largest": largest.detach()} | named


def by_definition(q, kv, shared, gate, cu_seqlens_q, cu_seqlens_k, scale=None, **_):
    """sigmoid(gate) o, one query at a time in float64, the shared part repeated for every head."""
    q, kv, shared = q.double(), kv.double(), shared.double()
    K = q.shape[2] - shared.shape[1]
    k = torch.cat([kv[..., :K], shared[:, None].repeat(1, kv.shape[1], 1)], 2)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    o, largest = one_query_at_a_time(q, k, kv[..., K:], cu_seqlens_q, cu_seqlens_k, scale)
    return o if gate is None else o * gate.double().sigmoid(), largest


def assert_agree(actual, expected, limit: float) -> None:
    assert actual.keys() == expected.keys()
    for name, oracle in expected.items():
        if name == "largest":
            torch.testing.assert_close(actual[name].double(), oracle, rtol=10 * limit, atol=0)
        else:
            # A query with one key has no choice: its exact gradient is zero.
            error = float((actual[name].double() - oracle.double()).norm())
            assert error < limit * max(1.0, float(oracle.double().norm())), name


@pytest.mark.parametrize("implementation", ["reference", "eager"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("packing", ["ragged", "cached prefixes", "nothing to see"])
def test_output_gradients_and_largest_logit_equal_the_definition(implementation, gated, packing):
    pairs = PACKINGS[packing]
    inputs = draw(pairs, K=12, S=4, V=8, dtype=torch.float64, gated=gated)
    actual = results(gated_mla, inputs, pairs, return_max_logit=True, implementation=implementation)
    assert_agree(actual, results(by_definition, inputs, pairs), limit=1e-13)


def test_half_precision_is_rounded_once():
    pairs = [(30, 30)]
    inputs = {n: x.bfloat16() for n, x in draw(pairs).items()}
    y, largest = gated_mla(**inputs, cu_seqlens_q=packed(pairs)[0], cu_seqlens_k=packed(pairs)[1])
    exact, _ = by_definition(**inputs, cu_seqlens_q=packed(pairs)[0], cu_seqlens_k=packed(pairs)[1])
    assert largest is None
    # All but ties: fp32 rarely decides differently.
    assert (y != exact.bfloat16()).float().mean() < 0.01


def test_wrong_inputs_are_named():
    pairs = [(3, 5), (2, 2)]
    inputs, (cu_q, cu_k) = draw(pairs), packed(pairs)
    with pytest.raises(InvalidInput, match=r"q and kv must be \[T, H, D\]"):
        gated_mla(**inputs | {"shared": inputs["kv"]}, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    with pytest.raises(InvalidInput, match="tokens of kv and shared"):
        gated_mla(**inputs | {"shared": inputs["shared"][1:]}, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    with pytest.raises(InvalidInput, match=r"gate must be \[Tq, H, V\] = \(5, 2, 16\), got \(5, 2, 15\)"):
        gated_mla(**inputs | {"gate": inputs["gate"][..., 1:]}, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    for scale in (-1.0, math.nan, math.inf):
        with pytest.raises(InvalidInput, match=f"scale must be positive and finite, got {scale}"):
            gated_mla(**inputs, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, scale=scale)
    with pytest.raises(InvalidInput, match=r"cu_seqlens_k must go from 0 to the 7 tokens, got 0 to 5"):
        gated_mla(**inputs, cu_seqlens_q=cu_q, cu_seqlens_k=cu_q)
    with pytest.raises(InvalidInput, match="inputs must be floating point"):
        gated_mla(**inputs | {"gate": inputs["gate"].long()}, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("K", "S", "V"), [(16, 16, 16), (128, 64, 128), (24, 16, 16), (16, 0, 16), (16, 16, 256)]
)
def test_kernels_take_what_they_declare(K, S, V, dtype):
    from openk3.ops.attention import KERNELS, gated

    takes = "K, shared and V in {16, 32, 64, 128}, one of bf16, fp16 or fp32 for all"
    assert KERNELS[0].takes == takes
    inputs = draw([(2, 2)], K=K, S=S, V=V, dtype=dtype)
    taken = {K, S, V} <= {16, 32, 64, 128} and dtype != torch.float64
    assert (gated._kernel_problem(**inputs) is None) == taken
    assert gated._kernel_problem(**inputs | {"gate": inputs["gate"].double()}) is not None
    if not taken:
        cu_q, cu_k = packed([(2, 2)])
        with pytest.raises(KernelUnavailable, match="the kernels take"):
            gated_mla(**inputs, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, implementation="triton")
