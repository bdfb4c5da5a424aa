"""The backward with rows in shared memory, on a CPU: against the definition, nothing read early."""

from __future__ import annotations

import pytest
import torch
from closeness import relative_error
from gluon_on_cpu import run

from openk3.ops.dispatch import triton_problem

pytestmark = pytest.mark.skipif(triton_problem("cpu") is not None, reason="needs the triton package")

EPS = 1e-5


def definition(sources, query, key_gain, norm_gain):
    """The mix, its norm, and scores and 1 / rms of each source `[T, S, 2]`."""
    rows = torch.stack(sources)
    inverse = (rows.square().mean(-1) + EPS).rsqrt()
    scores = torch.einsum("std,d->st", rows, query * key_gain) * inverse
    mix = torch.einsum("st,std->td", scores.softmax(0), rows)
    normed = mix * (mix.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm_gain
    return mix, normed, torch.stack([scores, inverse], -1).transpose(0, 1).contiguous()


@pytest.mark.parametrize("S", [1, 2, 3, 4, 6, 9, 13])
@pytest.mark.parametrize("outputs", ["mix", "norm", "both"])
@pytest.mark.parametrize(("bank", "last"), [(False, False), (True, True), (True, False), (False, True)])
def test_gradients_are_those_of_the_definition(S, outputs, bank, last):
    from openk3.ops.attnres.kernels.one_query_ring import backward_ring

    T, d, D, programs = 7, 40, 64, 3
    torch.manual_seed(S)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    sources = [(normal(T, d) * 2.0 ** (i % 3)).requires_grad_() for i in range(S)]
    query, key_gain, norm_gain = (normal(d).requires_grad_() for _ in range(3))
    mix, normed, scalars = definition(sources, query, key_gain, norm_gain)
    mixes, norms = outputs != "norm", outputs != "mix"
    d_mixed, d_normed = normal(T, d), normal(T, d)
    reached = (d_mixed * mix).sum() * mixes + (d_normed * normed).sum() * norms
    later = [normal(T, d) for _ in sources]
    expected = torch.autograd.grad(reached, [*sources, query, norm_gain], allow_unused=True)
    bank = bank and S > 1
    for i, x in enumerate(expected[:S]):
        if last if i == S - 1 else bank:
            x += later[i]

    d_sources = tuple(torch.full((T, d), torch.nan, dtype=torch.float64) for _ in sources)
    d_direction, d_norm_gain = (torch.full((programs, d), torch.nan, dtype=torch.float64) for _ in range(2))
    arguments = [
        tuple(x.detach() for x in sources), d_sources, (query * key_gain).detach(),
        norm_gain.detach() if norms else None, scalars.detach(), d_mixed if mixes else None,
        d_normed if norms else None, tuple(later[:-1]) if bank else None, later[-1] if last else None,
        d_direction, d_norm_gain, T, d, EPS,
    ]  # fmt: skip
    run(
        backward_ring, programs, arguments, lambda machine: {},
        S=S, D=D, MIX=mixes, NORM=norms, BANK=bank, LAST=last,
    )  # fmt: skip
    for mine, oracle in zip(d_sources, expected, strict=False):
        assert relative_error(mine, oracle) < 1e-12
    if S > 1:
        assert relative_error(d_direction.sum(0) * key_gain, expected[S]) < 1e-11
    if norms:
        assert relative_error(d_norm_gain.sum(0), expected[S + 1]) < 1e-12
