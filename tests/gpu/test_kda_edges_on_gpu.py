"""KDA's fragments, and its kernels where numbers are far apart, on a GPU against float64.

Run with `pytest -m gpu tests/gpu/test_kda_edges_on_gpu.py`.
"""

from __future__ import annotations

import pytest
import torch

from openk3.ops.kda import gated_kda, kda_fragments, kda_reverse_fragments
from ops.closeness import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Tensor = torch.Tensor


def _draw(K: int, H: int, lengths: list[int], shift: float) -> dict[str, Tensor]:
    make = torch.Generator("cuda").manual_seed(0)
    T = sum(lengths)
    shapes = {"q": (T, H, K), "k": (T, H, K), "v": (T, H, K), "z": (T, H, K), "b": (T, H)}
    raw = {n: torch.randn(*shape, device="cuda", generator=make) for n, shape in shapes.items()}
    raw["z"] += shift
    raw = {n: x.bfloat16() for n, x in raw.items()}
    raw["A_log"] = torch.zeros(H, device="cuda")
    raw["dt_bias"] = torch.zeros(H, K, device="cuda")
    raw["cu_seqlens"] = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    return raw


def _double(raw: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: x.double() if x.is_floating_point() else x for n, x in raw.items()}


@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize(("H", "lengths"), [(3, [300, 1, 0, 64, 147]), (2, [4099, 0])], ids=["whole", "cut"])
def test_fragments_in_bf16_are_near_float64(H, lengths, bound, K):
    raw = _draw(K, H, lengths, shift=-10.0)
    results = []
    for own, implementation in ((dict(raw), "triton"), (_double(raw), "eager")):
        q, v, options = own.pop("q"), own.pop("v"), {"lower_bound": bound, "implementation": implementation}
        M, L = kda_fragments(v=v, **own, **options)
        results.append((M, L, kda_reverse_fragments(q, d_o=v, **own, **options)))
    for name, mine, oracle in zip(("M", "L", "back"), *results, strict=True):
        assert relative_error(mine, oracle) < 1e-2, name


def _gradients(raw: dict[str, Tensor], state: Tensor, **options: object) -> dict[str, Tensor]:
    own = {n: x.detach().clone().requires_grad_(n in ("q", "k")) for n, x in raw.items()}
    o, _ = gated_kda(
        **own, initial_state=state.to(torch.promote_types(own["q"].dtype, torch.float32)), **options
    )
    d_q, d_k = torch.autograd.grad(o, [own["q"], own["k"]], torch.ones_like(o))
    return {"o": o.detach(), "d_q": d_q, "d_k": d_k}


@pytest.mark.parametrize(("K", "forgetting", "size"), [(128, 2, 0), (64, 14, 75)])
def test_a_state_is_read_behind_decays_whose_factor_alone_is_too_small_for_fp32(K, forgetting, size):
    """Behind `forgetting` rows at the bound, the others of 32 forget nothing, and all after them do.

    Row 32 reads 2^-22 and 2^-108 of the state; the middle of its tile of 32 rows lies 2^-130 below the start
    in Hopper's layouts (K = 128), and that of its block of 16 rows 2^-159 in the plain kernel. Nothing is
    written (beta 0): the inverse is fp16 and drops what pairs below 2^-24 correct.
    """
    raw = _draw(K, 2, [64], shift=0.0)
    raw["z"][:] = 40.0
    raw["z"][forgetting:32] = -60.0
    raw["b"][:] = -200.0
    raw["v"].zero_()
    state = 2.0**size * torch.randn(
        1, 2, K, K, device="cuda", generator=torch.Generator("cuda").manual_seed(1)
    )
    mine = _gradients(raw, state)
    oracle = _gradients(_double(raw), state, implementation="eager")
    for t in range(32, 35):  # the next is behind 2^-130, which fp32 does not hold
        assert oracle["d_q"][t].norm() > 0
        assert relative_error(mine["d_q"][t], oracle["d_q"][t]) < 1e-2, t


@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("scale", [2.0**-30, -(2.0**-12)])
def test_a_power_of_two_as_scale_changes_exponents_alone(scale, K):
    """So a small scale takes no digits from outputs and gradients."""
    raw = _draw(K, 2, [64], shift=20.0)
    state = torch.randn(1, 2, K, K, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    whole, scaled = (_gradients(raw, state, scale=factor) for factor in (1.0, scale))
    for name, expected in whole.items():
        assert torch.equal(scaled[name] / scale, expected), name
