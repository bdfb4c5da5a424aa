"""The kernels of a mixture's entry in Triton's interpreter: small tiles, so that everything crosses them."""

from __future__ import annotations

import pytest
import torch
from closeness import kept_by, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from openk3.errors import InvalidInput
from openk3.ops.dispatch import triton_problem
from openk3.ops.moe import Counted, plan, route, route_and_project
from openk3.ops.moe.route import Routing
from openk3.ops.quantile_balance import required_bias_histogram

pytestmark = pytest.mark.skipif(
    triton_problem("cpu") is not None or torch.cuda.is_available(), reason="for Triton's interpreter"
)

FP32 = 2e-6
NAMES = ("latent", "weights", "dx", "drouter", "ddown")


@pytest.fixture(autouse=True, scope="module")
def _small_tiles():
    from openk3.ops.moe.kernels import choice, entry_products

    one = {"depth": 8, "warps": 1, "stages": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry_products, "FORWARD", entry_products.Blocks(rows=16, columns=8, **one))
        patch.setattr(choice, "DECIDE", {"SIZE": 256, "ASSIGNMENTS": 32, "num_warps": 1})
        yield


def draw(T: int, d: int, E: int, width: int | None, seed: int = 0) -> list[torch.Tensor]:
    """x, router, down and the bias. Entries are multiples of 1/8: logits are exact in fp32."""
    make = torch.Generator().manual_seed(seed)
    coarse = lambda *shape: torch.randn(*shape, generator=make).mul(8).round() / 8  # noqa: E731
    down = None if width is None else coarse(width, d) / 4
    return [coarse(T, d), coarse(E, d) / 4, down, torch.randn(E, generator=make) / 64]


def run(inputs: list[torch.Tensor], k: int, **options):
    return route_and_project(*inputs, k, implementation="triton", **options)


def oracle(inputs: list[torch.Tensor], ids: torch.Tensor, scale: float, renormalize: bool):
    """latent and weights in float64 as the equations have them, for experts that were chosen."""
    x, router, down, _ = inputs
    scores = torch.sigmoid(x @ router.T).gather(1, ids)
    weights = scores / scores.sum(1, keepdim=True) if renormalize else scores
    return x if down is None else x @ down.T, scale * weights


def with_gradients(forward, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], Routing | None]:
    """latent, weights, and gradients of a fixed random projection of both."""
    leaves = [None if i is None else i.detach().clone().requires_grad_() for i in inputs[:3]]
    latent, weights, routing = forward([*leaves, inputs[3]])
    make = torch.Generator().manual_seed(7)
    loss = 0
    for out in (latent, weights):
        loss = loss + (out * torch.randn(out.shape, generator=make).to(out.dtype)).sum()
    wanted = [leaf for leaf in leaves if leaf is not None]
    return [latent.detach(), weights.detach(), *torch.autograd.grad(loss, wanted)], routing


def assert_right(inputs, k, scale=1.0, renormalize=True, chosen=None, limit=FP32) -> Routing:
    def mine(leaves):
        options = {"scaling_factor": scale, "renormalize": renormalize, "chosen": chosen}
        routing, latent, _, _ = run(leaves, k, **options)
        return latent, routing.weights, routing

    actual, routing = with_gradients(mine, inputs)
    exact = [None if i is None else i.double() for i in inputs]
    expected, _ = with_gradients(
        lambda leaves: (*oracle(leaves, routing.ids, scale, renormalize), None), exact
    )
    for name, a, b in zip(NAMES, actual, expected, strict=False):
        assert a.shape == b.shape, name
        # A single weight, renormalised, is 1: its gradient is 0 but for roundings.
        assert relative_error(a, b) < limit or (a - b).abs().max() < 1e-6, name
    return routing


def assert_chosen_as_equations(inputs, routing: Routing, k: int) -> None:
    """In float64: the k best, and the next; the bias keeps scores of equal logits far apart."""
    x, router, _, bias = (None if i is None else i.double() for i in inputs)
    wanted = route(x @ router.T, bias, k)
    assert torch.equal(routing.ids, wanted.ids)
    assert (routing.cutoff - wanted.cutoff).nan_to_num(nan=0).abs().max() < 1e-6


# T, d, E, l, k
SHAPES = {
    "several tiles of all": (40, 24, 20, 16, 3),
    "every expert": (9, 8, 4, 8, 4),
    "one expert a token": (33, 16, 9, 24, 1),
    "no latent": (20, 16, 12, None, 2),
    "one token": (1, 40, 17, 8, 6),
    "two experts": (7, 8, 2, 40, 1),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("scale", "renormalize"), [(1.0, True), (2.5, True), (2.5, False)])
