"""The kernels in Gluon that keep their rows, on a CPU: against their equations, whoever is ahead."""

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
        "unit": lambda gate, up, gate_cap, up_cap, unit, coarse: UNIT(gate, up),
        "_partials": lambda gate, up, gate_cap, up_cap: UNIT.partials(gate, up),
    }


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


# Experts without rows, with a whole tile, with one row more.
IDS = torch.cat([torch.full((n,), e) for e, n in ((0, 7), (2, 128), (3, 129))])
# One slab, as many as the backward has stages, as the forward has, more.
SLABS = [32, 64, 96, 160]


def drawn(ids, width, F):
    """The plan of `ids` for 5 experts, its tiles of 128 rows as `few.list_tiles` has them, and tensors."""
    T, k = ids.shape
    routes = plan(ids, 5)
    tiles = [
        (e, row, min(128, int(routes.offsets[e + 1]) - row))
        for e in range(5)
        for row in range(int(routes.offsets[e]), int(routes.offsets[e + 1]), 128)
    ]
    most = len(tiles) + 2
    listed = torch.full((3, most), -1)
    listed[:, : len(tiles)] = torch.tensor(tiles).T
    listed = torch.cat([listed.flatten(), torch.tensor([len(tiles)])])
    tensors = case(T, k, 5, width, F, torch.float64)
    return routes, (listed, most), tensors, torch.randn(T, width, dtype=torch.float64)


def descriptors(w1, w3, w2):
    return [(w, (rows, 64)) for w, rows in zip(in_lanes_order(w1, w3, w2), (64, 32), strict=True)]


@pytest.mark.parametrize("programs", [1, 2, 7])
@pytest.mark.parametrize("F", SLABS)
def test_forward_is_the_sum_and_reads_nothing_early(F, programs):
    from openk3.ops.moe.kernels.narrow_hopper import forward_hopper

    ids = IDS[torch.randperm(len(IDS))][:, None]
    routes, tiles, tensors, _ = drawn(ids, 64, F)
    x, _, w1, w3, w2 = by_row(routes, tensors)
    hidden = UNIT(torch.einsum("rfk,rk->rf", w1, x), torch.einsum("rfk,rk->rf", w3, x))
    exact = torch.einsum("rkf,rf->rk", w2, hidden)
    for seed in range(3):
        out = torch.full_like(exact, torch.nan)
        arguments = [tensors[0], routes.tokens, *descriptors(*tensors[2:]), out, *tiles, F, 4.0, 25.0]
        run(forward_hopper, programs, arguments, in_float64, seed=seed, WIDTH=64)
        assert relative_error(out, exact) < 1e-13


@pytest.mark.parametrize("programs", [1, 2, 7])
@pytest.mark.parametrize("F", SLABS)
def test_backward_is_that_of_the_equations_and_reads_nothing_early(F, programs):
    from openk3.ops.moe.kernels.narrow import Gradients
    from openk3.ops.moe.kernels.narrow_hopper import backward_hopper

    ids = torch.stack([IDS, (IDS + 1) % 5], 1)[torch.randperm(len(IDS))]
    routes, tiles, tensors, G = drawn(ids, 64, F)
    x, p, w1, w3, w2 = by_row(routes, tensors)
    g = G[routes.tokens]
    gate, up = (torch.einsum("rfk,rk->rf", w, x) for w in (w1, w3))
    act, by_gate, by_up = UNIT.partials(gate, up)
    by_hidden = torch.einsum("rkf,rk->rf", w2, g)
    d_gate, d_up = (by * by_hidden * p[:, None] for by in (by_gate, by_up))
    d_x = torch.einsum("rfk,rf->rk", w1, d_gate) + torch.einsum("rfk,rf->rk", w3, d_up)
    exact = Gradients(x, g, act * p[:, None], d_gate, d_up, d_x, (act * by_hidden).sum(1))
    for seed in range(3):
        made = Gradients(*(torch.full_like(each, torch.nan) for each in exact))
        arguments = [tensors[0], G, routes.tokens, *descriptors(*tensors[2:]), tensors[1], routes.order]
        arguments += [*made, *tiles, F, 4.0, 25.0]
        run(backward_hopper, programs, arguments, in_float64, seed=seed, WIDTH=64)
        for name, mine, oracle in zip(Gradients._fields, made, exact, strict=True):
            assert relative_error(mine, oracle) < 1e-13, name
