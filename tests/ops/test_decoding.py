"""What stands between a decoding step's large operators, both ways, against equations in float64."""

from __future__ import annotations

import pytest
import torch
from closeness import relative_error

from openk3.errors import InvalidInput
from openk3.ops.activation import Activation
from openk3.ops.decoding import (
    Joined,
    StreamMix,
    append_latents,
    choose_experts,
    expert_sums,
    mixed_products,
    products,
    products_into,
    start_step,
)
from openk3.ops.dispatch import triton_problem

NO_TRITON = triton_problem("cpu")
needs_triton = pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
BOTH = ["eager", pytest.param("triton", marks=needs_triton)]
f64 = torch.float64


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def normed(x, gain, eps):
    """RMSNorm in float64."""
    x = x.to(f64)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain.to(f64)


def mixed(bank, mix):
    """Attention over the sources of each row, in float64 (report §2.2 eq. 8)."""
    keys = normed(bank, mix.key_gain, mix.eps)
    weights = torch.softmax(torch.einsum("snd,d->sn", keys, mix.query.to(f64)), 0)
    return torch.einsum("sn,snd->nd", weights, bank.to(f64))


def unit(gate, up, activation):
    """The gated unit in float64 (report §2.3.2)."""
    gate, up = gate.to(f64), up.to(f64)
    if activation.kind == "situ":
        cap, up_cap = activation.gate_cap, activation.up_cap
        return cap * (gate / cap).tanh() * gate.sigmoid() * up_cap * (up / up_cap).tanh()
    return gate.sigmoid() * up * (gate if activation.kind == "swiglu" else 1)


# 1 to 4 rows mix in every program; more are mixed first. Sizes of no power of two, and more rows than a tile.
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize(("sources", "n", "d"), [(3, 1, 24), (5, 4, 40), (2, 5, 36), (6, 19, 24), (1, 2, 24)])
def test_products_of_a_mix_are_those_of_the_equations(sources, n, d, implementation):
    bank = torch.randn(sources + 2, n, d)[:sources]
    mix = StreamMix(torch.randn(d), torch.rand(d) + 0.5, 1e-5)
    gain, weights = torch.rand(d) + 0.5, [torch.randn(width, d) for width in (33, 4, 16)]
    joined = Joined.of(*weights[:2], precise=weights[2])
    outputs = mixed_products(bank, mix, gain, 1e-6, joined, implementation=implementation)
    x = normed(mixed(bank, mix), gain, 1e-6)
    for out, weight in zip(outputs, weights, strict=True):
        assert out.is_contiguous() and out.shape == (n, len(weight))
        assert relative_error(out, x @ weight.to(f64).T) < 1e-5


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("n", [1, 6])
def test_one_source_is_read_as_it_is(n, implementation):
    bank, gain, weight = torch.randn(1, n, 24), torch.rand(24) + 0.5, torch.randn(20, 24)
    (out,) = mixed_products(bank, None, gain, 1e-5, Joined.of(weight), implementation=implementation)
    assert relative_error(out, normed(bank[0], gain, 1e-5) @ weight.to(f64).T) < 1e-5


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("n", [1, 70])
def test_products_lie_apart(n, implementation):
    x, weights = torch.randn(n, 200), [torch.randn(width, 200) for width in (16, 7, 50)]
    outputs = products(x, Joined.of(*weights), implementation=implementation)
    for out, weight in zip(outputs, weights, strict=True):
        assert out.is_contiguous()
        assert relative_error(out, x.to(f64) @ weight.to(f64).T) < 1e-5


def test_a_precise_product_is_kept_in_fp32_where_the_others_are_rounded():
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    rounded, precise = products(x, Joined.of(weight, precise=weight), implementation="eager")
    assert rounded.dtype == torch.bfloat16 and precise.dtype == torch.float32
    right = x.to(f64) @ weight.to(f64).T
    assert relative_error(precise, right) < 1e-6 < 1e-4 < relative_error(rounded, right)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("kind", ["situ", "swiglu", "glu"])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("n", [1, 21])
