"""The routed experts' kernels in Triton's interpreter: small tiles, so that experts cross them."""

from __future__ import annotations

import pytest
import torch
from closeness import kept_by, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from test_moe import UNITS, by_token_and_slot, case, distinct_ids, output_and_gradients

from openk3.errors import KernelUnavailable
from openk3.ops.dispatch import triton_problem
from openk3.ops.moe import Activation, DispatchPlan, expert_ffn, plan
from openk3.ops.moe.route import select_experts

pytestmark = pytest.mark.skipif(
    triton_problem("cpu") is not None or torch.cuda.is_available(), reason="for Triton's interpreter"
)

FP32 = 2e-6
NAMES = ("u", "dx", "dp", "dw1", "dw3", "dw2")


@pytest.fixture(autouse=True, scope="module")
def _small_tiles():
    from openk3.ops.moe.kernels import gradients, narrow, plan, products, wide

    one = {"depth": 8, "warps": 1, "stages": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "FEW", products.Tiles(rows=8, tail=4, features=8, **one))
        patch.setattr(products, "MANY", products.Tiles(rows=8, tail=0, features=16, **one))
        patch.setattr(gradients, "HIDDEN", products.Tiles(rows=8, tail=0, features=8, **one))
        patch.setattr(gradients, "ROWS", products.Tiles(rows=4, tail=0, features=16, **one))
        patch.setattr(gradients, "TWO_WEIGHTS", gradients.Blocks(height=8, width=16, **one))
        patch.setattr(gradients, "ONE_WEIGHT", gradients.Blocks(height=8, width=8, **one))
        patch.setattr(narrow, "FORWARD", narrow.Slabs(rows=8, features=8, warps=1, stages=1))
        patch.setattr(narrow, "BACKWARD", narrow.Slabs(rows=4, features=16, warps=1, stages=1))
        patch.setattr(wide, "HIDDEN", products.Tiles(rows=8, tail=0, features=16, **one))
        patch.setattr(wide, "PARTS", 2)
        patch.setattr(wide, "ROWS", products.Tiles(rows=8, tail=0, features=16, **one))
        patch.setattr(plan, "BLOCK", 16)
        patch.setattr(plan, "TURN", 8)
        yield


@pytest.fixture(params=["by product", "rows stay", "wide tiles"])
def form(request, monkeypatch):
    """The forms of the products, whatever would be chosen."""
    from openk3.ops.moe.kernels import narrow, wide

    monkeypatch.setattr(narrow, "suits", lambda rows, w1: request.param == "rows stay")
    monkeypatch.setattr(wide, "suits", lambda rows, w1: request.param == "wide tiles" and rows > 0)


def kernel(ids: torch.Tensor, experts: int, kind: str = "situ"):
    """`expert_ffn` as a function of its tensors."""
    routes = plan(ids, experts)
    return lambda x, p, *w: expert_ffn(x, p, routes, *w, Activation(kind), implementation="triton")


def assert_equals_the_sum(ids, inputs, kind="situ", limit=FP32):
    d_out = torch.randn_like(inputs[0])
    actual = output_and_gradients(kernel(ids, len(inputs[2]), kind), inputs, d_out)
    expected = output_and_gradients(
        lambda *leaves: by_token_and_slot(ids, *leaves, kind), [x.double() for x in inputs], d_out.double()
    )
    for name, mine, oracle, like in zip(NAMES, actual, expected, [inputs[0], *inputs], strict=True):
        assert (mine.dtype, mine.shape) == (like.dtype, oracle.shape), name
        assert relative_error(mine, oracle) < limit, name


# T, k, E, l, F
SHAPES = {
    "several tiles an expert": (40, 2, 3, 16, 24),
    "widths across depths and slabs": (20, 3, 5, 40, 8),
    "more experts than rows": (3, 2, 20, 8, 8),
    "every expert": (11, 4, 4, 8, 16),
    "one token": (1, 2, 3, 16, 8),
    "one expert": (9, 1, 1, 8, 8),
    "no token": (0, 2, 4, 8, 16),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", UNITS)
@pytest.mark.usefixtures("form")
def test_output_and_all_gradients_equal_the_sum_in_float64(shape, kind):
    T, k, E, width, F = SHAPES[shape]
    assert_equals_the_sum(distinct_ids(T, k, E), case(T, k, E, width, F, torch.float32), kind)


@pytest.mark.parametrize("rows", [7, 8, 9, 11, 12, 13, 300])
@pytest.mark.usefixtures("form")
def test_one_expert_with_all_tokens_leaves_the_others_zero(rows):
    """Across the tile's rows, half its tail, its tail and, with 300, the form for many rows."""
    ids, inputs = torch.full((rows, 1), 1), case(rows, 1, 3 if rows > 20 else 4, 8, 8, torch.float32)
    if rows == 300:
        inputs[2:] = [w[:1] for w in inputs[2:]]
        ids = torch.zeros_like(ids)
    assert_equals_the_sum(ids, inputs)
    _, _, _, *grads = output_and_gradients(kernel(ids, len(inputs[2])), inputs, torch.ones(rows, 8))
    for grad in grads:
        assert (grad[torch.arange(len(grad)) != int(ids[0])] == 0).all()


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 30), st.integers(1, 4), st.integers(4, 9), st.integers(1, 3), st.integers(1, 3))
def test_any_sizes_equal_the_sum(T, k, E, widths, hidden):
    torch.manual_seed(T + k)
    inputs = case(T, k, E, 8 * widths, 8 * hidden, torch.float32)
    assert_equals_the_sum(distinct_ids(T, k, E), inputs, limit=1e-4)  # one d p may cancel


