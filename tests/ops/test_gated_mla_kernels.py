"""The kernels of Gated MLA in Triton's interpreter: small tiles, so that sequences cross them."""

from __future__ import annotations

import pytest
import torch
from closeness import kept_by
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import PACKINGS, offsets
from test_gated_mla import assert_agree, by_definition, draw, packed, results

from openk3.errors import InvalidInput
from openk3.ops.attention import gated_mla
from openk3.ops.dispatch import triton_problem

pytestmark = pytest.mark.skipif(
    triton_problem("cpu") is not None or torch.cuda.is_available(), reason="for Triton's interpreter"
)

FP32 = 3e-6
TRITON = {"implementation": "triton", "return_max_logit": True}
# Queries and keys of a tile: more of the one, more of the other.
TILES = {"tall": (16, 8), "wide": (8, 16)}


@pytest.fixture(autouse=True)
def tile(request, monkeypatch):
    from openk3.ops.attention.kernels import operator

    rows, keys = TILES[getattr(request, "param", "tall")]
    small = {"ROWS": rows, "KEYS": keys, "num_warps": 4, "num_stages": 1}
    for sizes in (operator.FORWARD, operator.QUERIES, operator.KEYS):
        monkeypatch.setattr(operator, _name_of(operator, sizes), dict.fromkeys(sizes, small))


def _name_of(module, value) -> str:
    return next(name for name, found in vars(module).items() if found is value)


@pytest.mark.parametrize("tile", TILES, indirect=True)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("packing", ["ragged", "cached prefixes", "nothing to see"])
def test_output_gradients_and_largest_logit_equal_the_definition(packing, gated):
    pairs = [(min(n_q, 40), min(n_k, 50)) for n_q, n_k in PACKINGS[packing]]
    inputs = draw(pairs, gated=gated)
    assert_agree(results(gated_mla, inputs, pairs, **TRITON), results(by_definition, inputs, pairs), FP32)


SEQUENCES = st.lists(st.tuples(st.integers(0, 18), st.integers(-3, 17)), min_size=1, max_size=3)


@settings(deadline=None, max_examples=6)
@given(pairs=SEQUENCES.filter(lambda pairs: any(n for n, _ in pairs)))
def test_any_packing_equals_the_definition(pairs):
    """Each (n, c): a sequence of n queries over n + c keys; c < 0 leaves the first queries nothing to see."""
    pairs = [(n, max(n + c, 0)) for n, c in pairs]
    inputs = draw(pairs, H=1)
    assert_agree(results(gated_mla, inputs, pairs, **TRITON), results(by_definition, inputs, pairs), FP32)


def test_head_sizes_that_differ_and_another_scale():
    pairs = [(20, 20), (3, 9)]
    inputs = draw(pairs, H=3, K=32, S=16, V=64)
    actual = results(gated_mla, inputs, pairs, scale=0.3, **TRITON)
    assert_agree(actual, results(by_definition, inputs, pairs, scale=0.3), FP32)


def test_inputs_that_lie_apart_and_an_expanded_gradient():
    """As in the layer, where kv, the latents and the gate are parts of wider rows; one offset by 4 bytes."""
    pairs = [(20, 20), (9, 9)]
    inputs = draw(pairs)
    apart = {n: torch.cat([x, x], -1)[..., : x.shape[-1]] for n, x in inputs.items()}
    apart["q"] = torch.cat([inputs["q"][..., :1], inputs["q"]], -1)[..., 1:]
    apart["gate"] = inputs["gate"].transpose(0, 2).contiguous().transpose(0, 2)
    d_y = torch.randn(1, 1, 16).expand(29, 2, 16)
    expected = results(by_definition, inputs, pairs, d_y=d_y.double())
    assert_agree(results(gated_mla, apart, pairs, d_y=d_y, **TRITON), expected, FP32)


def test_half_precision_goes_in_and_comes_out():
    """The interpreter multiplies bf16 wrongly: what comes out is tested on the card."""
    pairs = [(4, 9)]
    inputs = {n: x.bfloat16() for n, x in draw(pairs).items()}
    actual = results(gated_mla, inputs, pairs, **TRITON)
    assert {x.dtype for n, x in actual.items() if n != "largest"} == {torch.bfloat16}
    assert actual["largest"].dtype == torch.float32


def test_a_sequence_is_the_same_alone_and_among_others_and_twice():
    pairs = [(20, 20), (17, 30), (3, 3)]
    inputs = draw(pairs)
    whole, again = (results(gated_mla, inputs, pairs, **TRITON) for _ in range(2))
    assert all(torch.equal(whole[n], again[n]) for n in whole)
    d_y = torch.randn(whole["y"].shape, generator=torch.Generator().manual_seed(1))
    of_q, of_k = slice(20, 37), slice(20, 50)
    part = {n: x[of_k if n in ("kv", "shared") else of_q] for n, x in inputs.items()}
    alone = results(gated_mla, part, pairs[1:2], d_y=d_y[of_q], **TRITON)
    for n in ("y", "d_q", "d_gate"):
        assert torch.equal(alone[n], whole[n][of_q]), n
    for n in ("d_kv", "d_shared"):
        assert torch.equal(alone[n], whole[n][of_k]), n


