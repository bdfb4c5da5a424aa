"""The kernels with rows in shared memory, on a CPU: against the definition, nothing read early."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from closeness import relative_error
from gluon_on_cpu import run

from openk3.ops.dispatch import triton_problem

pytestmark = pytest.mark.skipif(triton_problem("cpu") is not None, reason="needs the triton package")

EPS, NORM_EPS = 1e-5, 1e-3
T, PROGRAMS = 7, 3
d = 304  # not a power of two; a program has 512 columns and 2 warps


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def nothing(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=torch.float64)


def numbers_for_words(machine) -> dict[str, object]:
    """In place of what the kernels load in words of two numbers."""
    col = torch.arange(512)
    return {
        "_row": lambda places, turn, i, DOUBLE: places[i].index(turn if i < DOUBLE else 0).load(None),
        "_words": lambda x, row, d, D: machine.load(x + (row * d + col), col < d),
        "_wide": lambda numbers, dtype, ROW: numbers,
    }


def definition(sources, query, key_gain, norm_gain, lse):
    """The mix, its norm, and scores and 1 / rms of each source `[T, S, 2]`; with lse, that for the first."""
    rows = torch.stack(sources)
    inverse = (rows.square().mean(-1) + EPS).rsqrt()
    scores = torch.einsum("std,d->st", rows, query * key_gain) * inverse
    if lse is not None:
        inverse = torch.cat([torch.zeros(1, T), inverse[1:]])
        scores = torch.cat([lse[None], scores[1:]])
    mix = torch.einsum("st,std->td", scores.softmax(0), rows)
    normed = mix * (mix.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt() * norm_gain
    return mix, normed, torch.stack([scores, inverse], -1).transpose(0, 1).contiguous()


def draw(S: int, merge: bool):
    torch.manual_seed(S)
    sources = [(normal(T, d) * 2.0 ** (i % 3)).requires_grad_() for i in range(S)]
    vectors = [(normal(d) * scale).requires_grad_() for scale in (3 / d**0.5, 1, 1)]
    return sources, vectors, normal(T).requires_grad_() if merge else None


SHAPES = [(S, False) for S in (1, 2, 3, 9, 17)] + [(2, True)]


@pytest.mark.parametrize(("S", "merge"), SHAPES)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("outputs", ["mix", "norm", "both"])
@pytest.mark.parametrize("double", [0, 1, 20])
def test_the_forward_is_the_definition(S, merge, add, outputs, double):
    from openk3.ops.attnres.kernels.one_query_ring import forward_ring

    sources, (query, key_gain, norm_gain), lse = draw(S, merge)
    mix, normed, scalars = definition(sources, query, key_gain, norm_gain, lse)
    output = normal(T, d)
    rows = [x.detach() for x in sources]
    rows[-1:] = [output, rows[-1] - output] if add else rows[-1:]
    total, mixed, norms, kept = nothing(T, d), nothing(T, d), nothing(T, d), nothing(T, S, 2)
    flags = {"ADD": add, "MERGE": merge, "MIX": outputs != "norm", "NORM": outputs != "mix"}
    given = tuple(rows), query.detach(), key_gain.detach(), norm_gain.detach()
    given = *given, lse.detach() if merge else None, total, mixed, norms, kept
    sizes = {"S": S, "D": 512, "DOUBLE": min(double, len(rows)), "GROUP": 2}
    run(forward_ring, PROGRAMS, [*given, T, d, EPS, NORM_EPS], numbers_for_words, warps=2, **sizes, **flags)
    assert relative_error(kept, scalars.detach()) < 1e-12
    if add:
        assert relative_error(total, sources[-1].detach()) < 1e-14
    if flags["MIX"]:
        assert relative_error(mixed, mix.detach()) < 1e-12
    if flags["NORM"]:
        assert relative_error(norms, normed.detach()) < 1e-12


@pytest.mark.parametrize(("S", "merge"), SHAPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("bank", "last"), [(False, False), (True, True), (True, False), (False, True)])
@pytest.mark.parametrize(("double", "group"), [(0, 3), (1, 2), (20, 1)])
def test_gradients_are_those_of_the_definition(S, merge, norm, bank, last, double, group):
    from openk3.ops.attnres.kernels.one_query_ring import backward_ring

    sources, (query, key_gain, norm_gain), lse = draw(S, merge)
    mix, normed, scalars = definition(sources, query, key_gain, norm_gain, lse)
    given, later = normal(T, d), [normal(T, d) for _ in sources]
    leaves = [*sources, query, *([norm_gain] if norm else []), *([lse] if merge else [])]
    *expected, d_query = torch.autograd.grad(
        normed if norm else mix, leaves[: S + 1], given, retain_graph=True
    )
    more = torch.autograd.grad(normed if norm else mix, leaves[S + 1 :], given) if leaves[S + 1 :] else ()
    bank = bank and S > 1
    expected = [x + later[i] if (last if i == S - 1 else bank) else x for i, x in enumerate(expected)]
    d_sources = tuple(nothing(T, d) for _ in sources)
    d_lse, d_direction, d_norm_gain = nothing(T), nothing(PROGRAMS, d), nothing(PROGRAMS, d)
    arguments = [
        tuple(x.detach() for x in sources), d_sources, (query * key_gain).detach(),
        norm_gain.detach() if norm else None, scalars.detach(), None if norm else given,
        given if norm else None, tuple(later[:-1]) if bank else None, later[-1] if last else None,
        d_lse, d_direction, d_norm_gain, T, d, NORM_EPS,
    ]  # fmt: skip
    sizes = {"S": S, "D": 512, "DOUBLE": min(double, S), "GROUP": group}
    flags = {"MERGE": merge, "NORM": norm, "BANK": bank, "LAST": last}
    run(backward_ring, PROGRAMS, arguments, numbers_for_words, warps=2, **sizes, **flags)
    for mine, oracle in zip(d_sources, expected, strict=True):
        assert relative_error(mine, oracle) < 1e-11
    if S > 1:
        assert relative_error(d_direction.sum(0) * key_gain.detach(), d_query) < 1e-10
    if norm:
        assert relative_error(d_norm_gain.sum(0), more[0]) < 1e-12
    if merge:
        assert relative_error(d_lse, more[-1]) < 1e-10


@pytest.mark.parametrize(
    ("rows", "d", "size", "address", "capability", "taken"),
    [
        (9, 7168, 2, 0, (9, 0), True),
        (14, 7168, 2, 0, (9, 0), True),
        (15, 7168, 2, 0, (9, 0), False),  # more than shared memory holds
        (32, 512, 2, 0, (9, 0), True),
        (9, 7168, 2, 0, (8, 0), False),  # another card
        (9, 7168, 2, 0, (10, 0), False),
        (9, 7168, 4, 0, (9, 0), False),  # fp32
        (9, 7168, 2, 8, (9, 0), False),  # not on a border of 16 bytes
        (9, 7160, 2, 0, (9, 0), False),
        (9, 128, 2, 0, (9, 0), False),  # narrow
    ],
)
def test_rows_that_are_taken_fit_in_shared_memory(monkeypatch, rows, d, size, address, capability, taken):
    from openk3.ops.attnres.kernels import operator

    card = SimpleNamespace(shared_memory_per_multiprocessor=228 << 10, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: card)
    row = SimpleNamespace(
        shape=(8192, d), is_cuda=True, device="cuda", element_size=lambda: size, data_ptr=lambda: address
    )
    launch = operator.ring_launch([row] * rows)
    assert (launch is not None) == taken
    if launch is not None:
        programs, sizes = launch
        places = (rows + sizes["DOUBLE"]) * sizes["D"] * size
        assert 0 <= sizes["DOUBLE"] <= rows and programs // 132 * (places + 1024) <= 228 << 10