@pytest.mark.usefixtures("form")
def test_router_gradient_is_right_where_the_router_weight_is_zero():
    ids, inputs = distinct_ids(12, 3, 6), case(12, 3, 6, 8, 16, torch.float32)
    inputs[1][::2] = 0
    assert_equals_the_sum(ids, inputs)


@pytest.mark.usefixtures("form")
def test_saturated_units_and_tiny_ones_have_right_gradients():
    ids, inputs = distinct_ids(12, 2, 3), case(12, 2, 3, 8, 16, torch.float32)
    inputs[0][::3] *= 1e-4
    inputs[0][1::3] *= 100
    assert_equals_the_sum(ids, inputs, limit=1e-5)


@pytest.mark.usefixtures("form")
def test_rows_of_other_experts_do_not_leak():
    """A token that is not finite spoils its own output and the gradients of its experts' weights, no more."""
    ids, inputs = torch.tensor([[0], [1], [2]]).repeat(5, 1), case(15, 1, 3, 8, 8, torch.float32)
    inputs[0][1::3] = torch.inf  # those of expert 1
    u, d_x, _, *d_w = output_and_gradients(kernel(ids, 3), inputs, torch.ones(15, 8))
    fine = ids[:, 0] != 1
    assert u[fine].isfinite().all() and d_x[fine].isfinite().all()
    for gradient in d_w:
        assert gradient[[0, 2]].isfinite().all()


@pytest.mark.usefixtures("form")
def test_half_precision_goes_in_and_comes_out():
    """fp16: the interpreter reads bf16 wrongly as an operand."""
    ids, inputs = distinct_ids(20, 2, 4), case(20, 2, 4, 16, 24, torch.float16)
    assert_equals_the_sum(ids, inputs, limit=2e-3)


@pytest.mark.usefixtures("form")
def test_equal_calls_give_equal_bits():
    ids, inputs = distinct_ids(30, 3, 5), case(30, 3, 5, 16, 16, torch.float32)
    runs = [output_and_gradients(kernel(ids, 5), inputs, torch.ones(30, 16)) for _ in range(2)]
    assert all(map(torch.equal, *runs))


@pytest.mark.usefixtures("form")
def test_the_backward_keeps_the_arguments_and_the_plan():
    inputs = [x.requires_grad_() for x in case(10, 2, 4, 8, 16, torch.float32)]
    routes = plan(distinct_ids(10, 2, 4), 4)
    known = [*inputs, routes.order, routes.tokens, routes.rows, routes.offsets]
    kept = kept_by(
        lambda: expert_ffn(*inputs[:2], routes, *inputs[2:], Activation(), implementation="triton")
    )
    assert {t.data_ptr() for t in kept} <= {t.data_ptr() for t in known}


@pytest.mark.usefixtures("form")
def test_awkward_layouts_change_nothing():
    ids, inputs = distinct_ids(10, 2, 4), case(10, 2, 4, 8, 16, torch.float32)
    odd = []
    for tensor in inputs:
        buffer = torch.zeros(tensor.numel() + 1)
        buffer[1:] = tensor.flatten()
        odd.append(buffer[1:].view(tensor.shape))
    odd[0] = torch.cat([inputs[0], inputs[0]], dim=1)[:, 8:]
    broadcast = torch.ones(1, 8).expand(10, 8)
    runs = [output_and_gradients(kernel(ids, 4), tensors, broadcast) for tensors in (inputs, odd)]
    assert all(map(torch.equal, *runs))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 40), st.integers(0, 10**6))
