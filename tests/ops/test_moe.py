"""Routed experts: route by its rules, plan by its order, FFN by a float64 sum over (token, slot)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.activation import Activation
from openk3.ops.moe import Routing, combine, expert_ffn, expert_ffn_few, plan, route


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-300))


# ---------------------------------------------------------------------------------------------------- route


def routes_by_hand(biased: torch.Tensor, k: int) -> list[list[int]]:
    return [sorted(range(len(row)), key=lambda e: (-row[e], e))[:k] for row in biased.tolist()]


@pytest.mark.parametrize(("T", "E", "k"), [(1, 2, 1), (50, 8, 3), (40, 300, 16), (7, 5, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_selection_follows_score_plus_bias_and_weights_follow_score_alone(T, E, k, dtype):
    logits, bias = torch.randn(T, E, dtype=dtype), torch.randn(E, dtype=dtype)
    routing = route(logits, bias, k, scaling_factor=2.5)
    scores = torch.sigmoid(logits)
    expected = torch.tensor(routes_by_hand(scores + bias, k))
    assert torch.equal(routing.ids, expected)
    assert torch.equal(routing.scores, scores)
    chosen = scores.gather(1, expected)
    torch.testing.assert_close(routing.weights, 2.5 * chosen / chosen.sum(1, keepdim=True))
    raw = route(logits, bias, k, renormalize=False).weights
    torch.testing.assert_close(raw, chosen)


@pytest.mark.parametrize(("T", "E", "k"), [(300, 8, 2), (100, 64, 6), (30, 896, 16), (5, 4, 4)])
@pytest.mark.parametrize("levels", [1, 2, 7])
def test_ties_go_to_the_lower_expert_index(T, E, k, levels):
    logits = torch.randint(levels, (T, E)).float()
    bias = torch.zeros(E)
    routing = route(logits, bias, k)
    assert torch.equal(routing.ids, torch.tensor(routes_by_hand(torch.sigmoid(logits), k)))


def test_saturated_scores_tie_and_still_give_distinct_experts():
    routing = route(torch.full((4, 40), 60.0), torch.zeros(40), 7)
    assert routing.ids.tolist() == [list(range(7))] * 4
    torch.testing.assert_close(routing.weights, torch.full((4, 7), 1 / 7))


def test_cutoff_is_the_first_biased_score_left_out():
    logits, bias = torch.randn(20, 9), torch.randn(9)
    ranked = (torch.sigmoid(logits) + bias).sort(dim=1, descending=True).values
    for k in (1, 4, 8):
        assert torch.equal(route(logits, bias, k).cutoff, ranked[:, k])
    assert (route(logits, bias, 9).cutoff == -torch.inf).all()


def test_gradients_reach_the_logits_but_neither_bias_nor_cutoff():
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: route(z, bias.detach(), 3, scaling_factor=1.7).weights, logits)
    routing = route(logits, bias, 3)
    assert not routing.cutoff.requires_grad
    routing.weights.square().sum().backward()
    assert bias.grad is None
    assert (logits.grad != 0).sum(1).tolist() == [3] * 5


def test_scores_that_underflow_give_no_weight_instead_of_nan():
    routing = route(torch.full((2, 4), -200.0), torch.zeros(4), 2)
    assert (routing.weights == 0).all()


def test_a_nan_in_the_logits_reaches_the_weights():
    logits = torch.zeros(1, 6)
    logits[0, 4] = torch.nan
    assert torch.isnan(route(logits, torch.zeros(6), 2).weights).any()


def test_no_tokens_route_nowhere():
    routing = route(torch.empty(0, 5), torch.zeros(5), 2)
    assert (routing.ids.shape, routing.weights.shape, routing.cutoff.shape) == ((0, 2), (0, 2), (0,))


def test_an_earlier_decision_is_obeyed_whatever_scores_and_bias_say_now():
    logits = torch.randn(12, 7, dtype=torch.float64)
    before = route(logits, torch.zeros(7, dtype=torch.float64), 3)
    against = torch.zeros(7, dtype=torch.float64).index_fill_(0, before.ids[0], -9.0)
    anew = route(logits, against, 3, scaling_factor=2.0)
    again = route(logits, against, 3, scaling_factor=2.0, chosen=(before.ids, before.cutoff))
    assert not torch.equal(anew.ids, before.ids)
    assert torch.equal(again.ids, before.ids)
    assert torch.equal(again.cutoff, before.cutoff)
    torch.testing.assert_close(again.weights, 2 * before.weights)


def test_bad_router_input_is_named():
    with pytest.raises(InvalidInput, match=r"bias is \(4,\)"):
        route(torch.zeros(3, 5), torch.zeros(4), 2)
    with pytest.raises(InvalidInput, match=r"logits are torch.bfloat16.*want float32"):
        route(torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(5), 2)
    for k in (0, 6):
        with pytest.raises(InvalidInput, match=f"k is {k}; it must lie between 1 and the 5"):
            route(torch.zeros(3, 5), torch.zeros(5), k)
    ids, cutoff = route(torch.zeros(4, 5), torch.zeros(5), 2)[::3]
    with pytest.raises(InvalidInput, match=r"chosen ids are \(4, 2\).*want \(3, 2\) and \(3,\)"):
        route(torch.zeros(3, 5), torch.zeros(5), 2, chosen=(ids, cutoff))


# ---------------------------------------------------------------------------------------------------- plan


@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 9), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_plan_sorts_assignments_by_expert_token_and_slot(T, k, E, seed):
    ids = torch.randint(E, (T, k), generator=torch.Generator().manual_seed(seed))
    expected = sorted((int(ids[t, s]), t, s) for t in range(T) for s in range(k))
    p = plan(ids, E)
    assert [(int(ids.flatten()[a]), a // k, a % k) for a in p.order.tolist()] == expected
    assert p.tokens.tolist() == [t for _, t, _ in expected]
    assert all(p.order[p.rows[t, s]] == t * k + s for t in range(T) for s in range(k))
    assert p.offsets.dtype == torch.int32
    assert p.offsets.tolist() == [sum(e < bound for e, _, _ in expected) for bound in range(E + 1)]
    assert p.load.tolist() == [sum(e == expert for e, _, _ in expected) for expert in range(E)]


def test_an_expert_id_out_of_range_is_named():
    with pytest.raises(InvalidInput, match="ids reach from 0 to 4; want 0 to 3"):
        plan(torch.tensor([[0, 4]]), 4)
    with pytest.raises(InvalidInput, match="ids reach from -1 to 2"):
        plan(torch.tensor([[-1, 2]]), 4)
    with pytest.raises(InvalidInput, match=r"\(2,\) torch.int64; want \[T, k\]"):
        plan(torch.tensor([1, 2]), 4)


# ---------------------------------------------------------------------------------------------------- experts

UNITS = {
    "situ": lambda g, u: 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25),
    "swiglu": lambda g, u: g * torch.sigmoid(g) * u,
    "glu": lambda g, u: torch.sigmoid(g) * u,
}
# T, k, E, l, F
SHAPES = {
    "plain": (40, 2, 8, 16, 24),
    "odd widths": (40, 3, 5, 7, 9),
    "more experts than rows": (3, 2, 20, 8, 8),
    "every expert": (11, 4, 4, 8, 16),
    "one token": (1, 2, 3, 16, 8),
    "one expert": (9, 1, 1, 8, 8),
    "no token": (0, 2, 4, 8, 16),
}


def distinct_ids(T: int, k: int, E: int) -> torch.Tensor:
    return torch.rand(T, E).argsort(dim=1)[:, :k]


def case(
    T: int, k: int, E: int, width: int, F: int, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """x, weights, w1, w3, w2; the router weights are at least fp32, as `route` makes them."""
    p = torch.rand(T, k, dtype=torch.promote_types(dtype, torch.float32))
    x = torch.randn(T, width).to(dtype)
    w1, w3, w2 = torch.randn(E, F, width), torch.randn(E, F, width), torch.randn(E, width, F)
    return [x, p, *((w / w.shape[2] ** 0.5).to(dtype) for w in (w1, w3, w2))]


def by_token_and_slot(ids, x, p, w1, w3, w2, kind="situ"):
    """Equation 11 with the weights of each (token, slot) laid out: no plan, no groups, no order of rows."""
    gate = torch.einsum("tkfl,tl->tkf", w1[ids], x)
    up = torch.einsum("tkfl,tl->tkf", w3[ids], x)
    return torch.einsum("tk,tklf,tkf->tl", p, w2[ids], UNITS[kind](gate, up))


def output_and_gradients(function, inputs, d_out):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(d_out.to(out.dtype))
    return [out, *(leaf.grad for leaf in leaves)]


def assert_equals_the_sum(ids, inputs, limit, kind="situ", implementation="eager"):
    E = inputs[2].shape[0]
    d_out = torch.randn_like(inputs[0])
    actual = output_and_gradients(
        lambda x, p, w1, w3, w2: expert_ffn(
            x, p, plan(ids, E), w1, w3, w2, Activation(kind), implementation=implementation
        ),
        inputs,
        d_out,
    )
    expected = output_and_gradients(
        lambda *leaves: by_token_and_slot(ids, *leaves, kind), [x.double() for x in inputs], d_out.double()
    )
    for name, mine, oracle, like in zip(
        ("u", "dx", "dp", "dw1", "dw3", "dw2"), actual, expected, [inputs[0], *inputs], strict=True
    ):
        assert mine.dtype == like.dtype, name
        assert mine.shape == oracle.shape, name
        assert relative_error(mine, oracle) < limit, name


@pytest.mark.parametrize("implementation", ["reference", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", UNITS)
def test_output_and_all_gradients_equal_the_sum_in_float64(implementation, shape, kind):
    T, k, E, width, F = SHAPES[shape]
    assert_equals_the_sum(
        distinct_ids(T, k, E), case(T, k, E, width, F), 1e-13, kind=kind, implementation=implementation
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 1.5e-2)])
def test_lower_precisions_equal_the_sum_within_their_rounding(shape, dtype, limit):
    T, k, E, width, F = SHAPES[shape]
    assert_equals_the_sum(distinct_ids(T, k, E), case(T, k, E, width, F, dtype), limit)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "no token"])
@pytest.mark.parametrize("kind", UNITS)
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 1.5e-2)]
)
def test_the_form_for_few_tokens_equals_the_sum(shape, kind, dtype, limit):
    T, k, E, width, F = SHAPES[shape]
    ids, (x, p, w1, w3, w2) = distinct_ids(T, k, E), case(T, k, E, width, F, dtype)
    out = expert_ffn_few(x, Routing(ids, p, p, p), w1, w3, w2, Activation(kind))
    assert out.dtype == dtype
    expected = by_token_and_slot(ids, *(leaf.double() for leaf in (x, p, w1, w3, w2)), kind)
    assert relative_error(out, expected) < limit


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_all_tokens_to_one_expert_leave_the_others_without_gradient(dtype, limit):
    ids = torch.full((30, 1), 3)
    inputs = case(30, 1, 6, 8, 16, dtype)
    assert_equals_the_sum(ids, inputs, limit)
    _, _, _, *grads = output_and_gradients(
        lambda x, p, *w: expert_ffn(x, p, plan(ids, 6), *w, Activation()), inputs, torch.ones(30, 8)
    )
    for grad in grads:
        assert (grad[torch.arange(6) != 3] == 0).all()


def test_gradcheck_of_the_cpu_path():
    ids = distinct_ids(5, 2, 3)
    inputs = [x.requires_grad_() for x in case(5, 2, 3, 4, 3)]
    assert torch.autograd.gradcheck(
        lambda x, p, w1, w3, w2: expert_ffn(x, p, plan(ids, 3), w1, w3, w2, Activation()), inputs
    )


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_router_gradient_is_right_where_the_router_weight_is_zero(dtype, limit):
    """A form that divides the activation's gradient by p gives NaN here."""
    ids, inputs = distinct_ids(20, 3, 6), case(20, 3, 6, 8, 16, dtype)
    inputs[1][::2] = 0
    inputs[1][:, 1] = 0
    assert_equals_the_sum(ids, inputs, limit)


