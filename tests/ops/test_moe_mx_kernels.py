"""Experts in MXFP4: their order of storage, and the kernels in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from closeness import relative_error
from test_moe import by_token_and_slot, distinct_ids

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.dispatch import triton_problem
from openk3.ops.moe import Activation, MxExperts, expert_ffn, mx_expert_ffn, plan
from openk3.ops.moe.mx import INPUTS
from openk3.ops.mx import decode_mxfp4, encode_mxfp4

interpreted = pytest.mark.skipif(
    triton_problem("cpu") is not None or torch.cuda.is_available(), reason="for Triton's interpreter"
)
FP32 = 2e-6


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def stored(E: int, width: int, F: int) -> list[torch.Tensor]:
    """The release's six tensors: w1, its scale, w3, its scale, w2, its scale."""
    tensors = []
    for rows, columns in ((F, width), (F, width), (width, F)):
        weight = torch.randn(E, rows, columns) / columns**0.5
        tensors += encode_mxfp4(weight * 2.0 ** torch.randint(-3, 4, (E, rows, 1)))
    return tensors


def decoded(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """w1, w3, w2 in float64."""
    return [decode_mxfp4(*tensors[i : i + 2], torch.float64) for i in (0, 2, 4)]


# ------------------------------------------------------------------------------------------------- storage


@pytest.mark.parametrize(("E", "width", "F"), [(2, 128, 64), (1, 32, 32), (3, 160, 96), (1, 256, 416)])
def test_stored_weights_come_back_to_the_bit(E, width, F):
    tensors = stored(E, width, F)
    experts = MxExperts.from_checkpoint(*tensors)
    for e in range(E):
        for mine, exact in zip(experts.decoded(e, torch.float64), decoded(tensors), strict=True):
            assert torch.equal(mine, exact[e])


def test_every_code_and_every_scale_comes_back():
    packed = torch.arange(256).repeat_interleave(32).view(1, 32, 256).to(torch.uint8)
    scale = (torch.arange(32 * 16) % 129).view(1, 32, 16).to(torch.uint8)
    down = torch.zeros(1, 512, 16, dtype=torch.uint8), torch.zeros(1, 512, 1, dtype=torch.uint8)
    experts = MxExperts.from_checkpoint(packed, scale, packed.flip(2), scale, *down)
    w1, w3, w2 = experts.decoded(0, torch.float64)
    assert torch.equal(w1, decode_mxfp4(packed, scale, torch.float64)[0])
    assert torch.equal(w3, decode_mxfp4(packed.flip(2), scale, torch.float64)[0])
    assert torch.equal(torch.signbit(w1), torch.signbit(decode_mxfp4(packed, scale, torch.float64)[0]))
    assert (w2 == 0).all()


def test_the_order_is_the_documented_one():
    """One code, one place: input 64 h + 32 q + 8 i + 2 t + b of feature 70 of 128."""
    for h, q, i, t, b in ((0, 0, 0, 0, 0), (1, 0, 1, 2, 1), (0, 1, 2, 3, 0), (1, 1, 3, 1, 1)):
        column = 128 + 64 * h + 32 * q + 8 * i + 2 * t + b
        packed = torch.zeros(1, 128, 128, dtype=torch.uint8)
        packed[0, 70, column // 2] = 0b1011 << 4 * (column % 2)  # -1.5
        scale = torch.full((1, 128, 8), 100, dtype=torch.uint8)
        scale[0, 70, column // 32] = 7
        empty = torch.zeros(1, 256, 64, dtype=torch.uint8), torch.zeros(1, 256, 4, dtype=torch.uint8)
        experts = MxExperts.from_checkpoint(torch.zeros_like(packed), scale, packed, scale, *empty)
        word = int(experts.w13[0, 1, 1, 1, 6, 4 * t + 2 * h + q])
        sign, magnitude = ((15, 6), (12, 3), (13, 0), (14, 9))[i]
        assert word % 2**32 == (1 << sign | 0b011 << magnitude) << 16 * b
        assert int((experts.w13 != 0).sum()) == 1
        assert int(experts.s13[0, 1, 1, 1, 6]) >> 8 * (2 * h + q) & 255 == 7 + 126


def test_what_does_not_fit_is_refused():
    good = stored(2, 64, 32)
    MxExperts.from_checkpoint(*good)
    wrong = [good[i].clone() for i in range(6)]
    wrong[3][1, 0, 0] = 129
    with pytest.raises(InvalidInput, match="w3_scale has a byte 129"):
        MxExperts.from_checkpoint(*wrong)
    with pytest.raises(InvalidInput, match="w2 is"):
        MxExperts.from_checkpoint(*good[:4], good[4][:, :32], good[5])
    with pytest.raises(InvalidInput, match="w1_scale is torch"):
        MxExperts.from_checkpoint(good[0], good[1].int(), *good[2:])
    with pytest.raises(InvalidInput, match="multiples of 32"):
        MxExperts.from_checkpoint(good[0][:, :, :8], *good[1:])
    with pytest.raises(InvalidInput, match="want \\[E, F, l / 2\\]"):
        MxExperts.from_checkpoint(good[0][0], *good[1:])


# -------------------------------------------------------------------------------------------------- forward


def assert_equals_the_sum(ids, tensors, implementation, kind="situ", limit=FP32, dtype=torch.float32):
    T, k = ids.shape
    E, width = tensors[0].shape[0], 2 * tensors[0].shape[2]
    x, p = torch.randn(T, width), torch.rand(T, k)
    experts = MxExperts.from_checkpoint(*tensors)
    x = x.to(dtype)
    out = mx_expert_ffn(x, p, plan(ids, E), experts, Activation(kind), implementation=implementation)
    assert (out.dtype, out.shape) == (dtype, x.shape)
    expected = by_token_and_slot(ids, x.double(), p.double(), *decoded(tensors), kind)
    assert relative_error(out, expected) < limit


# T, k, E, l, F
SHAPES = {
    "one token": (1, 3, 5, 64, 32),
    "no token": (0, 2, 4, 32, 32),
    "more experts than rows": (2, 2, 20, 128, 64),
    "several tiles an expert": (40, 2, 2, 32, 96),
    "widths across steps and blocks": (9, 2, 3, 288, 160),
    "one expert": (9, 1, 1, 32, 32),
}


@pytest.mark.parametrize("implementation", ["reference", "eager", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize(
    ("shape", "kind"), [*((shape, "situ") for shape in SHAPES), ("one token", "swiglu"), ("one token", "glu")]
)
def test_output_equals_the_sum_in_float64(shape, kind, implementation):
    T, k, E, width, F = SHAPES[shape]
    assert_equals_the_sum(distinct_ids(T, k, E), stored(E, width, F), implementation, kind)


@interpreted
@pytest.mark.parametrize("rows", [16, 17, 32, 33, 49, 65])
@pytest.mark.parametrize("many", [False, True])
def test_one_expert_with_all_tokens(rows, many, monkeypatch):
    if many:
        use_many(monkeypatch)
    assert_equals_the_sum(torch.full((rows, 1), 2), stored(4, 32, 32), "triton")


@interpreted
@pytest.mark.parametrize(("tail", "features"), [(0, 128), (16, 64)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_for_many_rows_equals_the_sum(shape, features, tail, monkeypatch):
    use_many(monkeypatch, tail, features)
    T, k, E, width, F = SHAPES[shape]
    assert_equals_the_sum(distinct_ids(T, k, E), stored(E, width, F), "triton")


def use_many(monkeypatch, tail: int = 16, features: int = 64) -> None:
    """The kernel for many rows whatever there is, in tiles small enough to be crossed."""
    from openk3.ops.moe.kernels import mx_many, mx_operator, products

    monkeypatch.setattr(mx_operator, "FEW", -1)
    size = products.Tiles(rows=32, tail=tail, features=features, depth=INPUTS, warps=4, stages=1)
    monkeypatch.setattr(mx_many, "TILES", size)


@interpreted
def test_a_row_that_is_not_finite_spoils_its_own_token_alone():
    ids, experts = torch.arange(12).view(12, 1) % 3, MxExperts.from_checkpoint(*stored(3, 32, 64))
    x = torch.randn(12, 32)
    x[4] = torch.inf
    with torch.no_grad():
        out = mx_expert_ffn(
            x, torch.ones(12, 1), plan(ids, 3), experts, Activation(), implementation="triton"
        )
    assert out[torch.arange(12) != 4].isfinite().all()


@interpreted
def test_equal_calls_give_equal_bits_and_torch_sees_one_operator():
    ids, experts = distinct_ids(7, 2, 4), MxExperts.from_checkpoint(*stored(4, 32, 32))
    x, p, routes = torch.randn(7, 32), torch.rand(7, 2), plan(ids, 4)
    runs = [mx_expert_ffn(x, p, routes, experts, Activation(), implementation="triton") for _ in range(2)]
    assert torch.equal(*runs)
    torch.library.opcheck(
        torch.ops.openk3.mx_expert_ffn.default,
        (x, p, routes.tokens, routes.rows, routes.offsets, experts.w13, experts.s13, experts.w2, experts.s2,
         32, 32, "situ", 4.0, 25.0),
    )  # fmt: skip


@interpreted
def test_awkward_layouts_change_nothing():
    ids, experts = distinct_ids(5, 2, 3), MxExperts.from_checkpoint(*stored(3, 64, 32))
    x, p, routes = torch.randn(5, 64), torch.rand(5, 2), plan(ids, 3)
    run = lambda x, p: mx_expert_ffn(x, p, routes, experts, Activation(), implementation="triton")  # noqa: E731
    odd = torch.empty(64, 5).T.copy_(x)
    assert torch.equal(run(odd, p.T.contiguous().T), run(x, p))


def test_calls_that_do_not_fit_are_refused():
    experts = MxExperts.from_checkpoint(*stored(3, 32, 32))
    x, p, routes = torch.randn(4, 32), torch.rand(4, 2), plan(distinct_ids(4, 2, 3), 3)
    with pytest.raises(InvalidInput, match="want \\[T, 32\\]"):
        mx_expert_ffn(torch.randn(4, 64), p, routes, experts, Activation())
    with pytest.raises(InvalidInput, match="weights is"):
        mx_expert_ffn(x, p[:, :1], routes, experts, Activation())
    with pytest.raises(InvalidInput, match="offsets"):
        mx_expert_ffn(x, p, plan(distinct_ids(4, 2, 3), 5), experts, Activation())
    with pytest.raises(InvalidInput, match="float16"):
        mx_expert_ffn(x.half(), p, routes, experts, Activation())
    with pytest.raises(InvalidInput, match="gradient"):
        mx_expert_ffn(x.requires_grad_(), p, routes, experts, Activation())
    with pytest.raises(KernelUnavailable, match="float64"):
        mx_expert_ffn(x.detach().double(), p, routes, experts, Activation(), implementation="triton")


# ------------------------------------------------------------------------------------------- plain weights


@interpreted
@pytest.mark.parametrize("shape", SHAPES)
def test_plain_weights_through_the_kernel_for_few_rows(shape, monkeypatch):
    from openk3.ops.moe.kernels import few, operator

    size = few.Few(rows=16, features=32, depth=64, warps=1, stages=1)
    monkeypatch.setattr(operator, "FEW", 1000)
    monkeypatch.setattr(few, "PLAIN", {16: size, 32: size})
    T, k, E, width, F = SHAPES[shape]
    width, F = width + 8, F // 2 + 24
    ids, x, p = distinct_ids(T, k, E), torch.randn(T, width), torch.rand(T, k)
    w = [torch.randn(E, *s) / s[1] ** 0.5 for s in ((F, width), (F, width), (width, F))]
    out = expert_ffn(x, p, plan(ids, E), *w, Activation(), implementation="triton")
    expected = by_token_and_slot(ids, x.double(), p.double(), *(t.double() for t in w), "situ")
    assert relative_error(out, expected) < FP32


@interpreted
def test_two_steps_a_turn_change_no_bit(monkeypatch):
    from openk3.ops.moe.kernels import few

    ids, experts = distinct_ids(6, 2, 3), MxExperts.from_checkpoint(*stored(3, 256, 96))
    x, p, routes = torch.randn(6, 256), torch.rand(6, 2), plan(ids, 3)
    outs = []
    for turn in (1, 2):
        monkeypatch.setitem(few.MX, 16, few.Few(16, 64, INPUTS, warps=4, stages=1, turn=turn))
        outs.append(mx_expert_ffn(x, p, routes, experts, Activation(), implementation="triton"))
    assert torch.equal(*outs)