def test_the_plan_by_counting_is_the_stable_sort(T, k, E, seed):
    from openk3.ops.moe.kernels.plan import plan_tensors

    ids = torch.randint(E, (T, k), generator=torch.Generator().manual_seed(seed))
    wanted = plan(ids, E)
    made = plan_tensors(ids, E)
    for name, mine in zip(("order", "tokens", "rows", "offsets"), made, strict=True):
        expected = getattr(wanted, name)
        assert mine.dtype == expected.dtype and torch.equal(mine, expected), name


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 6), st.integers(1, 40), st.integers(0, 10**6), st.booleans())
def test_the_choice_is_that_of_the_sort_ties_included(T, E, seed, tied):
    from openk3.ops.moe.kernels.choice import select_experts as chosen

    make = torch.Generator().manual_seed(seed)
    biased = torch.randint(-3, 4, (T, E), generator=make) / 4 if tied else torch.randn(T, E, generator=make)
    for k in {1, (E + 1) // 2, E}:
        assert all(map(torch.equal, chosen(biased, k), select_experts(biased, k))), k


def test_the_choice_takes_what_is_not_a_number_first_and_infinities_in_order():
    from openk3.ops.moe.kernels.choice import select_experts as chosen

    biased = torch.tensor([[-torch.inf, 1.0, torch.nan, torch.inf, -0.0, 0.0]])
    ids, cutoff = chosen(biased, 5)
    assert ids.tolist() == [[2, 3, 1, 4, 5]] and cutoff.item() == -torch.inf


@pytest.mark.parametrize("F", [8, 12, 24])
def test_packing_puts_gate_and_up_of_each_slab_side_by_side_and_zeros_beyond(F):
    from openk3.ops.moe.kernels.narrow import pack

    w1, w3 = torch.randn(2, 3, F, 5)
    slabs = -(-F // 8)
    packed = pack(w1, w3, 8).view(3, slabs, 2, 8, 5)
    for side, w in enumerate((w1, w3)):
        flat = packed[:, :, side].flatten(1, 2)
        assert torch.equal(flat[:, :F], w) and (flat[:, F:] == 0).all()


def test_rows_stay_where_experts_are_narrow_and_rows_many():
    from openk3.ops.moe.kernels import narrow

    w = torch.empty(2, 8, 256, dtype=torch.bfloat16)
    assert narrow.suits(513, w) and not narrow.suits(512, w)
    assert not narrow.suits(513, w.float()) and not narrow.suits(513, torch.empty(2, 8, 264).bfloat16())


def test_wide_tiles_are_for_wide_experts_with_many_rows(monkeypatch):
    from openk3.ops.moe.kernels import wide

    w = torch.empty(2, 512, 1024, dtype=torch.bfloat16)
    monkeypatch.setattr(wide, "LEAST", None)
    assert not wide.suits(513, w)
    monkeypatch.setattr(wide, "LEAST", 512)
    assert wide.suits(513, w) and not wide.suits(512, w)
    assert not wide.suits(513, w[:, :504]) and not wide.suits(513, w[:, :, :504])


def test_tiles_cover_each_experts_rows_once():
    from openk3.ops.moe.kernels.plan import most_tiles, tile_starts

    offsets = torch.tensor([0, 0, 5, 5, 13, 30, 30], dtype=torch.int32)
    starts = tile_starts(offsets, 8)
    assert starts.tolist() == [0, 0, 1, 1, 2, 5, 5]
    assert starts[-1] <= most_tiles(30, 6, 8)


def test_the_operators_pass_opcheck():
    from openk3.ops.moe.kernels import choice, operator  # noqa: F401

    ids = distinct_ids(6, 2, 3)
    routes = plan(ids, 3)
    x, p, *w = (t.requires_grad_() for t in case(6, 2, 3, 8, 8, torch.float32))
    tables = routes.order, routes.tokens, routes.rows, routes.offsets
    torch.library.opcheck(torch.ops.openk3.expert_ffn.default, (x, p, *tables, *w, "situ", 4.0, 25.0))
    torch.library.opcheck(torch.ops.openk3.dispatch_plan.default, (ids, 3))
    torch.library.opcheck(torch.ops.openk3.select_experts.default, (torch.randn(4, 5), 2))


def test_what_kernels_do_not_take_is_refused_where_they_are_forced():
    ids = distinct_ids(6, 2, 3)
    for width, dtype, message in ((12, torch.float32, "8 divides"), (8, torch.float64, "float64")):
        with pytest.raises(KernelUnavailable, match=message):
            kernel(ids, 3)(*case(6, 2, 3, width, 8, dtype))


@pytest.mark.usefixtures("form")
def test_it_compiles_without_a_break():
    from openk3.ops.moe.kernels.choice import select_experts as chosen
    from openk3.ops.moe.kernels.plan import plan_tensors

    def layer(x, p, scores, *w):
        routes = DispatchPlan(*plan_tensors(chosen(scores, 2)[0], 3))
        return expert_ffn(x, p, routes, *w, Activation(), implementation="triton")

    x, p, *w = case(6, 2, 3, 8, 8, torch.float32)
    arguments = x, p, torch.randn(6, 3), *w
    assert torch.equal(
        torch.compile(layer, backend="aot_eager", fullgraph=True)(*arguments), layer(*arguments)
    )