def test_huge_logits_stay_finite_and_a_nan_shows_in_the_largest_logit():
    """exp overflows fp32 at 89; a NaN that went unseen would let QK-clip pass over a broken run."""
    pairs = [(30, 30), (5, 5)]
    inputs = draw(pairs)
    inputs["q"] *= 1e4
    assert all(x.isfinite().all() for x in results(gated_mla, inputs, pairs, **TRITON).values())
    inputs["q"][31, 1, 3] = torch.nan
    largest = results(gated_mla, inputs, pairs, **TRITON)["largest"]
    assert largest.isnan().tolist() == [False, True]


def test_a_nan_stays_in_its_sequence_in_the_forward():
    pairs = [(9, 9), (20, 20)]
    inputs = draw(pairs)
    inputs["kv"][9:], inputs["q"][9:], inputs["shared"][9:] = torch.nan, torch.nan, torch.nan
    cu_q, cu_k = packed(pairs)
    y, _ = gated_mla(**inputs, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, implementation="triton")
    assert y[:9].isfinite().all() and y[9:].isnan().all()


def test_the_backward_keeps_inputs_fp32_output_and_one_number_a_query():
    pairs = [(20, 20)]
    inputs = {n: x.bfloat16().requires_grad_() for n, x in draw(pairs).items()}
    cu, _ = packed(pairs)
    kept = kept_by(lambda: gated_mla(**inputs, cu_seqlens_q=cu, cu_seqlens_k=cu, implementation="triton"))
    known = {x.data_ptr() for x in (*inputs.values(), cu)}
    new = [(tuple(x.shape), x.dtype) for x in kept if x.data_ptr() not in known]
    assert sorted(new, key=str) == sorted([((20, 2, 16), torch.float32), ((2, 20), torch.float32)], key=str)
    assert not kept_by(
        lambda: gated_mla(
            **{n: x.detach() for n, x in inputs.items()}, cu_seqlens_q=cu, cu_seqlens_k=cu, **TRITON
        )
    )


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [5], [8, 9, 0, 40, 1, 16, 40], [3] * 130])
def test_every_block_has_one_slot_and_higher_blocks_come_first(lengths):
    from openk3.ops.attention.kernels.blocks import order_blocks

    table = order_blocks(offsets(lengths), sum(lengths), 8).tolist()
    expected = [[n, j] for n, length in enumerate(lengths) for j in range(-(-length // 8))]
    expected.sort(key=lambda slot: (-slot[1], slot[0]))
    assert table[: len(expected)] == expected
    assert all(n == -1 for n, _ in table[len(expected) :])


@pytest.mark.parametrize("pairs", [[], [(0, 0)], [(0, 3)], [(3, 0)]])
def test_no_queries_or_no_keys(pairs):
    inputs = draw(pairs)
    actual = results(gated_mla, inputs, pairs, **TRITON)
    assert all((x == 0).all() for n, x in actual.items() if n != "largest")
    assert (actual["largest"] == -torch.inf).all()


def test_offsets_are_not_read_on_the_host():
    """A tensor that cannot be read stands for one whose reading would wait; shapes are still checked."""
    inputs = {n: x.to("meta") for n, x in draw([(4, 4)]).items()}
    cu = torch.zeros(3, dtype=torch.int32, device="meta")
    y, largest, o, lse = torch.ops.openk3.gated_mla(*inputs.values(), cu, cu, 0.1, True, True)
    assert (y.shape, largest.shape, o.shape, lse.shape) == ((4, 2, 16), (2,), (4, 2, 16), (2, 4))
    inputs = draw([(4, 4)])
    for wrong, message in (
        ((torch.zeros(2), torch.zeros(2)), "cu_seqlens must be int32 on one axis"),
        (tuple(torch.zeros(n, dtype=torch.int32) for n in (2, 3)), "holds 1 sequences, cu_seqlens_k 2"),
    ):
        with pytest.raises(InvalidInput, match=message):
            gated_mla(**inputs, cu_seqlens_q=wrong[0], cu_seqlens_k=wrong[1], implementation="triton")


@pytest.mark.parametrize("gated", [True, False])
def test_the_operator_passes_opcheck(gated):
    pairs = [(3, 3), (2, 4)]
    inputs = [None if x is None else x.requires_grad_() for x in draw(pairs, gated=gated).values()]
    arguments = (*inputs, *packed(pairs), 0.2)
    torch.library.opcheck(torch.ops.openk3.gated_mla.default, (*arguments, True, True))
    plain = [None if x is None else x.detach() for x in arguments[:6]]
    _, _, o, lse = torch.ops.openk3.gated_mla(*plain, 0.2, True, True)
    backward = torch.ops.openk3.gated_mla_backward.default
    torch.library.opcheck(backward, (*plain, o, lse, 0.2, torch.randn(5, 2, 16)))


def test_it_compiles_without_a_break():
    pairs = [(9, 9), (3, 5)]
    inputs = draw(pairs)
    compiled = torch.compile(gated_mla, fullgraph=True, backend="aot_eager")
    actual, expected = (results(f, inputs, pairs, **TRITON) for f in (compiled, gated_mla))
    assert all(torch.equal(actual[n], expected[n]) for n in expected)
