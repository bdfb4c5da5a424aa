"""A mixture's entry: what it makes is what its parts make, and bad input gets an error that names it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.dispatch import triton_problem
from openk3.ops.moe import Counted, route, route_and_project
from openk3.ops.quantile_balance import required_bias_histogram

T, d, E, width, k = 40, 16, 6, 8, 2


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """x, router, down and the balancing bias."""
    make = torch.Generator().manual_seed(0)
    shapes = ((T, d), (E, d), (width, d))
    x, router, down = (torch.randn(*s, generator=make).to(dtype) for s in shapes)
    return [x, router, down, torch.linspace(-0.1, 0.1, E)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bins", [None, 50])
def test_it_is_route_the_products_and_the_counts(masked, bins):
    x, router, down, bias = inputs()
    mask = torch.arange(T) % 3 > 0 if masked else None
    entry = route_and_project(x, router, down, bias, k, counted=Counted(mask, bins), scaling_factor=2.5)
    wanted = route(F.linear(x, router), bias, k, scaling_factor=2.5)
    assert all(map(torch.equal, entry.routing[:4], wanted[:4]))
    assert torch.equal(entry.latent, F.linear(x, down))
    counted = wanted.ids if mask is None else wanted.ids[mask]
    assert torch.equal(entry.load, torch.bincount(counted.flatten(), minlength=E))
    if bins is None:
        assert entry.histogram is None
    else:
        histogram = required_bias_histogram(wanted.scores, wanted.cutoff, bias, token_mask=mask, bins=bins)
        assert torch.equal(entry.histogram, histogram)


def test_half_precision_rows_are_routed_by_fp32_logits():
    x, router, down, bias = inputs(torch.bfloat16)
    entry = route_and_project(x, router, down, bias, k)
    assert torch.equal(entry.routing.scores, torch.sigmoid(F.linear(x.float(), router.float())))
    assert entry.latent.dtype == torch.bfloat16 and entry.load is None


def test_without_a_down_projection_experts_read_the_rows_themselves():
    x, router, _, bias = inputs()
    assert route_and_project(x, router, None, bias, k).latent is x


def test_an_earlier_decision_is_taken():
    x, router, down, bias = inputs()
    first = route_and_project(x, router, down, bias, k).routing
    again = route_and_project(x, router, down, -9 * bias, k, chosen=(first.ids, first.cutoff)).routing
    assert again.ids is first.ids and torch.equal(again.weights, first.weights)


def test_what_does_not_fit_is_refused_by_name():
    x, router, down, bias = inputs()
    wrong = {
        r"router is \(6, 15\)": (x, router[:, 1:], down, bias, k),
        r"down is \(8, 15\)": (x, router, down[:, 1:], bias, k),
        "router is torch.bfloat16": (x, router.bfloat16(), down, bias, k),
        "down is torch.float64": (x, router, down.double(), bias, k),
        r"bias is \(5,\)": (x, router, down, bias[1:], k),
        "k is 7": (x, router, down, bias, 7),
    }
    for message, arguments in wrong.items():
        with pytest.raises(InvalidInput, match=message):
            route_and_project(*arguments)
    for mask in (torch.ones(T - 1, dtype=torch.bool), torch.ones(T)):
        with pytest.raises(InvalidInput, match="token_mask"):
            route_and_project(x, router, down, bias, k, counted=Counted(mask))


FORCED = pytest.param(
    "triton",
    marks=pytest.mark.skipif(
        triton_problem("cpu") is not None or torch.cuda.is_available(), reason="for Triton's interpreter"
    ),
)


@pytest.mark.parametrize("implementation", ["eager", FORCED])
def test_what_kernels_would_read_or_write_out_of_bounds_by_is_refused_for_every_implementation(
    implementation,
):
    x, router, down, bias = inputs()
    ids, cutoff = torch.zeros(T, k, dtype=torch.int64), torch.zeros(T)
    wrong = [
        ("bias is", {"bias": bias[1:]}),
        ("bias is", {"bias": bias[None]}),
        ("one device", {"bias": bias.to("meta")}),
        ("chosen ids", {"chosen": (ids[1:], cutoff)}),
        ("chosen ids", {"chosen": (ids, cutoff[1:])}),
        ("chosen ids", {"chosen": (ids.double(), cutoff)}),
        ("not counted again", {"chosen": (ids, cutoff), "counted": Counted()}),
        ("bins is 0", {"counted": Counted(None, 0)}),
        ("bins is -1", {"counted": Counted(None, -1)}),
        ("token_mask", {"counted": Counted(torch.ones(T, dtype=torch.bool, device="meta"))}),
    ]
    for message, changed in wrong:
        arguments = {"bias": bias, "k": k, **changed}
        with pytest.raises(InvalidInput, match=message):
            route_and_project(x, router, down, **arguments, implementation=implementation)


def test_kernels_that_do_not_take_the_input_are_refused_where_forced():
    x, router, down, bias = inputs()
    for message, arguments in {
        "float64": (x.double(), router.double(), down.double(), bias.double(), k),
        "8 divides": (x, router, down[:5], bias, k),
        "1 experts": (x, router[:1], down, bias[:1], 1),
        "k is 7": (x, router, down, bias, 7),
    }.items():
        with pytest.raises(KernelUnavailable, match=message):
            route_and_project(*arguments, implementation="triton")
