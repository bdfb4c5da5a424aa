"""Paged MLA decoding on a CPU: reference, eager and the kernels in Triton's interpreter.

The oracle is the attention that decoding stands for, expanded head by head in float64 (`paged_cases`).
"""

from __future__ import annotations

import math

import pytest
import torch
from closeness import relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import Case, draw, expanded, projected

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.attention.paged import mla_append, mla_decode
from openk3.ops.dispatch import triton_problem

INTERPRETER = pytest.param(
    "triton",
    marks=pytest.mark.skipif(
        triton_problem("cpu") is not None or torch.cuda.is_available(), reason="for Triton's interpreter"
    ),
)
ALL = ["reference", "eager", INTERPRETER]
FP32 = 5e-6


def check(case: Case, implementation: str, limit: float = FP32, **options) -> torch.Tensor:
    mixed, lse = mla_decode(
        *case.inputs, scale=case.scale, return_lse=True, implementation=implementation, **options
    )
    out, expected_lse = expanded(case)
    assert mixed.dtype == case.q_latent.dtype and mixed.shape == case.q_latent.shape
    assert relative_error(projected(case, mixed), out) < limit
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    finite = expected_lse.isfinite()
    assert relative_error(lse[finite], expected_lse[finite]) < limit
    assert torch.equal(mixed[~finite], torch.zeros_like(mixed[~finite]))
    return mixed


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("W", [1, 3])
def test_it_is_the_expanded_attention_over_what_each_query_sees(implementation, W):
    """Also with no token, with fewer tokens than queries, and on a page's edge."""
    check(draw([37, 0, 16, 1, 70], W=W, H=3, max_pages=9), implementation)


@pytest.mark.parametrize("implementation", ["reference", "eager"])
def test_float64_is_computed_in_float64(implementation):
    check(draw([37, 5], W=2, dtype=torch.float64), implementation, limit=1e-13)


@pytest.mark.parametrize("implementation", ALL)
def test_parts_of_a_sequence_are_mixed_again(implementation):
    case = draw([200, 64, 129, 0], W=2, max_pages=13)
    check(case, implementation, split=64)
    check(case, implementation, split=64, max_length=200)


@pytest.mark.parametrize("implementation", [INTERPRETER])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=3),
    W=st.integers(1, 8),
    H=st.sampled_from([1, 2, 5, 8]),
    R=st.sampled_from([64, 128]),
    S=st.sampled_from([16, 32]),
    page_size=st.sampled_from([16, 32, 64, 128]),
    split=st.sampled_from([None, 64, 128]),
    seed=st.integers(0, 99),
)
def test_shapes(implementation, lengths, W, H, R, S, page_size, split, seed):
    check(draw(lengths, W=W, H=H, R=R, S=S, page_size=page_size, seed=seed), implementation, split=split)


@pytest.mark.parametrize("implementation", [INTERPRETER])
@pytest.mark.parametrize(("H", "R", "S"), [(96, 512, 64), (8, 256, 64), (128, 64, 32)])
def test_widths_of_presets(implementation, H, R, S):
    check(draw([40], H=H, R=R, S=S), implementation)


@pytest.mark.parametrize("implementation", ["eager", INTERPRETER])
def test_heads_and_tokens_of_queries_may_lie_apart(implementation):
    case = draw([20, 33], W=2, H=3)
    expected = check(case, implementation)
    case.q_latent = case.q_latent.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    wide = torch.randn(2, 2, 3, 40)
    wide[..., 24:] = case.q_shared
    case.q_shared = wide[..., 24:]
    assert torch.equal(check(case, implementation), expected)


