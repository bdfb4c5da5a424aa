"""What a slice does to any state and to any gradient of one, against the recurrence's own products."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from closeness import relative_error

from openk3.errors import InvalidInput
from openk3.ops.dispatch import triton_problem
from openk3.ops.kda import gated_kda, kda_fragments, kda_reverse_fragments
from openk3.ops.kda_gate import kda_gate
from openk3.ops.norm import l2_norm

Tensor = torch.Tensor
K, H = 64, 2
LENGTHS = [70, 0, 1, 64]
IMPLEMENTATIONS = [
    "reference",
    "eager",
    pytest.param(
        "triton",
        marks=pytest.mark.skipif(triton_problem("cpu") is not None, reason=str(triton_problem("cpu"))),
    ),
]


def _raw(V: int = K, shift: float = -4.0) -> dict[str, Tensor]:
    """In fp32, with decays so slow that a state is felt at the end."""
    make = torch.Generator().manual_seed(0)
    T = sum(LENGTHS)
    shapes = {"q": (T, H, K), "k": (T, H, K), "v": (T, H, V), "z": (T, H, K), "b": (T, H), "A_log": (H,)}
    raw = {name: torch.randn(shape, generator=make) for name, shape in shapes.items()}
    raw["z"] += shift
    raw["dt_bias"] = torch.randn(H, K, generator=make)
    raw["cu_seqlens"] = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return raw


def _by_steps(raw: dict[str, Tensor], d_o: Tensor, bound: float | None, scale: float) -> list[Tensor]:
    """M, L and L' of each sequence in float64, step by step.

    S_t = S_{t-1} A_t + beta v k^T with A_t = diag(alpha) (I - beta k k^T), so that M is the product of all
    A_t, and an output takes scale M_t q_t from the first state.
    """
    double = {name: x.double() for name, x in raw.items() if name != "cu_seqlens"}
    q, k = (l2_norm(double[name], implementation="reference") for name in ("q", "k"))
    gate = double["z"], double["A_log"], double["dt_bias"]
    alpha = kda_gate(*gate, lower_bound=bound, implementation="reference").exp()
    beta, v, d_o = double["b"].sigmoid(), double["v"], d_o.double()
    results = []
    for start, end in pairwise(raw["cu_seqlens"].tolist()):
        M = torch.eye(K, dtype=torch.float64).repeat(H, 1, 1)
        L, back = (torch.zeros(H, v.shape[2], K, dtype=torch.float64) for _ in range(2))
        for t in range(start, end):
            write = beta[t][:, None, None] * k[t][:, None, :]
            step = alpha[t][:, :, None] * (torch.eye(K) - k[t][:, :, None] * write)
            M, L = M @ step, L @ step + v[t][:, :, None] * write
            back = back + scale * d_o[t][:, :, None] * (M @ q[t][:, :, None]).mT
        results.append((M, L, back))
    return [torch.stack(x) for x in zip(*results, strict=True)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bound", [-5.0, None])
def test_fragments_are_the_products_of_the_recurrences_steps(bound, implementation):
    raw = _raw()
    d_o, scale = torch.randn(raw["v"].shape, generator=torch.Generator().manual_seed(1)), 1e-3
    M, L, back = _by_steps(raw, d_o, bound, scale)
    q, v = raw.pop("q"), raw.pop("v")
    options = {"lower_bound": bound, "implementation": implementation}
    fragments = kda_fragments(v=v, **raw, **options)
    reverse = kda_reverse_fragments(q, d_o=d_o, scale=scale, **raw, **options)
    assert fragments.transition.dtype == fragments.added.dtype == reverse.dtype == torch.float32
    for n in range(len(LENGTHS)):
        assert relative_error(fragments.transition[n], M[n]) < 5e-6
        assert relative_error(fragments.added[n], L[n]) < 5e-6
        assert relative_error(reverse[n], back[n]) < 5e-6
    assert torch.equal(fragments.transition[1], torch.eye(K).expand(H, K, K))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slices_join_to_the_sequence_both_ways(implementation):
    """Two slices of one sequence, as two devices would hold them, in any V that the implementation takes."""
    raw = _raw(V=K if implementation == "triton" else 3)
    T, V = len(raw["k"]), raw["v"].shape[2]
    make = torch.Generator().manual_seed(1)
    state, d_last = (torch.randn(1, H, V, K, generator=make) for _ in range(2))
    d_o = torch.randn(T, H, V, generator=make)
    whole = raw | {"cu_seqlens": torch.tensor([0, T], dtype=torch.int32)}
    start = state.clone().double().requires_grad_()
    exact = {name: x if name == "cu_seqlens" else x.double() for name, x in whole.items()}
    o, last = gated_kda(**exact, initial_state=start, implementation="reference")
    (d_state,) = torch.autograd.grad([o, last], start, [d_o.double(), d_last.double()])
    q, v = raw.pop("q"), raw.pop("v")
    raw["cu_seqlens"] = torch.tensor([0, 66, T], dtype=torch.int32)
    M, L = kda_fragments(v=v, **raw, implementation=implementation)
    back = kda_reverse_fragments(q, d_o=d_o, **raw, implementation=implementation)
    assert relative_error((state[0] @ M[0] + L[0]) @ M[1] + L[1], last[0]) < 5e-6
    assert relative_error((d_last[0] @ M[1].mT + back[1]) @ M[0].mT + back[0], d_state[0]) < 5e-6


@pytest.mark.skipif(triton_problem("cpu") is not None, reason="needs Triton's interpreter")
def test_fragments_of_slices_cut_into_pieces_are_those_of_whole_ones(monkeypatch):
    from openk3.ops.kda.kernels import operator
    from openk3.ops.kda.kernels.pieces import cut_pieces

    raw = _raw()
    q, v = raw.pop("q"), raw.pop("v")
    whole, cut = [], []
    for results in (whole, cut):
        results += kda_fragments(v=v, **raw, implementation="triton")
        results.append(kda_reverse_fragments(q, d_o=v, **raw, implementation="triton"))
        monkeypatch.setattr(operator, "_pieces", lambda v, plan, split: cut_pieces(plan, 1))
    for one, other in zip(whole, cut, strict=True):
        assert relative_error(one, other) < 1e-6


@pytest.mark.parametrize("implementation", ["reference", "eager"])
def test_no_token_changes_nothing(implementation):
    raw = {name: x[:0] if x.shape[0] == sum(LENGTHS) else x for name, x in _raw().items()}
    raw["cu_seqlens"] = torch.zeros(2, dtype=torch.int32)
    q, v = raw.pop("q"), raw.pop("v")
    M, L = kda_fragments(v=v, **raw, implementation=implementation)
    assert torch.equal(M[0], torch.eye(K).expand(H, K, K))
    assert not L.any()
    assert not kda_reverse_fragments(q, d_o=v, **raw, implementation=implementation).any()


def test_what_does_not_fit_is_named():
    raw = _raw()
    q, v = raw.pop("q"), raw.pop("v")
    with pytest.raises(InvalidInput, match="kda_fragments: lower_bound"):
        kda_fragments(v=v, **raw, lower_bound=1.0)
    with pytest.raises(InvalidInput, match="kda_reverse_fragments: q, k, z must be"):
        kda_reverse_fragments(q, d_o=v[1:], **raw)


@pytest.mark.skipif(triton_problem("cpu") is not None, reason="needs Triton's interpreter")
def test_the_operators_pass_opcheck():
    from openk3.ops.kda.kernels.operator import gradient_to_states, last_states

    raw = _raw()
    state = torch.zeros(len(LENGTHS), H, K, K)
    shared = raw["z"], raw["b"], raw["A_log"], raw["dt_bias"], raw["cu_seqlens"]
    torch.library.opcheck(last_states, (raw["k"], raw["v"], *shared, state, -5.0))
    torch.library.opcheck(gradient_to_states, (raw["q"], raw["k"], *shared, raw["v"], -5.0))
