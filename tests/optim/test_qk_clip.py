"""QK-clip, judged by the logits of a small MLA written out here, before and after."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from openk3.config import MlaConfig
from openk3.errors import InvalidInput, TrainingDiverged
from openk3.optim import clip_factors, scale_logits

MLA = MlaConfig(num_heads=4, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=5)
TOKENS, HIDDEN, QUERY_RANK, TAU = 30, 16, 10, 100.0
H, NOPE, ROPE, V, R = 4, 8, 6, 5, 12


@dataclass
class SmallMla:
    """NoPE MLA's logits and values; with `q_a` the query goes through a normed latent."""

    q: torch.Tensor
    kv_a: torch.Tensor
    kv_b: torch.Tensor
    q_a: torch.Tensor | None

    @classmethod
    def random(cls, dtype: torch.dtype, query_latent: bool) -> SmallMla:
        def normal(*shape):
            return torch.randn(shape, dtype=torch.float64).to(dtype)

        inputs = QUERY_RANK if query_latent else HIDDEN
        q_a = normal(QUERY_RANK, HIDDEN) if query_latent else None
        return cls(
            normal(H * (NOPE + ROPE), inputs), normal(R + ROPE, HIDDEN), normal(H * (NOPE + V), R), q_a
        )

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """`[H, T, T]`, scaled; -inf where causality forbids."""
        inputs = x if self.q_a is None else normed(x @ self.q_a.T)
        queries = (inputs @ self.q.T).view(TOKENS, H, NOPE + ROPE)
        compressed = x @ self.kv_a.T
        own = (normed(compressed[:, :R]) @ self.kv_b.T).view(TOKENS, H, NOPE + V)[..., :NOPE]
        shared = compressed[:, None, R:].expand(TOKENS, H, ROPE)
        scores = torch.einsum("ihd,jhd->hij", queries, torch.cat([own, shared], -1)) / math.sqrt(NOPE + ROPE)
        return scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -math.inf)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        return (normed((x @ self.kv_a.T)[:, :R]) @ self.kv_b.T).view(TOKENS, H, NOPE + V)[..., NOPE:]


def normed(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


def overgrown(dtype: torch.dtype, dominant: str, query_latent: bool) -> tuple[SmallMla, torch.Tensor]:
    """Heads 1 and 3 have logits of several tau, all but wholly from the shared dims or from their own."""
    mla = SmallMla.random(dtype, query_latent)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64).to(dtype)
    rows = mla.q.view(H, NOPE + ROPE, -1)
    for head, target in ((0, 40.0), (1, 430.0), (2, 90.0), (3, 101.0)):
        minor, major = (rows[head, :NOPE], rows[head, NOPE:])
        if dominant == "own":
            minor, major = major, minor
        minor *= 1e-3
        major *= target / float(mla.logits(x)[head].max())
    return mla, x


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("query_latent", [False, True])
@pytest.mark.parametrize("dominant", ["shared", "own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_logit_exceeds_tau_afterwards_and_each_scales_by_gamma(dtype, dominant, query_latent):
    mla, x = overgrown(dtype, dominant, query_latent)
    logits, values = mla.logits(x), mla.values(x)
    largest = logits.amax((1, 2))
    assert largest[1] > 4 * TAU and largest[3] > TAU > largest[2]

    gamma = clip_factors({7: largest}, TAU)[7]
    scale_logits(mla.q, mla.kv_b, gamma, MLA)
    after = mla.logits(x)
    assert after.max() <= TAU * (1 + 1e-5)
    assert after[1].max() >= TAU * (1 - 1e-5)  # not more than needed
    allowed = torch.isfinite(logits)
    expected = (gamma[:, None, None] * logits)[allowed]
    slack = 1e-12 if dtype == torch.float64 else 2e-6
    assert ((after[allowed] - expected).abs() <= slack * largest.max()).all()
    assert torch.equal(mla.values(x), values)


@pytest.mark.parametrize("dominant", ["shared", "own"])
def test_heads_below_tau_keep_every_bit(dominant):
    mla, x = overgrown(torch.float32, dominant, False)
    q, kv_b = mla.q.clone(), mla.kv_b.clone()
    scale_logits(mla.q, mla.kv_b, clip_factors({0: mla.logits(x).amax((1, 2))}, TAU)[0], MLA)
    for weight, before, rows in ((mla.q, q, NOPE + ROPE), (mla.kv_b, kv_b, NOPE + V)):
        now, then = weight.view(H, rows, -1), before.view(H, rows, -1)
        assert torch.equal(now[[0, 2]], then[[0, 2]])
        assert not torch.equal(now[1], then[1]) and not torch.equal(now[3], then[3])


def test_factors_are_one_for_heads_at_or_below_tau_negative_or_without_a_pair():
    logits = torch.tensor([100.0, 99.0, 0.0, -400.0, -math.inf, 200.0])
    assert clip_factors({0: logits}, TAU)[0].tolist() == [1, 1, 1, 1, 1, 0.5]


def test_an_infinite_tau_switches_clipping_off():
    assert clip_factors({0: torch.tensor([1e30, 5.0])}, math.inf)[0].tolist() == [1, 1]
    assert clip_factors({}, TAU) == {}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_is_an_error_naming_layer_and_head(bad):
    fine = torch.tensor([1.0, 250.0])
    with pytest.raises(TrainingDiverged, match=f"layer 11, head 1 is {bad}"):
        clip_factors({3: fine, 11: torch.tensor([math.inf if math.isnan(bad) else 3.0, bad])}, TAU)


def test_wrong_shapes_and_a_wrong_tau_are_refused():
    mla = SmallMla.random(torch.float32, False)
    with pytest.raises(InvalidInput, match=r"query is \[52, 16\], 4 heads need 56 rows"):
        scale_logits(mla.q[4:], mla.kv_b, torch.ones(4), MLA)
    with pytest.raises(InvalidInput, match=r"gamma is \[3\], 4 heads need 4"):
        scale_logits(mla.q, mla.kv_b, torch.ones(3), MLA)
    with pytest.raises(InvalidInput, match="tau must be positive, got -1"):
        clip_factors({}, -1.0)