def test_choice_outputs_and_gradients_are_those_of_the_equations_in_float64(shape, scale, renormalize):
    T, d, E, width, k = SHAPES[shape]
    inputs = draw(T, d, E, width)
    routing = assert_right(inputs, k, scale, renormalize)
    assert_chosen_as_equations(inputs, routing, k)


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 24), st.integers(1, 3), st.integers(2, 24), st.integers(1, 3), st.integers(1, 5))
def test_any_sizes(T, depth, E, widths, k):
    inputs = draw(T, 8 * depth, E, 8 * widths, seed=T + E)
    routing = assert_right(inputs, min(k, E))
    assert_chosen_as_equations(inputs, routing, min(k, E))


def test_two_terms_of_bf16_are_the_gradient_of_the_logits():
    from openk3.ops.moe.kernels.entry_gradients import spread

    ids = torch.stack([torch.randperm(12)[:3] for _ in range(40)])
    values = torch.randn(40, 3)
    terms = spread(ids, values, torch.full((40, 24), 3.0, dtype=torch.bfloat16), 12)
    dense = torch.zeros(40, 12).scatter_(1, ids, values)
    high, low, latent = terms.double().split([12, 12, 24], 1)
    # The interpreter cuts to bf16 where the card rounds: twice 2^-8 instead of twice 2^-9.
    assert ((high + low - dense).abs() <= 2**-15 * dense.abs()).all()
    assert high.count_nonzero() == 120 and (latent == 3).all()


def test_no_token():
    inputs = draw(0, 8, 5, 8)
    (latent, weights, *gradients), _ = with_gradients(
        lambda leaves: (lambda e: (e.latent, e.routing.weights, e.routing))(run(leaves, 2)), inputs
    )
    assert latent.shape == (0, 8) and weights.shape == (0, 2)
    assert all(not g.any() for g in gradients)
    entry = run(inputs, 2, counted=Counted(None, 5))
    assert not entry.load.any() and not entry.histogram.any()


def test_equal_scores_fall_to_the_lower_expert():
    x, router, down, _ = draw(30, 16, 12, 8)
    router[:] = router[:1]
    routing = run([x, router, down, torch.zeros(12)], 3).routing
    assert (routing.ids == torch.arange(3)).all()


def test_saturated_scores_have_finite_weights_and_gradients():
    x, router, down, bias = draw(30, 16, 12, 8)
    actual, _ = with_gradients(
        lambda leaves: (lambda e: (e.latent, e.routing.weights, e.routing))(run(leaves, 3)),
        [x * 100, router * 10, down, bias],
    )
    assert all(part.isfinite().all() for part in actual)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bins", [None, 40])
def test_load_is_counted_exactly_and_the_histogram_but_for_roundings(masked, bins):
    """A score is within a rounding or two of the eager form's: a value on a border may count next to it."""
    inputs = draw(90, 8, 12, 8)
    mask = torch.arange(90) % 3 > 0 if masked else None
    entry = run(inputs, 3, counted=Counted(mask, bins))
    counted = entry.routing.ids if mask is None else entry.routing.ids[mask]
    assert entry.load.dtype == torch.int64
    assert torch.equal(entry.load, torch.bincount(counted.flatten(), minlength=12))
    if bins is None:
        assert entry.histogram is None
        return
    scores = torch.sigmoid(F.linear(*inputs[:2]))
    wanted = required_bias_histogram(scores, entry.routing.cutoff, inputs[3], token_mask=mask, bins=bins)
    assert torch.equal(entry.histogram.sum(1), wanted.sum(1))
    moved = (entry.histogram - wanted).cumsum(1).abs()  # of so many values over each border
    assert entry.histogram.dtype == torch.int64 and moved.sum() <= 2


def test_counting_changes_no_other_bit():
    inputs = draw(60, 16, 20, 8)
    plain, counted = run(inputs, 3), run(inputs, 3, counted=Counted(None, 40))
    for a, b in zip(
        plain.routing[:2] + plain.routing[3:4], counted.routing[:2] + counted.routing[3:4], strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("T", "E", "k"), [(50, 20, 3), (7, 5, 5), (1, 2, 1), (100, 33, 4)])
def test_the_plan_of_its_counts_is_the_plan(T, E, k):
    routing = run(draw(T, 8, E, 8), k).routing
    made, wanted = plan(routing.ids, E, counts=routing.counts), plan(routing.ids, E)
    for name in ("order", "tokens", "rows", "offsets"):
        mine, expected = getattr(made, name), getattr(wanted, name)
        assert mine.dtype == expected.dtype and torch.equal(mine, expected), name


def test_counts_of_other_ids_are_left_unused():
    routing = run(draw(30, 8, 12, 8), 3).routing
    own = torch.where(routing.ids < 6, routing.ids, 0)
    for name in ("order", "tokens", "rows", "offsets"):
        made = getattr(plan(own, 6, counts=routing.counts), name)
        assert torch.equal(made, getattr(plan(own, 6), name)), name


