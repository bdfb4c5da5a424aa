"""Operators on a card that is not the current one. Needs two.

Run with `pytest -m gpu tests/gpu/test_second_card_on_gpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from openk3.ops.activation import Activation
from openk3.ops.attnres import attnres_mix
from openk3.ops.cross_entropy import linear_cross_entropy
from openk3.ops.kda import MixerWeights, gated_kda, kda_decode
from openk3.ops.moe import expert_ffn, plan
from openk3.ops.norm import rms_norm
from openk3.ops.short_conv import short_conv
from openk3.ops.situ import situ_glu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

T, H, K = 130, 2, 128


def _kda(draw: Callable[..., torch.Tensor], cu_seqlens: torch.Tensor) -> torch.Tensor:
    q, k, v, z = (draw(T, H, K).bfloat16() for _ in range(4))
    raw = q, k, v, z, draw(T, H).bfloat16(), draw(H), draw(H, K), cu_seqlens
    return gated_kda(*raw, implementation="triton")[0]


@torch.no_grad()
def _decode(draw: Callable[..., torch.Tensor], _: torch.Tensor) -> torch.Tensor:
    weights = MixerWeights(draw(4, 3 * H * K), draw(H), draw(H, K), draw(K), 1e-6, -5.0)
    tokens = [draw(2, *shape).bfloat16() for shape in ((3 * H * K,), (H, K), (H,), (H, K))]
    state, tail = draw(2, H, K, K).clone(), draw(2, 3, 3 * H * K).bfloat16()
    slots = torch.arange(2, dtype=torch.int32, device=state.device)
    return kda_decode(*tokens, state, tail, slots, weights, implementation="triton")


def _cross_entropy(draw: Callable[..., torch.Tensor], _: torch.Tensor) -> torch.Tensor:
    hidden, weight = draw(T, K).bfloat16(), draw(512, K).bfloat16()
    targets = torch.arange(T, device=hidden.device)
    return linear_cross_entropy(hidden, weight, targets, implementation="triton")[0]


def _experts(draw: Callable[..., torch.Tensor], _: torch.Tensor) -> torch.Tensor:
    x, logits, weights = draw(T, K).bfloat16(), draw(T, 8), draw(T, 2)
    routed = plan(logits.topk(2).indices, 8, implementation="triton")
    w1, w3, w2 = (draw(8, K, K).bfloat16() for _ in range(3))
    return (
        expert_ffn(x, weights, routed, w1, w3, w2, Activation("swiglu"), implementation="triton")
        + 0.0 * logits.sum()
    )


OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "kda": _kda,
    "kda_decode": _decode,
    "short_conv": lambda draw, cu: short_conv(
        draw(T, 64).bfloat16(), draw(64, 4), cu, implementation="triton"
    )[0],
    "norm": lambda draw, _: rms_norm(draw(T, K).bfloat16(), draw(K), 1e-6, implementation="triton"),
    "situ": lambda draw, _: situ_glu(draw(T, K).bfloat16(), draw(T, K).bfloat16(), implementation="triton"),
    "attnres": lambda draw, _: attnres_mix(
        [draw(T, K).bfloat16(), draw(T, K).bfloat16()], draw(K), draw(K), implementation="triton"
    )[0],
    "cross_entropy": _cross_entropy,
    "experts": _experts,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_results_and_gradients_on_the_second_card_are_those_of_the_first(name):
    results = []
    for card in (0, 1):
        make = torch.Generator().manual_seed(0)
        leaves = []

        def draw(*shape: int, card: int = card, leaves: list = leaves, make: torch.Generator = make):
            leaves.append(torch.randn(*shape, generator=make).to(f"cuda:{card}").requires_grad_())
            return leaves[-1]

        assert torch.cuda.current_device() == 0
        y = OPERATORS[name](draw, torch.tensor([0, 65, T], dtype=torch.int32, device=f"cuda:{card}"))
        gradients = torch.autograd.grad(y.float().square().sum(), leaves) if y.requires_grad else ()
        assert torch.cuda.current_device() == 0
        assert y.device.index == card
        results.append([x.cpu() for x in (y, *gradients)])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