def test_router_gradient_equals_the_expert_outputs_times_the_upstream_gradient():
    ids, (x, p, w1, w3, w2) = distinct_ids(12, 2, 4), case(12, 2, 4, 8, 16)
    p.requires_grad_()
    d_out = torch.randn_like(x)
    expert_ffn(x, p, plan(ids, 4), w1, w3, w2, Activation()).backward(d_out)
    for slot in range(2):
        alone = torch.zeros_like(p).index_fill_(1, torch.tensor(slot), 1.0).detach()
        outputs = by_token_and_slot(ids, x, alone, w1, w3, w2)
        torch.testing.assert_close(p.grad[:, slot], (d_out * outputs).sum(1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_calls_give_equal_bits(dtype):
    ids, inputs = distinct_ids(300, 4, 8), case(300, 4, 8, 16, 32, dtype)
    d_out = torch.randn_like(inputs[0])
    runs = [
        output_and_gradients(lambda x, p, *w: expert_ffn(x, p, plan(ids, 8), *w, Activation()), inputs, d_out)
        for _ in range(3)
    ]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_combine_adds_in_the_order_of_the_slots():
    ids = torch.tensor([[2, 0, 1], [0, 1, 2], [1, 2, 0]])
    p = plan(ids, 3)
    rows = torch.empty(9, 4)
    rows[p.rows.flatten()] = torch.tensor([1e8, 1.0, -1e8] * 3)[:, None]
    assert (combine(rows, p, torch.ones(3, 3)) == 0).all()  # (1e8 + 1) - 1e8; any order with 1 last gives 1
    rows[p.rows.flatten()] = torch.tensor([1e8, -1e8, 1.0] * 3)[:, None]
    assert (combine(rows, p, torch.ones(3, 3)) == 1).all()


def test_combine_of_half_precision_rows_is_in_float32():
    ids = torch.tensor([[0, 1, 2]])
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16).expand(3, 8).contiguous()
    u = combine(rows, plan(ids, 3), torch.tensor([[1.0, 1.0, 1 + 2**-12]]))
    assert u.dtype == torch.float32
    assert (u == 258 + 2**-12).all()  # bf16 would stay at 256, and lose the weight's last bit


def test_combine_without_weights_is_the_adjoint_of_the_gather():
    ids = distinct_ids(10, 3, 6)
    p = plan(ids, 6)
    x, rows = torch.randn(10, 5, dtype=torch.float64), torch.randn(30, 5, dtype=torch.float64)
    torch.testing.assert_close((x[p.tokens] * rows).sum(), (x * combine(rows, p)).sum())


@pytest.mark.parametrize("recompute", [True, False])
def test_backward_keeps_the_arguments_and_at_most_gate_and_up(recompute):
    kept: list[torch.Tensor] = []
    inputs = [x.requires_grad_() for x in case(64, 4, 8, 16, 32, torch.float32)]
    x, p, *w = inputs
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        expert_ffn(x, p, plan(distinct_ids(64, 4, 8), 8), *w, Activation(), recompute=recompute)
    more = [tuple(t.shape) for t in kept if t.data_ptr() not in {a.data_ptr() for a in inputs}]
    assert more == ([] if recompute else [(256, 32)] * 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_recomputing_gate_and_up_changes_no_bit(dtype):
    ids, inputs = distinct_ids(60, 3, 8), case(60, 3, 8, 16, 32, dtype)
    d_out = torch.randn_like(inputs[0])
    again, kept = (
        output_and_gradients(
            lambda x, p, *w, r=r: expert_ffn(x, p, plan(ids, 8), *w, Activation(), recompute=r), inputs, d_out
        )
        for r in (True, False)
    )
    assert all(torch.equal(a, b) for a, b in zip(again, kept, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_awkward_layouts_of_the_arguments_change_nothing(dtype, monkeypatch):
    """Rows of a wider tensor, weights that start in the middle of a 16-byte word, a broadcast gradient."""

    def aligned_only(left, right, offs):
        assert left.data_ptr() % 16 == right.data_ptr() % 16 == 0  # what GPUs load at a time
        return torch.nn.functional.grouped_mm(left, right, offs=offs)

    monkeypatch.setattr("openk3.ops.moe.grouped.grouped_mm", aligned_only)
    ids, inputs = distinct_ids(20, 2, 4), case(20, 2, 4, 8, 16, dtype)
    layouts = []
    for tensor in inputs:
        buffer = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
        buffer[1:] = tensor.flatten()
        layouts.append(buffer[1:].view(tensor.shape))
    layouts[0] = torch.cat([inputs[0], inputs[0]], dim=1)[:, 8:]

    def grads(tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        expert_ffn(leaves[0], leaves[1], plan(ids, 4), *leaves[2:], Activation()).sum().backward()
        return [leaf.grad for leaf in leaves]

    for awkward, plain in zip(grads(layouts), grads(inputs), strict=True):
        assert relative_error(awkward, plain) < (1e-6 if dtype == torch.float32 else 2e-2)


@given(st.integers(0, 12), st.integers(1, 3), st.integers(3, 6), st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_sizes_equal_the_sum(T, k, E, width, F):
    torch.manual_seed(0)
    ids = distinct_ids(T, k, E)
    assert_equals_the_sum(ids, case(T, k, E, width, F), 1e-12)
    assert_equals_the_sum(ids, case(T, k, E, width, F, torch.float32), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNITS)
def test_a_full_step_of_the_small_model_equals_the_sum(kind):
    ids, inputs = distinct_ids(2048, 4, 32), case(2048, 4, 32, 96, 64)
    assert_equals_the_sum(ids, inputs, 1e-13, kind=kind)
    assert_equals_the_sum(ids, [x.float() for x in inputs], 3e-6, kind=kind)


def test_wrong_arguments_are_named():
    ids, (x, p, w1, w3, w2) = distinct_ids(6, 2, 3), case(6, 2, 3, 4, 8, torch.float32)
    routes = plan(ids, 3)
    with pytest.raises(InvalidInput, match=r"weights is \(6, 1\).*\(6, 2\)"):
        expert_ffn(x, p[:, :1], routes, w1, w3, w2, Activation())
    with pytest.raises(InvalidInput, match=r"plan.offsets is \(4,\).*\(3,\)"):
        expert_ffn(x, p, routes, w1[:2], w3[:2], w2[:2], Activation())
    with pytest.raises(InvalidInput, match=r"w2 is \(3, 8, 4\).*\(3, 4, 8\)"):
        expert_ffn(x, p, routes, w1, w3, w2.transpose(1, 2), Activation())
    with pytest.raises(InvalidInput, match=r"w3 is torch.float64, x is torch.float32"):
        expert_ffn(x, p, routes, w1, w3.double(), w2, Activation())
    with pytest.raises(KernelUnavailable, match="widths that 8 divides"):
        expert_ffn(x, p, routes, w1, w3, w2, Activation(), implementation="triton")


def test_an_unknown_or_impossible_activation_is_refused():
    with pytest.raises(InvalidInput, match="'relu'"):
        Activation("relu")
    with pytest.raises(InvalidInput, match="caps must be positive"):
        Activation("situ", gate_cap=0)