def test_an_earlier_decision_is_taken_with_the_same_bits():
    inputs = draw(30, 16, 12, 8)
    first = run(inputs, 3)
    again = run([*inputs[:3], -inputs[3]], 3, chosen=(first.routing.ids, first.routing.cutoff))
    assert torch.equal(again.routing.weights, first.routing.weights)
    assert torch.equal(again.latent, first.latent)
    assert_right(inputs, 3, 2.5, chosen=(first.routing.ids, first.routing.cutoff))
    with pytest.raises(InvalidInput, match="counted again"):
        run(inputs, 3, chosen=(first.routing.ids, first.routing.cutoff), counted=Counted())


def test_a_token_that_is_not_finite_spoils_no_other():
    x, router, down, bias = draw(40, 16, 20, 8)
    spoiled = x.clone()
    spoiled[5] = torch.nan
    clean, other = run([x, router, down, bias], 3), run([spoiled, router, down, bias], 3)
    rest = torch.arange(40) != 5
    for a, b in ((clean.latent, other.latent), (clean.routing.weights, other.routing.weights)):
        assert torch.equal(a[rest], b[rest])
    assert torch.equal(clean.routing.ids[rest], other.routing.ids[rest])


def test_equal_calls_give_equal_bits():
    inputs = draw(20, 16, 12, 8)
    forward = lambda leaves: (lambda e: (e.latent, e.routing.weights, None))(run(leaves, 3))  # noqa: E731
    (a, _), (b, _) = (with_gradients(forward, inputs) for _ in range(2))
    assert all(map(torch.equal, a, b))


def test_the_backward_keeps_no_logits():
    x, router, down, bias = draw(20, 16, 12, 8)
    leaves = [i.requires_grad_() for i in (x, router, down)]
    kept = kept_by(lambda: run([*leaves, bias], 3))
    assert sum(t.numel() for t in kept) == sum(i.numel() for i in leaves) + 2 * 20 * 3


@pytest.mark.parametrize("chosen", [False, True])
def test_no_gradients_are_made_for_what_has_none(chosen):
    """For ids, counts and the like, nor for a result that nothing reads."""
    x, router, down, bias = draw(20, 16, 12, 8)
    leaves = [i.requires_grad_() for i in (x, router, down)]
    ids = run([*leaves, bias], 3).routing.ids
    operators = torch.ops.openk3
    from openk3.ops.moe.kernels import entry  # noqa: F401

    def made():
        if chosen:
            return operators.weigh_and_project(*leaves, ids, 1.0, True)[:2]
        return operators.route_and_project(*leaves, bias, None, 3, 1.0, True, False, 0)[:2]

    latent, weights = made()
    seeds = [torch.randn_like(latent), torch.randn_like(weights)]
    gradients = torch.ops.openk3.route_and_project_backward
    calls = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append((function.name(), tuple(args[0]) if function.name() == "aten::zeros" else ()))
            return function(*args, **(kwargs or {}))

    with Watch():
        whole = torch.autograd.grad([latent, weights], leaves, seeds, retain_graph=True)
    assert any(name == gradients.default.name() for name, _ in calls)
    assert not [shape for name, shape in calls if name == "aten::zeros"]
    parts = [torch.autograd.grad(y, leaves, s, retain_graph=True) for y, s in zip(made(), seeds, strict=True)]
    for together, *apart in zip(whole, *parts, strict=True):
        torch.testing.assert_close(together, sum(apart))


def test_awkward_layouts_change_nothing():
    inputs = draw(30, 16, 12, 8)
    odd = []
    for tensor in inputs:
        buffer = torch.zeros(tensor.numel() + 1)
        buffer[1:] = tensor.flatten()
        odd.append(buffer[1:].view(tensor.shape))
    odd[0] = torch.cat([inputs[0], inputs[0]], dim=1)[:, 16:]
    forward = lambda leaves: (lambda e: (e.latent, e.routing.weights, None))(run(leaves, 3))  # noqa: E731
    (a, _), (b, _) = (with_gradients(forward, tensors) for tensors in (inputs, odd))
    assert all(map(torch.equal, a, b))


def test_the_operators_pass_opcheck():
    from openk3.ops.moe.kernels import entry, plan  # noqa: F401

    x, router, down, bias = draw(6, 8, 5, 8)
    leaves = [i.requires_grad_() for i in (x, router, down)]
    mask = torch.arange(6) > 1
    for tail in ((2, 2.5, True, True, 7), (2, 1.0, False, False, 0)):
        torch.library.opcheck(torch.ops.openk3.route_and_project.default, (*leaves, bias, mask, *tail))
    routing = run([x, router, down, bias], 2).routing
    torch.library.opcheck(torch.ops.openk3.weigh_and_project.default, (*leaves, routing.ids, 2.5, True))
    torch.library.opcheck(
        torch.ops.openk3.dispatch_plan_of_counts.default, (routing.ids, *routing.counts[:2])
    )


def test_it_compiles_without_a_break():
    inputs = draw(6, 8, 5, 8)

    def layer(x, router, down, bias):
        routing, latent, load, histogram = run([x, router, down, bias], 2, counted=Counted(None, 7))
        return latent, routing.weights, load, histogram, plan(routing.ids, 5, counts=routing.counts).order

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, compiled(*inputs), layer(*inputs)))
