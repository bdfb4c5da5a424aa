"""Operators have dtype rules of their own: torch.autocast around a call changes no bit of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from openk3.ops import (
    attention,
    attnres,
    cross_entropy,
    decoding,
    glu,
    kda,
    kda_gate,
    moe,
    mx,
    norm,
    quantile_balance,
    short_conv,
    situ,
)

Tensor = torch.Tensor
Draw = Callable[..., Tensor]
T, H, K, E = 9, 2, 64, 4
CU = torch.tensor([0, 4, T], dtype=torch.int32)


def _raw(draw: Draw) -> tuple[Tensor, ...]:
    return draw(T, H, K), draw(T, H, K), draw(T, H, K), draw(T, H, K), draw(T, H), draw(H), draw(H, K), CU


def _unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def _mixer(draw: Draw, *rows: int) -> tuple[list[Tensor], Tensor, Tensor, Any]:
    C = 3 * H * K
    weights = kda.MixerWeights(draw(4, C), draw(H), draw(H, K), draw(K), 1e-6, -5.0)
    tokens = [draw(*rows, *shape).detach() for shape in ((C,), (H, K), (H,), (H, K))]
    return tokens, draw(3, H, K, K).detach().clone(), draw(3, 3, C).detach().clone(), weights


@torch.no_grad()
def _decode(draw: Draw) -> Any:
    tokens, state, tail, weights = _mixer(draw, 3)
    slots = torch.arange(3, dtype=torch.int32)
    return kda.kda_decode(*tokens, state, tail, slots, weights), state, tail


@torch.no_grad()
def _verify(draw: Draw) -> Any:
    tokens, state, tail, weights = _mixer(draw, 3, 2)
    past = kda.DraftWindow.empty(3, 2, H, K, torch.float32, "cpu")
    slots, accepted = torch.arange(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    return kda.kda_verify(*tokens, state, tail, past, accepted, slots, weights), state, tail


@torch.no_grad()
def _few_experts(draw: Draw) -> Any:
    return _experts(draw, few=True)


def _experts(draw: Draw, few: bool = False) -> Any:
    x, logits = draw(T, 8), draw(T, E)
    routing = moe.route(logits, torch.zeros(E), 2)
    w1, w3, w2 = draw(E, 16, 8), draw(E, 16, 8), draw(E, 8, 16)
    if few:
        return moe.expert_ffn_few(x, routing, w1, w3, w2, moe.Activation())
    return moe.expert_ffn(x, routing.weights, moe.plan(routing.ids, E), w1, w3, w2, moe.Activation())


def _entry(draw: Draw) -> Any:
    entry = moe.route_and_project(
        draw(T, 8), draw(E, 8), draw(16, 8), torch.zeros(E), 2, counted=moe.Counted(None, 50)
    )
    return entry.routing.weights, entry.latent, entry.routing.ids, entry.load, entry.histogram


@torch.no_grad()
def _mx_experts(draw: Draw) -> Any:
    stored = [part for shape in ((64, 32), (64, 32), (32, 64)) for part in mx.encode_mxfp4(draw(E, *shape))]
    routing = moe.route(draw(T, E), torch.zeros(E), 2)
    experts = moe.MxExperts.from_checkpoint(*stored)
    routes = moe.plan(routing.ids, E)
    return moe.mx_expert_ffn(draw(T, 32), routing.weights, routes, experts, moe.Activation())


@torch.no_grad()
def _paged(draw: Draw) -> Any:
    cache = draw(3, 16, 80).detach()
    attention.mla_append(draw(2, 80), cache, torch.tensor([3, 40]))
    tables, lengths = torch.tensor([[0, 1], [2, 0]]).int(), torch.tensor([20, 9]).int()
    return attention.mla_decode(
        draw(2, 1, H, 64), draw(2, 1, H, 16), cache, tables, lengths, scale=0.1
    ), cache


@torch.no_grad()
def _decoding(draw: Draw) -> Any:
    joined = decoding.Joined.of(draw(20, 8), precise=draw(E, 8))
    mix, bank, stream = decoding.StreamMix(draw(8), draw(8), 1e-6), draw(2, 3, 8), draw(3, 8).detach().clone()
    *outputs, logits = decoding.mixed_products(bank, mix, draw(8), 1e-6, joined)
    ids, weights = decoding.choose_experts(logits, torch.zeros(E), 2)
    u = decoding.expert_sums(
        stream, ids, weights, draw(E, 16, 8), draw(E, 16, 8), draw(E, 8, 16), moe.Activation()
    )
    decoding.products_into(stream, draw(8, 8), u, add=True)
    return outputs, logits, ids, weights, stream


def _balance(draw: Draw) -> Any:
    scores, bias = draw(T, E).detach().sigmoid(), torch.zeros(E)
    counts = quantile_balance.required_bias_histogram(scores, scores.amax(1), bias)
    return counts, quantile_balance.bias_from_histogram(counts, bias, 2)


@torch.no_grad()
def _mx(draw: Draw) -> Any:
    packed, scale = mx.encode_mxfp4(draw(8, 64))
    rounded = mx.mxfp4_rounded(draw(3, 64)), mx.mxfp8_rounded(draw(3, 64))
    return (
        mx.decode_mxfp4(packed, scale, torch.float32),
        mx.mxfp4_linear(draw(3, 64), packed, scale),
        *rounded,
    )


OPERATORS: dict[str, Callable[[Draw], Any]] = {
    "gated_kda": lambda draw: kda.gated_kda(*_raw(draw)),
    "kda": lambda draw: kda.kda(
        _unit(draw(T, H, K)),
        _unit(draw(T, H, K)),
        draw(T, H, K),
        -draw(T, H, K).abs(),
        draw(T, H).sigmoid(),
        CU,
    ),
    "kda_step": lambda draw: kda.kda_step(
        draw(3, H, K), draw(3, H, K), draw(3, H, K), -draw(3, H, K).abs(), draw(3, H), draw(3, H, K, K)
    ),
    "kda_fragments": lambda draw: kda.kda_fragments(*_raw(draw)[1:]),
    "kda_reverse_fragments": lambda draw: (
        lambda q, k, v, *rest: kda.kda_reverse_fragments(q, k, *rest, d_o=v)
    )(*_raw(draw)),
    "kda_decode": _decode,
    "kda_verify": _verify,
    "kda_gate": lambda draw: kda_gate.kda_gate(draw(T, H, K), draw(H), draw(H, K), lower_bound=-5.0),
    "short_conv": lambda draw: short_conv.short_conv(draw(T, 8), draw(8, 4), CU),
    "attention": lambda draw: attention.attention(draw(T, H, K), draw(T, H, K), draw(T, H, K), CU, CU),
    "gated_mla": lambda draw: attention.gated_mla(
        draw(T, H, K), draw(T, H, K), draw(T, 16), draw(T, H, 16), CU, CU
    ),
    "rms_norm": lambda draw: norm.rms_norm(draw(T, K), draw(K), 1e-6),
    "gated_rms_norm": lambda draw: norm.gated_rms_norm(draw(T, H, K), draw(T, H, K), draw(K), 1e-6),
    "l2_norm": lambda draw: norm.l2_norm(draw(T, K)),
    "situ_glu": lambda draw: situ.situ_glu(draw(T, K), draw(T, K)),
    "swiglu": lambda draw: glu.swiglu(draw(T, K), draw(T, K)),
    "glu": lambda draw: glu.glu(draw(T, K), draw(T, K)),
    "attnres_mix": lambda draw: attnres.attnres_mix([draw(T, K), draw(T, K)], draw(K), draw(K)),
    "attnres_add_mix_norm": lambda draw: tuple(
        attnres.attnres_add_mix_norm([draw(T, K)], draw(T, K), draw(T, K), draw(K), draw(K), draw(K))
    ),
    "attnres_bank_mixes": lambda draw: [
        x
        for mix in attnres.attnres_bank_mixes([draw(T, K), draw(T, K)], draw(3, K), draw(3, K))
        for x in (mix.values, mix.lse)
    ],
    "linear_cross_entropy": lambda draw: cross_entropy.linear_cross_entropy(
        draw(T, K), draw(E, K), torch.arange(T) % E
    ),
    "expert_ffn": _experts,
    "route_and_project": _entry,
    "expert_ffn_few": _few_experts,
    "mx_expert_ffn": _mx_experts,
    "mla_decode": _paged,
    "decoding": _decoding,
    "quantile_balance": _balance,
    "mx": _mx,
}


# Composed of torch's operators, whose derivatives follow autocast where the backward itself runs under it.
TORCHS_DERIVATIVES = {"attnres_bank_mixes", "route_and_project"}


def _results(operator: Callable[[Draw], Any], forward: bool, backward: bool) -> list[Tensor]:
    """All tensors that come out, and the gradients of what they sum to; each drawn tensor is a leaf.

    forward, backward: whether autocast is on there.
    """
    make, leaves = torch.Generator().manual_seed(0), []

    def draw(*shape: int) -> Tensor:
        leaves.append(torch.randn(shape, generator=make).requires_grad_())
        return leaves[-1]

    with torch.autocast("cpu", torch.bfloat16, enabled=forward):
        out = operator(draw)
    out = [x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, Tensor)]
    trained = [x.float().square().sum() for x in out if x.requires_grad]
    with torch.autocast("cpu", torch.bfloat16, enabled=backward):
        gradients = torch.autograd.grad(sum(trained), leaves, allow_unused=True) if trained else ()
    return [*out, *(g for g in gradients if g is not None)]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_autocast_changes_no_bit_of_a_call_or_its_gradients(name, backward):
    plain = _results(OPERATORS[name], False, False)
    cast = _results(OPERATORS[name], True, backward and name not in TORCHS_DERIVATIVES)
    assert len(plain) == len(cast) > 0
    for one, other in zip(plain, cast, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_an_operator_under_autocast_is_still_one_graph():
    torch._dynamo.reset()
    gate, up = torch.randn(2, T, K)
    compiled = torch.compile(situ.situ_glu, fullgraph=True, backend="eager")
    expected = situ.situ_glu(gate, up)
    assert torch.equal(compiled(gate, up), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(gate, up), expected)
