"""Experts' products with a queue of weights, on a CPU: against their equations, nothing read too early."""

from __future__ import annotations

import pytest
import torch
from closeness import relative_error
from gluon_on_cpu import Machine, run

from openk3.ops.activation import Activation
from openk3.ops.dispatch import triton_problem

pytestmark = pytest.mark.skipif(triton_problem("cpu") is not None, reason="needs the triton package")

UNIT = Activation()
E, K = 6, 2
f64 = torch.float64


def in_float64(machine: Machine) -> dict[str, object]:
    """SiTU for the card's approximation, torch's products for those of the matrix unit."""
    return {
        "_cumulated": lambda x: x.cumsum(0),
        "unit": lambda gate, up, *more: UNIT(gate, up),
        "mma_v2": lambda left, right, acc: left @ right + acc,
    }


def lists_of(ids):
    """Each expert's assignments in their order, and how many; elsewhere no assignment at all."""
    n = len(ids)
    lists, counts = torch.full((E, n), 10**9), torch.zeros(E, dtype=torch.int64)
    for a, e in enumerate(ids.flatten().tolist()):
        lists[e, counts[e]] = a
        counts[e] += 1
    return lists, counts


# Rows: fewer experts than programs, several items an expert; number 5 has none. Widths: whole tiles, parts of
# them, more than the first half of w2's columns. Programs: one, a few, more than tiles.
@pytest.mark.parametrize("programs", [1, 3, 40])
@pytest.mark.parametrize(("n", "L", "F"), [(5, 40, 72), (37, 64, 32), (20, 256, 416)])
@pytest.mark.parametrize("stages", [2, 3])
def test_each_assignment_gets_its_experts_products(n, L, F, programs, stages):
    from openk3.ops.decoding.kernels.streams import stream

    torch.manual_seed(n)
    ids = torch.tensor([[4, t % 4] if t % 7 else [t % 4, (t + 1) % 4] for t in range(n)])
    x, w1, w3, w2 = (torch.randn(*s, dtype=f64) for s in ((n, L), (E, F, L), (E, F, L), (E, L, F)))
    hidden, out = torch.full((n * K, F), torch.nan, dtype=f64), torch.full((n * K, L), torch.nan, dtype=f64)
    first, second, down = ((w.flatten(0, 1), (32, 256)) for w in (w1, w3, w2))
    more = {"k": K, "UNIT": "situ", "COARSE": True, "EXPERTS": 32, "STAGES": stages, "EARLY": False}
    lists_and_caps = *lists_of(ids), 4.0, 25.0
    run(
        stream, programs, [x, first, second, hidden, n, E, L, F, *lists_and_caps], in_float64,
        warps=4, DOWN=False, **more,
    )  # fmt: skip
    run(
        stream, programs, [hidden, down, down, out, n, E, F, L, *lists_and_caps], in_float64,
        warps=4, DOWN=True, **more,
    )  # fmt: skip
    e, row = ids.flatten(), x.repeat_interleave(K, 0)
    right = UNIT(torch.einsum("afl,al->af", w1[e], row), torch.einsum("afl,al->af", w3[e], row))
    assert relative_error(hidden, right) < 1e-13
    assert relative_error(out, torch.einsum("alf,af->al", w2[e], right)) < 1e-13
