"""What stands between a decoding step's large operators, both ways, against equations in float64."""

from __future__ import annotations

import pytest
import torch
from closeness import relative_error

from openk3.errors import InvalidInput
from openk3.ops.activation import Activation
from openk3.ops.decoding import (
    ExpertLists,
    Joined,
    StreamMix,
    append_latents,
    choose_experts,
    expert_sums,
    experts_into,
    mixed_products,
    most_likely,
    products,
    products_into,
    start_step,
)
from openk3.ops.dispatch import triton_problem

NO_TRITON = triton_problem("cpu")
if NO_TRITON is None:
    from openk3.ops.decoding.kernels import many
    from openk3.ops.decoding.kernels import products as kernels

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
@pytest.mark.parametrize("n", [1, 20, 70], ids=["a row", "a tile", "larger tiles"])
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
@pytest.mark.parametrize("n", [5, 66])
def test_each_part_goes_into_the_stream_alone(part, n, implementation):
    out, weight = torch.randn(n, 36), torch.randn(36, 24)
    x, gate = torch.randn(n, 24), torch.randn(n, 24)
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
def test_a_choice_lists_each_experts_assignments_and_adds_none_elsewhere(implementation):
    logits, bias = torch.randn(9, 20), torch.randn(20)
    lists = ExpertLists(torch.full((20, 9), -1, dtype=torch.int32), torch.zeros(20, dtype=torch.int32))
    given = {"scaling_factor": 2.5, "implementation": implementation}
    ids, weights = choose_experts(logits, bias, 3, lists=lists, **given)
    alone = choose_experts(logits, bias, 3, **given)
    assert torch.equal(ids, alone[0]) and torch.equal(weights, alone[1])
    for e in range(20):
        right = [a for a, chosen in enumerate(ids.flatten().tolist()) if chosen == e]
        count = int(lists.counts[e])
        assert sorted(lists.rows[e, :count].tolist()) == right
        assert (lists.rows[e, count:] == -1).all()


@pytest.mark.parametrize("implementation", BOTH)
def test_equal_scores_fall_to_the_lower_expert(implementation):
    ids, _ = choose_experts(torch.zeros(2, 50), torch.zeros(50), 4, implementation=implementation)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("kind", ["situ", "swiglu"])
@pytest.mark.parametrize("n", [3, 5, 23], ids=["each row its own", "lists", "lists of several tiles"])
def test_experts_of_each_row_are_summed_by_weight(n, kind, implementation):
    x, ids, weights, experts = experts_of(n)
    u = expert_sums(x, ids, weights, *experts, Activation(kind), implementation=implementation)
    assert relative_error(u, summed(x, ids, weights, experts, Activation(kind))) < 1e-5


def experts_of(n):
    """Rows, their experts and weights, and the experts: number 4 gets nearly all rows, number 5 none."""
    k, E, L, F = 2, 6, 24, 40
    ids = torch.tensor([[4, t % 4] if t % 7 else [t % 4, (t + 1) % 4] for t in range(n)])
    experts = torch.randn(E, F, L), torch.randn(E, F, L), torch.randn(E, L, F)
    return torch.randn(n, L), ids, torch.rand(n, k), experts


def summed(x, ids, weights, experts, activation):
    """Each row's experts by weight, in float64."""
    right = torch.zeros(x.shape, dtype=f64)
    for t, (row, chosen) in enumerate(zip(x.to(f64), ids.tolist(), strict=True)):
        for s, e in enumerate(chosen):
            gate, up, down = (w[e].to(f64) for w in experts)
            right[t] += weights[t, s] * (down @ unit(gate @ row, up @ row, activation))
    return right


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("n", [3, 5, 23], ids=["each row its own", "lists", "lists of several tiles"])
@pytest.mark.parametrize(("add", "norm", "shared"), [(True, True, True), (False, False, False)])
def test_sums_of_experts_go_into_the_stream_normed_beside_a_unit(n, add, norm, shared, implementation):
    d, b, activation = 20, 12, Activation()
    x, ids, weights, experts = experts_of(n)
    L = x.shape[1]
    out, gain, weight = torch.randn(n, d), torch.rand(L) + 0.5, torch.randn(d, L + b * shared)
    gate, up = 3 * torch.randn(n, b), 9 * torch.randn(n, b)
    u = summed(x, ids, weights, experts, activation)
    u = normed(u, gain, 1e-5) if norm else u
    right = (torch.cat([u, unit(gate, up, activation)], 1) if shared else u) @ weight.to(f64).T
    right = right + out if add else right
    experts_into(
        out, weight, x, ids, weights, *experts, activation, add=add, norm=(gain, 1e-5) if norm else None,
        shared=(gate, up) if shared else None, implementation=implementation,
    )  # fmt: skip
    assert relative_error(out, right) < 1e-5


@needs_triton
def test_the_order_of_lists_changes_no_bit():
    x, ids, weights, experts = experts_of(23)
    weight, out = torch.randn(20, 24), torch.zeros(3, 23, 20)
    rows = torch.zeros(6, 23, dtype=torch.int32)
    counts = torch.zeros(6, dtype=torch.int32)
    for a, e in enumerate(ids.flatten().tolist()):
        rows[e, counts[e]] = a
        counts[e] += 1
    other = rows.clone()
    for e in range(6):
        other[e, : counts[e]] = rows[e, torch.randperm(int(counts[e]))]
    assert not torch.equal(rows, other)
    for i, lists in enumerate((None, ExpertLists(rows, counts), ExpertLists(other, counts))):
        experts_into(
            out[i], weight, x, ids, weights, *experts, Activation(), add=True, lists=lists,
            implementation="triton",
        )  # fmt: skip
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2])