def test_a_norm_and_a_unit_go_into_the_stream_at_once(n, add, kind, implementation):
    d, a, b, activation = 20, 24, 140, Activation(kind)
    out, u, gate, up = torch.randn(n, d), torch.randn(n, a), 3 * torch.randn(n, b), 9 * torch.randn(n, b)
    gain, weight = torch.rand(a) + 0.5, torch.randn(d, a + b)
    right = torch.cat([normed(u, gain, 1e-5), unit(gate, up, activation)], 1) @ weight.to(f64).T
    right = right + out if add else right
    products_into(
        out, weight, u, add=add, norm=(gain, 1e-5), unit=(gate, up, activation), implementation=implementation
    )
    assert relative_error(out, right) < 1e-5


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("part", ["plain", "gate", "unit"])
def test_each_part_goes_into_the_stream_alone(part, implementation):
    out, weight = torch.randn(5, 36), torch.randn(36, 24)
    x, gate = torch.randn(5, 24), torch.randn(5, 24)
    given, right = {}, x.to(f64)
    if part == "gate":
        given, right = {"gate": gate}, x.to(f64) * gate.to(f64).sigmoid()
    elif part == "unit":
        given, right = {"unit": (x, gate, Activation())}, unit(x, gate, Activation())
    right = out + right @ weight.to(f64).T
    products_into(
        out, weight, None if part == "unit" else x, add=True, implementation=implementation, **given
    )
    assert relative_error(out, right) < 1e-5


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize(("E", "k"), [(6, 2), (40, 6), (5, 5)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_experts_are_the_best_by_biased_score_with_weights_without_the_bias(
    E, k, renormalize, implementation
):
    logits, bias = torch.randn(7, E), 0.3 * torch.randn(E)
    ids, weights = choose_experts(
        logits, bias, k, scaling_factor=2.5, renormalize=renormalize, implementation=implementation
    )
    scores = logits.to(f64).sigmoid()
    for t in range(7):
        by_rank = sorted(range(E), key=lambda e: -float(scores[t, e] + bias[e]))
        assert ids[t].tolist() == by_rank[:k]
        p = scores[t, by_rank[:k]]
        assert relative_error(weights[t], 2.5 * (p / p.sum() if renormalize else p)) < 1e-6


@pytest.mark.parametrize("implementation", BOTH)
def test_equal_scores_fall_to_the_lower_expert(implementation):
    ids, _ = choose_experts(torch.zeros(2, 50), torch.zeros(50), 4, implementation=implementation)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("kind", ["situ", "swiglu"])
@pytest.mark.parametrize("n", [3, 5, 23], ids=["each row its own", "lists", "lists of several tiles"])
def test_experts_of_each_row_are_summed_by_weight(n, kind, implementation):
    k, E, L, F, activation = 2, 6, 24, 40, Activation(kind)
    x, weights = torch.randn(n, L), torch.rand(n, k)
    w1, w3, w2 = torch.randn(E, F, L), torch.randn(E, F, L), torch.randn(E, L, F)
    # Expert 4 gets nearly all rows, expert 5 none.
    ids = torch.tensor([[4, t % 4] if t % 7 else [t % 4, (t + 1) % 4] for t in range(n)])
    u = expert_sums(x, ids, weights, w1, w3, w2, activation, implementation=implementation)
    right = torch.zeros(n, L, dtype=f64)
    for t in range(n):
        for s in range(k):
            gate, up, down = (w[ids[t, s]].to(f64) for w in (w1, w3, w2))
            row = x[t].to(f64)
            right[t] += weights[t, s] * (down @ unit(gate @ row, up @ row, activation))
    assert relative_error(u, right) < 1e-5


@pytest.mark.parametrize("implementation", BOTH)
def test_a_latent_is_normed_on_its_way_and_written_nowhere_else(implementation):
    compressed, gain = torch.randn(3, 10 + 4), torch.rand(10) + 0.5
    latents = torch.randn(5, 6, 14)
    right = latents.to(f64)
    places, seen = torch.tensor([4, 0, 2]), torch.tensor([0, 3, 9])  # the last would lie behind the end
    for row, (place, at) in enumerate([(4, 0), (0, 3), (2, 5)]):
        right[place, at] = torch.cat([normed(compressed[row, :10], gain, 1e-6), compressed[row, 10:].to(f64)])
    append_latents(compressed, gain, 1e-6, latents, places, seen, implementation=implementation)
    assert float((latents - right).abs().max()) < 1e-5


@pytest.mark.parametrize("implementation", BOTH)
def test_a_step_embeds_its_tokens_and_counts_those_that_have_a_slot(implementation):
    embedding, out = torch.randn(9, 12), torch.empty(4, 12)
    lengths = torch.tensor([5, 0, 7, 0])
    tokens, slots = torch.tensor([3, 8, 0, 3]), torch.tensor([2, -1, 1, -1], dtype=torch.int32)
    places, seen, filled = start_step(tokens, slots, embedding, lengths, out, implementation=implementation)
    assert torch.equal(out, embedding[tokens])
    assert places.tolist() == [2, 3, 1, 3]
    assert seen.tolist() == [7, 0, 0, 0]
    assert filled.tolist() == [8, 0, 1, 0] and filled.dtype == torch.int32
    assert lengths.tolist() == [5, 1, 8, 0]


def test_what_does_not_fit_is_refused():
    joined = Joined.of(torch.randn(4, 8))
    gain = torch.ones(8)
    with pytest.raises(InvalidInput, match=r"\[S, n, 8\]"):
        mixed_products(torch.randn(2, 3, 6), None, gain, 1e-5, joined)
    with pytest.raises(InvalidInput, match="got none"):
        mixed_products(torch.randn(2, 3, 8), None, gain, 1e-5, joined)
    with pytest.raises(InvalidInput, match=r"\[n, 8\]"):
        products(torch.randn(3, 7), joined)
    out, x = torch.zeros(3, 8), torch.randn(3, 4)
    with pytest.raises(InvalidInput, match=r"want \[8, 4\]"):
        products_into(out, torch.randn(8, 5), x, add=True)
    with pytest.raises(InvalidInput, match="contiguous"):
        products_into(out, torch.randn(4, 8).T, x, add=True)
    with pytest.raises(InvalidInput, match="not both"):
        products_into(out, torch.randn(8, 4), x, add=True, norm=(torch.ones(4), 1e-5), gate=x)


@pytest.mark.parametrize("implementation", BOTH)
def test_what_kernels_would_read_or_write_out_of_bounds_by_is_refused(implementation):
    joined, gain = Joined.of(torch.randn(4, 8)), torch.ones(8)
    bank, x, out = torch.randn(2, 3, 8), torch.randn(3, 8), torch.zeros(3, 8)
    ids, share, experts = torch.zeros(3, 2, dtype=torch.int64), torch.rand(3, 2), torch.randn(4, 8, 8)
    places, tokens, slots = (torch.arange(3, dtype=t) for t in (torch.int64, torch.int64, torch.int32))
    logits, bias, lengths, latents = (
        torch.randn(3, 4),
        torch.zeros(4),
        torch.zeros(4).long(),
        torch.zeros(3, 2, 8),
    )
    mix, act = StreamMix(gain, gain, 1e-5), Activation()
    calls = [
        ("gains", mixed_products, (bank, mix, gain[:4], 1e-5, joined)),
        ("gains", mixed_products, (bank, StreamMix(gain[:4], gain, 1e-5), gain, 1e-5, joined)),
        ("rows are", mixed_products, (bank.double(), mix, gain, 1e-5, joined)),
        ("rows are", products, (x.double(), joined)),
        ("bias is", choose_experts, (logits, bias[:3], 2)),
        ("k is 0", choose_experts, (logits, bias, 0)),
        ("k is 5", choose_experts, (logits, bias, 5)),
        ("want x", expert_sums, (x, ids, share, experts[0], experts, experts, act)),
        ("ids are", expert_sums, (x, ids.int(), share, experts, experts, experts, act)),
        ("one dtype", expert_sums, (x, ids, share, experts, experts.double(), experts, act)),
        ("latents are", append_latents, (x, gain[:6], 1e-5, latents[..., :7], places, places)),
        ("gains", append_latents, (x, torch.ones(9), 1e-5, latents, places, places)),
        ("places must", append_latents, (x, gain[:6], 1e-5, latents, places[:2], places)),
        ("seen must", append_latents, (x, gain[:6], 1e-5, latents, places, places.int())),
        ("want", start_step, (tokens, slots, x[:, :4], lengths, out)),
        ("one dtype", start_step, (tokens, slots, x.double(), lengths, out)),
        ("tokens must", start_step, (tokens[:2], slots, x, lengths, out)),
        ("slots must", start_step, (tokens, slots.long(), x, lengths, out)),
        ("lengths must", start_step, (tokens, slots, x, lengths.int(), out)),
    ]
    for message, operator, arguments in calls:
        with pytest.raises(InvalidInput, match=message):
            operator(*arguments, implementation=implementation)
    for message, options in [
        ("x or a unit", {"x": None}),
        ("all must be", {"x": x.double()}),
        ("as wide as", {"x": x, "gate": x[:, :4].contiguous()}),
        ("gains", {"x": x, "norm": (gain[:4], 1e-5)}),
    ]:
        weight = torch.randn(8, 0 if options["x"] is None else 8)
        with pytest.raises(InvalidInput, match=message):
            products_into(out, weight, **options, add=False, implementation=implementation)


@needs_triton
@pytest.mark.parametrize("n", [2, 5])
def test_operators_are_what_torch_is_told_of_them(n):
    ops, check = torch.ops.openk3, torch.library.opcheck
    d, gain = 16, torch.ones(16)
    joined = Joined.of(torch.randn(20, d), precise=torch.randn(3, d))
    matrix, widths = (joined.matrix, joined.blocks), (20, 3)
    check(ops.mixed_products, (torch.randn(2, n, d), gain, gain, 1e-5, True, gain, 1e-5, *matrix, *widths))
    check(ops.joined_products, (torch.randn(n, d), *matrix, *widths))
    x, gate, up = torch.randn(3, n, d).unbind(0)
    out, weight = torch.randn(n, 8), torch.randn(8, 2 * d)
    check(ops.products_into, (out, weight, x, True, gain, 1e-5, None, gate, up, "situ", 4.0, 25.0))
    check(ops.choose_experts, (torch.randn(n, 6), torch.zeros(6), 2, 1.0, True))
    ids, experts = torch.randint(0, 3, (n, 2)), torch.randn(3, d, d)
    check(ops.expert_sums, (x, ids, torch.rand(n, 2), experts, experts, experts, "glu", 4.0, 25.0))
    places, latents = torch.arange(n), torch.randn(n, 3, d)
    check(ops.append_latents, (x, torch.ones(10), 1e-5, latents, places, places % 3))
    slots, lengths = torch.arange(n, dtype=torch.int32), torch.zeros(n + 1, dtype=torch.int64)
    check(ops.start_step, (places, slots, torch.randn(n, 8), lengths, out))