@pytest.mark.parametrize("implementation", [INTERPRETER])
def test_what_a_query_gets_depends_on_neither_neighbours_nor_window_nor_pages(implementation):
    """To the bit, with one `split`."""
    W, split = 4, 64
    case = draw([150, 3, 97], W=W, H=2, max_pages=13)
    together = check(case, implementation, split=split)
    for n, length in enumerate(case.lengths.tolist()):
        pages = -(-length // 16)
        for w in range(W):
            if length - W + 1 + w <= 0:
                continue
            alone, _ = mla_decode(
                case.q_latent[n : n + 1, w : w + 1], case.q_shared[n : n + 1, w : w + 1], case.cache,
                case.block_table[n : n + 1, :pages], case.lengths[n : n + 1] - W + 1 + w,
                scale=case.scale, split=split, implementation=implementation,
            )  # fmt: skip
            assert torch.equal(alone[0, 0], together[n, w])
    wider = case.cache.new_full((1 + len(case.cache) // 2, 32, case.cache.shape[2]), math.nan)
    table = torch.full((3, 7), -1, dtype=torch.int32)
    used = 0
    for n, length in enumerate(case.lengths.tolist()):
        rows = case.cache[case.block_table[n, : -(-length // 16)].long()].view(-1, case.cache.shape[2])
        for i in range(-(-length // 32)):
            part = rows[32 * i : 32 * i + 32]
            wider[used, : len(part)] = part
            table[n, i] = used
            used += 1
    case.cache, case.block_table = wider, table
    assert torch.equal(check(case, implementation, split=split), together)


@pytest.mark.parametrize("implementation", [INTERPRETER])
def test_large_logits_do_not_overflow(implementation):
    case = draw([90], H=2)
    case.q, case.q_latent, case.q_shared = 300 * case.q, 300 * case.q_latent, 300 * case.q_shared
    check(case, implementation, split=64, limit=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", ["eager", INTERPRETER])
def test_half_precision_goes_in_and_comes_out(implementation, dtype):
    if implementation == "triton" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies bf16 wrongly")
    check(draw([50, 9], W=2, dtype=dtype), implementation, limit=5e-3)


@pytest.mark.parametrize("implementation", ["eager", INTERPRETER])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_tokens_are_appended_where_slots_say(implementation, slot_dtype):
    cache = torch.randn(3, 16, 80)
    wide = torch.randn(5, 100)
    latents, expected = wide[:, 10:90], cache.clone()
    slots = torch.tensor([17, -1, 0, 47, -1], dtype=slot_dtype)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // 16, slot % 16] = latents[t]
    mla_append(latents, cache, slots, implementation=implementation)
    assert torch.equal(cache, expected)
    for nothing in (slots[1:2], slots[:0], torch.tensor([48, -5, 10**6], dtype=slot_dtype)):
        mla_append(latents[: len(nothing)], cache, nothing, implementation=implementation)
        assert torch.equal(cache, expected)


@pytest.mark.parametrize("implementation", ALL)
def test_without_a_sequence_nothing_is_computed(implementation):
    case = draw([4])
    mixed, lse = mla_decode(
        *(x[:0] if x is not case.cache else x for x in case.inputs), scale=1.0, implementation=implementation
    )
    assert mixed.shape == (0, 1, 2, 64) and lse is None


@pytest.mark.parametrize("implementation", [INTERPRETER])
def test_the_operators_pass_opcheck(implementation):
    case = draw([20, 70], W=2)
    for split in (0, 64):
        torch.library.opcheck(torch.ops.openk3.mla_decode.default, (*case.inputs, case.scale, 80, split))
    slots = torch.tensor([0, -1], dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.openk3.mla_append.default, (torch.randn(2, 80), torch.zeros(2, 16, 80), slots)
    )


def test_lengths_and_tables_are_not_read_on_the_host():
    """Tensors that cannot be read stand for those whose reading would wait."""
    case = draw([20, 70], W=2)
    for implementation in ("eager", "triton"):
        if implementation == "triton":
            run = torch.ops.openk3.mla_decode
            mixed, lse = run(*(x.to("meta") for x in case.inputs), 0.1, 80, 64)
        else:
            mixed, lse = mla_decode(
                *(x.to("meta") for x in case.inputs), scale=0.1, return_lse=True, implementation="eager"
            )
        assert mixed.shape == case.q_latent.shape and lse.shape == (2, 2, 2)


@pytest.mark.skipif(triton_problem("cpu") is not None, reason="needs Triton")
def test_programs_in_hopper_layouts_cover_a_window_with_little_to_spare():
    from openk3.ops.attention.kernels.paged_operator import hopper_tiles

    assert hopper_tiles(96) == (2, 32) and hopper_tiles(128) == (2, 64) and hopper_tiles(8) == (1, 16)
    for queries in range(1, 8 * 128 + 1):
        tiles, last = hopper_tiles(queries)
        left = queries - 64 * (tiles - 1)
        assert 0 < left <= last in (16, 32, 64)
        assert last == 16 or left > last // 2


def test_inputs_that_do_not_fit_are_refused():
    case = draw([20, 70], W=2)
    latent, shared, cache, table, lengths = case.inputs
    bad = [
        ((latent[:, :, 0], shared, cache, table, lengths), {}, "want queries"),
        ((latent, shared[..., :8], cache, table, lengths), {}, "as wide as"),
        ((latent.repeat(1, 5, 1, 1), shared.repeat(1, 5, 1, 1), cache, table, lengths), {}, "1..8"),
        ((latent.double(), shared, cache, table, lengths), {}, "share a dtype"),
        ((latent, shared, cache[:, ::2], table, lengths), {}, "contiguous"),
        ((latent, shared, cache[:0], table, lengths), {}, "not empty"),
        ((latent, shared, cache, table[:1], lengths), {}, "block_table is"),
        ((latent, shared, cache, table, lengths.long()), {}, "lengths must be int32"),
        ((latent, shared, cache, table, lengths), {"split": 100}, "multiple of 64"),
        ((latent, shared, cache, table, lengths), {"split": 0}, "multiple of 64"),
        ((latent, shared, cache, table, lengths), {"max_length": -1}, "max_length"),
        ((latent, shared, cache, table, lengths), {"scale": math.nan}, "finite"),
    ]
    for inputs, options, problem in bad:
        with pytest.raises(InvalidInput, match=problem):
            mla_decode(*inputs, **{"scale": 0.1, **options})
    with pytest.raises(InvalidInput, match="latents are"):
        mla_append(torch.zeros(2, 79), cache, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(InvalidInput, match="slots"):
        mla_append(torch.zeros(2, 80), cache, torch.zeros(3, dtype=torch.int32))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"R": 48}, "latents of"), ({"S": 8}, "shared dims"), ({"page_size": 24}, "pages of"),
        ({"dtype": torch.float64}, "float64"),
    ],
)  # fmt: skip
def test_a_kernel_that_does_not_take_the_inputs_says_so(options, problem):
    case = draw([20], **options)
    with pytest.raises(KernelUnavailable, match=problem):
        mla_decode(*case.inputs, scale=0.1, implementation="triton")
    check(case, "eager", limit=FP32)


def test_the_eager_form_has_gradients_and_the_kernel_says_that_it_has_none():
    case = draw([20, 5], W=2, dtype=torch.float64)
    leaves = [case.q_latent.requires_grad_(), case.q_shared.requires_grad_()]
    mixes = [
        mla_decode(*case.inputs, scale=case.scale, implementation=name)[0] for name in ("eager", "reference")
    ]
    d_mixed = torch.randn_like(mixes[0])
    found, expected = (torch.autograd.grad(mixed, leaves, d_mixed) for mixed in mixes)
    for mine, oracle in zip(found, expected, strict=True):
        assert relative_error(mine, oracle) < 1e-12
    case = draw([20])
    case.q_latent.requires_grad_()
    with pytest.raises(KernelUnavailable, match="no gradient"):
        mla_decode(*case.inputs, scale=0.1, implementation="triton")


@pytest.mark.parametrize("implementation", ["eager", INTERPRETER])
def test_a_slot_beyond_the_cache_writes_nothing_and_the_others_are_written(implementation):
    cache, latents = torch.zeros(2, 16, 8), torch.arange(1.0, 4.0)[:, None].expand(3, 8)
    mla_append(latents, cache, torch.tensor([32, 31, 33]), implementation=implementation)
    assert torch.equal(cache[1, 15], latents[1]) and float(cache.sum()) == 16


def test_latents_with_a_gradient_are_not_appended_without_it():
    cache, latents = torch.zeros(2, 16, 8), torch.ones(1, 8, requires_grad=True)
    with pytest.raises(KernelUnavailable, match="no gradient"):
        mla_append(latents, cache, torch.tensor([3]), implementation="triton")
    mla_append(latents, cache, torch.tensor([3]))
    cache.sum().backward()
    assert torch.equal(latents.grad, torch.ones(1, 8))