@needs_triton
def test_what_experts_give_a_row_does_not_depend_on_the_other_rows():
    x, ids, weights, experts = experts_of(23)
    weight = torch.randn(20, 24)
    out = torch.zeros(2, 23, 20)
    for i in range(2):
        if i:  # all others of other numbers and with other experts
            x[1:], ids[1:] = torch.randn(22, 24), torch.tensor([3, 5])
        experts_into(
            out[i], weight, x, ids, weights, *experts, Activation(), add=True, implementation="triton"
        )
    assert torch.equal(out[0, 0], out[1, 0]) and not torch.equal(out[0, 1], out[1, 1])


@needs_triton
@pytest.mark.parametrize("n", [7, 70])
def test_forms_of_earlier_measurements_compute_the_same(n, monkeypatch):
    bank, mix = torch.randn(3, n, 24), StreamMix(torch.randn(24), torch.rand(24) + 0.5, 1e-5)
    joined = Joined.of(torch.randn(33, 24), torch.randn(4, 24), precise=torch.randn(16, 24))
    gain, weight, start = torch.rand(24) + 0.5, torch.randn(20, 24), torch.randn(n, 20)
    x, ids, weights, experts = experts_of(n)
    results = []
    for earlier in (False, True):
        if earlier:
            monkeypatch.setattr(many, "JOINED", 0)
            monkeypatch.setattr(kernels, "MIXED", 0)
            monkeypatch.setattr(kernels, "TILES", ((2**31, kernels.Tile(64, 16)),))
            monkeypatch.setattr(kernels, "WHOLE", ())
        out = start.clone()
        experts_into(
            out, weight, x, ids, weights, *experts, Activation(), add=True, norm=(gain, 1e-5),
            implementation="triton",
        )  # fmt: skip
        products_into(out, weight, x, add=True, gate=x, implementation="triton")
        results.append([out, *mixed_products(bank, mix, gain, 1e-6, joined, implementation="triton")])
    for new, old in zip(*results, strict=True):
        assert relative_error(new, old) < 1e-5


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_most_likely_token_has_the_largest_logit_if_that_is_finite(dtype, implementation):
    logits = torch.randn(7, 9001).to(dtype)
    at = torch.tensor([0, 8191, 8192, 9000, 5, 6, 7])
    logits[torch.arange(7), at] = torch.tensor([9.0, 9, 9, 9, torch.inf, torch.nan, 9], dtype=dtype)
    logits[5, 3] = torch.inf
    logits[6] = -torch.inf
    tokens = most_likely(logits, implementation=implementation)
    assert tokens.dtype == torch.int64 and tokens.tolist() == [0, 8191, 8192, 9000, -1, -1, -1]


@needs_triton
def test_of_equal_logits_the_first_is_most_likely():
    logits = torch.full((2, 20_000), -3.0)
    logits[1, 8200:] = -2.0
    assert most_likely(logits, implementation="triton").tolist() == [0, 8200]


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
        ("logits are", most_likely, (logits[0],)),
        ("logits are", most_likely, (logits[:, :0],)),
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
    for message, chosen, options in [
        ("want x", ids[:2], {}),
        ("ids are", ids.int(), {}),
        ("want \\[8, 8\\]", ids, {"weight": torch.randn(8, 9)}),
        ("as wide as", ids, {"shared": (x, x[:, :4].contiguous())}),
        ("gains", ids, {"norm": (gain[:4], 1e-5)}),
        ("lists must", ids, {"lists": ExpertLists(torch.zeros(1, 2), torch.zeros(1))}),
    ]:
        weight = options.pop("weight", torch.randn(8, 16 if "shared" in options else 8))
        with pytest.raises(InvalidInput, match=message):
            experts_into(
                out, weight, x, chosen, share, experts, experts, experts, act, add=True, **options,
                implementation=implementation,
            )  # fmt: skip


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
    lists = torch.zeros(6, n, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    check(ops.choose_and_list_experts, (torch.randn(n, 6), torch.zeros(6), 2, 1.0, True, *lists))
    ids, experts = torch.tensor([[2, 0], [0, 1], [1, 2], [0, 2], [1, 0]])[:n], torch.randn(3, d, d)
    check(ops.expert_sums, (x, ids, torch.rand(n, 2), experts, experts, experts, "glu", 4.0, 25.0))
    given = torch.randn(n, 8), torch.randn(8, 2 * d), x, ids, torch.rand(n, 2), None, None, *[experts] * 3
    check(ops.experts_into, (*given, True, gain, 1e-5, gate, up, "situ", 4.0, 25.0))
    check(ops.most_likely, (x,))
    places, latents = torch.arange(n), torch.randn(n, 3, d)
    check(ops.append_latents, (x, torch.ones(10), 1e-5, latents, places, places % 3))
    slots, lengths = torch.arange(n, dtype=torch.int32), torch.zeros(n + 1, dtype=torch.int64)
    check(ops.start_step, (places, slots, torch.randn(n, 8), lengths, out))
