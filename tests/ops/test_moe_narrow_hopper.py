"""The kernels in Gluon that keep their rows, on a CPU: against their equations, nothing read too early."""

from __future__ import annotations

import pytest
import torch
from closeness import relative_error
from gluon_on_cpu import Machine, run
from test_moe import case

from openk3.ops.activation import Activation
from openk3.ops.dispatch import triton_problem
from openk3.ops.moe import plan

pytestmark = pytest.mark.skipif(triton_problem("cpu") is not None, reason="needs the triton package")

UNIT = Activation()


def in_float64(machine: Machine) -> dict[str, object]:
    """SiTU and its derivatives for the card's approximations; everything else is the kernels'."""
    return {
        "unit": lambda gate, up, *more: UNIT(gate, up),
        "_partials": lambda gate, up, *caps: UNIT.partials(gate, up),
    }


def drawn(ids, E, width, F):
    """The plan of `ids`, the first tile of each expert, [x, p, w1, w3, w2], and G, in float64."""
    T, k = ids.shape
    routes = plan(ids, E)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), ((routes.offsets.diff() + 127) // 128).cumsum(0)])
    return routes, starts, case(T, k, E, width, F, torch.float64), torch.randn(T, width, dtype=torch.float64)


def packed(w1, w3, w2):
    from openk3.ops.moe.kernels.narrow import pack

    return (pack(w1, w3, 32), (64, w1.shape[2])), (w2.flatten(0, 1), (w1.shape[2], 32))


def in_lanes_order(w1, w3, w2):
    """Each slab's gate and up, and each slab of w2's columns as rows; lane t has features 8t to 8t + 7."""
    rows = (w.view(len(w), -1, 4, 4, 2, w.shape[-1]).transpose(2, 3) for w in (w1, w3, w2.mT.contiguous()))
    gate, up, down = (w.flatten(2, 4) for w in rows)
    return torch.cat([gate, up], 2).flatten(0, 2), down.flatten(0, 2)


@pytest.mark.skipif(
    triton_problem("cpu") is not None or torch.cuda.is_available(), reason="for the interpreter"
)
@pytest.mark.parametrize("F", [32, 96])
def test_packing_follows_the_lanes(F):
    from openk3.ops.moe.kernels.narrow_hopper import pack

    _, _, *w = case(3, 1, 2, 64, F, torch.float32)
    assert all(map(torch.equal, pack(*w), in_lanes_order(*w)))


def by_row(routes, tensors):
    """x, p, w1, w3 and w2 of each row."""
    x, p, *w = tensors
    expert = torch.searchsorted(routes.offsets, torch.arange(len(routes.tokens)), right=True) - 1
    return x[routes.tokens], p.flatten()[routes.order], *(each[expert] for each in w)


# One slab, as many as there are stages, more; experts without rows, with a whole tile, with one row more.
SLABS = [32, 64, 96, 160]
IDS = torch.cat([torch.full((n,), e) for e, n in ((0, 7), (2, 128), (3, 129))])


@pytest.mark.parametrize("F", SLABS)
def test_forward_is_the_sum_and_reads_nothing_early(F):
    from openk3.ops.moe.kernels.narrow_hopper import forward_hopper

    ids = IDS[torch.randperm(len(IDS))][:, None]
    routes, starts, tensors, _ = drawn(ids, 5, 64, F)
    x, _, w1, w3, w2 = by_row(routes, tensors)
    hidden = UNIT(torch.einsum("rfk,rk->rf", w1, x), torch.einsum("rfk,rk->rf", w3, x))
    exact = torch.einsum("rkf,rf->rk", w2, hidden)
    out = torch.full_like(exact, torch.nan)
    w13, down = packed(*tensors[2:])
    arguments = [tensors[0], routes.tokens, w13, down, out, routes.offsets, starts, 5, F, 4.0, 25.0]
    run(forward_hopper, int(starts[-1]) + 2, arguments, in_float64, WIDTH=64, STAGES=3)
    assert relative_error(out, exact) < 1e-13


@pytest.mark.parametrize("F", SLABS)
def test_backward_is_that_of_the_equations_and_reads_nothing_early(F):
    from openk3.ops.moe.kernels.narrow import Gradients
    from openk3.ops.moe.kernels.narrow_hopper import backward_hopper

    ids = torch.stack([IDS, (IDS + 1) % 5], 1)[torch.randperm(len(IDS))]
    routes, starts, tensors, G = drawn(ids, 5, 64, F)
    x, p, w1, w3, w2 = by_row(routes, tensors)
    g = G[routes.tokens]
    gate, up = (torch.einsum("rfk,rk->rf", w, x) for w in (w1, w3))
    act, by_gate, by_up = UNIT.partials(gate, up)
    by_hidden = torch.einsum("rkf,rk->rf", w2, g)
    d_gate, d_up = (by * by_hidden * p[:, None] for by in (by_gate, by_up))
    d_x = torch.einsum("rfk,rf->rk", w1, d_gate) + torch.einsum("rfk,rf->rk", w3, d_up)
    exact = Gradients(x, g, act * p[:, None], d_gate, d_up, d_x, (act * by_hidden).sum(1))
    made = Gradients(*(torch.full_like(each, torch.nan) for each in exact))
    w13, down = ((w, (rows, 64)) for w, rows in zip(in_lanes_order(*tensors[2:]), (64, 32), strict=True))
    arguments = [tensors[0], G, routes.tokens, w13, down, tensors[1], routes.order, *made]
    arguments += [routes.offsets, starts, 5, F, 4.0, 25.0]
    run(backward_hopper, int(starts[-1]) + 2, arguments, in_float64, WIDTH=64, SHORT=False)
    for name, mine, oracle in zip(Gradients._fields, made, exact, strict=True):
        assert relative_error(mine, oracle) < 1e-13, name
