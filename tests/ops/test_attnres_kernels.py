"""The AttnRes kernels in Triton's interpreter, beside the reference in float64.

A few programs share the tokens, so that each of them takes several and its queue of rows crosses tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from closeness import kept_by, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.attnres import BankMix, attnres_add_mix_norm, attnres_bank_mixes, attnres_mix
from openk3.ops.dispatch import triton_problem

pytestmark = pytest.mark.skipif(
    triton_problem("cpu") is not None or torch.cuda.is_available(), reason="for Triton's interpreter"
)

FP32 = 5e-6
EPS = {"eps": 1e-5, "norm_eps": 1e-6}
VECTORS = ("query", "key_gain", "norm_gain")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def draw(S: int, T: int, d: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """S sources, the last of them the prefix, and what is added to it."""
    torch.manual_seed(S + T + d)  # hypothesis repeats an example
    bank = [(torch.randn(T, d) * 2.0 ** (i % 3)).to(dtype) for i in range(S - 1)]
    return {
        "bank": bank,
        "prefix": torch.randn(T, d).to(dtype),
        "output": torch.randn(T, d).to(dtype),
        "query": torch.randn(d) * 3 / d**0.5,
        "key_gain": 1 + 0.3 * torch.randn(d),
        "norm_gain": 1 + 0.3 * torch.randn(d),
    }


def results(inputs: dict[str, Any], *, chained: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    """All outputs, and the gradients of a fixed random projection of them; chained, of the bank too."""
    own = {
        name: [x.detach().clone().requires_grad_() for x in value]
        if isinstance(value, list)
        else value
        if value is None
        else value.detach().clone().requires_grad_()
        for name, value in inputs.items()
    }
    lse = own.pop("lse", None)
    bank = own["bank"] if lse is None else BankMix(own["bank"][0], lse)
    made = attnres_add_mix_norm(**own | {"bank": bank}, **EPS, **options)._asdict()
    passed = made.pop("bank")
    made = {name: x for name, x in made.items() if x is not None and x.requires_grad}
    if inputs["output"] is None and not chained:
        del made["prefix"]
    if chained:
        made |= {f"bank_{i}": x for i, x in enumerate(passed)}
    seed = torch.Generator().manual_seed(1)
    d_made = [torch.randn(x.shape, generator=seed).to(x.dtype) for x in made.values()]
    leaves = {f"d_bank_{i}": x for i, x in enumerate(own["bank"])}
    leaves |= {f"d_{name}": own[name] for name in ("prefix", "output", *VECTORS) if own[name] is not None}
    leaves |= {} if lse is None else {"d_lse": lse}
    gradients = torch.autograd.grad(list(made.values()), list(leaves.values()), d_made)
    return {n: x.detach() for n, x in made.items()} | dict(zip(leaves, gradients, strict=True))


def exact(inputs: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
    wide = {
        name: [x.double() for x in value]
        if isinstance(value, list)
        else value
        if value is None
        else value.double()
        for name, value in inputs.items()
    }
    return results(wide, implementation="reference", **options)


def assert_agree(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], limit: float = FP32
) -> None:
    """Up to what fp32 leaves of a gradient to scores, a difference of products d_source . source."""
    assert actual.keys() == expected.keys()
    d = expected["d_query"].shape[0]
    largest = max(float(x.norm()) for n, x in expected.items() if n.startswith(("d_bank", "d_prefix")))
    for name, oracle in expected.items():
        assert torch.isfinite(actual[name]).all(), name
        floor = 2e-6 * d**0.5 * largest if name.startswith("d_") else 0.0
        difference = float((actual[name].double() - oracle).norm())
        assert difference <= limit * float(oracle.norm()) + floor, (
            name,
            relative_error(actual[name], oracle),
        )


@pytest.mark.parametrize("implementation", ["reference", "eager", "triton"])
def test_weights_are_the_softmax_over_bank_and_sum(implementation):
    inputs = draw(3, 5, 24)
    sources = torch.stack([*inputs["bank"], inputs["prefix"] + inputs["output"]]).double()  # [S, T, d]
    keys = sources * (sources.square().mean(-1, keepdim=True) + EPS["eps"]).rsqrt()
    expected = (keys @ (inputs["query"] * inputs["key_gain"]).double()).t().softmax(-1)
    made = attnres_add_mix_norm(**inputs, **EPS, return_weights=True, implementation=implementation)
    torch.testing.assert_close(made.weights.double(), expected, rtol=1e-4, atol=1e-6)
    assert not made.weights.requires_grad
    assert attnres_add_mix_norm(**inputs, **EPS, implementation=implementation).weights is None


def test_a_mix_of_the_bank_knows_no_weights():
    inputs = draw(3, 5, 24)
    mix = BankMix(inputs["bank"][0], torch.zeros(5))
    with pytest.raises(InvalidInput, match="does not know the weights"):
        attnres_add_mix_norm(**inputs | {"bank": mix}, **EPS, return_weights=True)


@settings(max_examples=8, deadline=None)
@given(
    S=st.integers(1, 6),
    T=st.integers(1, 8),
    d=st.sampled_from([2, 6, 24, 96]),
    add=st.booleans(),
    outputs=st.sampled_from(["norm", "mix", "both"]),
)
def test_outputs_and_gradients_equal_the_definition(S, T, d, add, outputs):
    inputs = draw(S, T, d)
    if not add:
        inputs["output"] = None
    if outputs == "mix":
        inputs["norm_gain"] = None
    asked = {"return_mixed": outputs == "both"}
    assert_agree(results(inputs, implementation="triton", **asked), exact(inputs, **asked))


@pytest.mark.parametrize(
    ("S", "T", "add"), [(1, 5, False), (1, 5, True), (2, 7, False), (5, 8, True), (8, 1, True)]
)
def test_what_reaches_sources_through_later_readers_is_added(S, T, add):
    inputs = draw(S, T, 24)
    if not add:
        inputs["output"] = None
    actual = results(inputs, chained=True, implementation="triton")
    assert_agree(actual, exact(inputs, chained=True))


def chain(leaves: dict[str, Any], implementation: str, passed_on: bool = True) -> Any:
    """Four sublayers over a growing bank, the first row of which others read too; a scalar of them all."""
    bank, prefix, total = [leaves["x"]], leaves["x"] * leaves["gain"], leaves["x"].sum()
    for query in leaves["queries"]:
        made = attnres_add_mix_norm(
            bank, prefix, prefix * 0.5, query, leaves["gain"], leaves["gain"], **EPS,
            implementation=implementation,
        )  # fmt: skip
        bank = [*(made.bank if passed_on else bank), made.prefix]
        prefix = made.normed.sin()
        total = total + (made.normed * bank[0]).sum()
    return total + prefix.sum()


def chain_leaves(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    make = torch.Generator().manual_seed(7)
    draws = torch.randn(7, 5, 24, generator=make).to(dtype)
    return {
        "x": draws[0].clone().requires_grad_(),
        "gain": (1 + 0.3 * draws[1, 0]).requires_grad_(),
        "queries": [(draws[2 + i, 0] / 2).requires_grad_() for i in range(4)],
    }


def chain_gradients(run: Any, leaves: dict[str, Any]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(run(leaves), [leaves["x"], leaves["gain"], *leaves["queries"]]))


def test_a_chain_of_readers_has_the_gradients_of_the_definition():
    expected = chain_gradients(lambda x: chain(x, "reference"), chain_leaves(torch.float64))
    for passed_on in (True, False):
        actual = chain_gradients(partial(chain, implementation="triton", passed_on=passed_on), chain_leaves())
        for mine, oracle in zip(actual, expected, strict=True):
            assert relative_error(mine, oracle) < 2e-5


def test_a_chain_leaves_nothing_of_a_row_for_autograd_to_add():
    """Each row's gradients meet in kernels; nothing else has two readers here."""
    inputs = draw(3, 4, 24)
    bank = [row.requires_grad_() for row in inputs["bank"]]
    vectors = inputs["query"], inputs["key_gain"], inputs["norm_gain"]
    made = attnres_add_mix_norm(bank, inputs["prefix"], None, *vectors, **EPS, implementation="triton")
    for _ in range(3):
        made = attnres_add_mix_norm(
            made.bank, made.prefix, made.normed, *vectors, **EPS, implementation="triton"
        )
    with torch.profiler.profile() as watched:
        torch.autograd.grad(made.normed.sum(), bank)
    added = [e for e in watched.events() if e.name in ("aten::add", "aten::add_")]
    assert not added
    assert [row.data_ptr() for row in made.bank] == [row.data_ptr() for row in bank]


def test_a_chain_run_again_in_the_backward_and_twice_has_the_same_bits():
    """Under a checkpoint, and summed over two micro-batches."""

    def again(leaves: dict[str, Any]) -> Any:
        return checkpoint(lambda: chain(leaves, "triton"), use_reentrant=False)

    plain, kept = chain_gradients(lambda x: chain(x, "triton"), chain_leaves()), chain_leaves()
    assert all(map(torch.equal, chain_gradients(again, kept), plain))
    for _ in range(2):
        again(kept).backward()
    for leaf, once in zip((kept["x"], kept["gain"], *kept["queries"]), plain, strict=True):
        assert torch.equal(leaf.grad, once + once)


def test_gradients_that_come_in_are_left_as_they_were():
    inputs = draw(3, 4, 24)
    bank = [row.requires_grad_() for row in inputs.pop("bank")]
    made = attnres_add_mix_norm(bank, **inputs, **EPS, implementation="triton")
    shared = torch.randn(4, 24)
    before = shared.clone()
    torch.autograd.grad([*made.bank, made.prefix], bank, [shared, shared, shared])
    assert torch.equal(shared, before)


def test_without_gradients_the_bank_is_handed_on_as_it_is():
    inputs = draw(3, 4, 24)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            made = attnres_add_mix_norm(**inputs, **EPS, implementation="triton")
        assert all(a is b for a, b in zip(made.bank, inputs["bank"], strict=True))


def test_a_chain_compiles_whole():
    plain, leaves = chain_gradients(lambda x: chain(x, "triton"), chain_leaves()), chain_leaves()
    compiled = torch.compile(lambda x: chain(x, "triton"), backend="aot_eager", fullgraph=True)
    for mine, eager in zip(chain_gradients(compiled, leaves), plain, strict=True):
        torch.testing.assert_close(mine, eager)


@pytest.mark.parametrize(("S", "T"), [(9, 7), (17, 4), (33, 1)])
def test_many_sources(S, T):
    inputs = draw(S, T, 96)
    if S == 33:  # the most that the kernel takes, with the output among them
        inputs["bank"].pop()
    assert_agree(results(inputs, implementation="triton"), exact(inputs))


def test_the_plain_mix_and_its_weights():
    inputs = draw(5, 7, 96)
    sources = [*inputs["bank"], inputs["prefix"]]
    vectors = inputs["query"], inputs["key_gain"]
    h, weights = attnres_mix(sources, *vectors, return_weights=True, implementation="triton")
    expected, shares = attnres_mix(
        [x.double() for x in sources], *(x.double() for x in vectors), return_weights=True,
        implementation="reference",
    )  # fmt: skip
    assert relative_error(h, expected) < FP32 and relative_error(weights, shares) < FP32
    assert weights.dtype == torch.float32


def test_a_mix_of_the_bank_stands_for_the_bank():
    """Both phases together are the mix over all sources; so are their gradients, to values and sums."""
    inputs = draw(4, 7, 24)
    whole = attnres_add_mix_norm(**inputs, **EPS, implementation="eager")
    (mix,) = attnres_bank_mixes(
        inputs["bank"], inputs["query"][None], inputs["key_gain"][None], eps=1e-5, implementation="triton"
    )
    merged = inputs | {"bank": [mix.values], "lse": mix.lse}
    actual = results(merged, implementation="triton", return_mixed=True)
    assert relative_error(actual["normed"], whole.normed) < FP32
    assert_agree(actual, exact(merged, return_mixed=True))
    assert_agree(results(merged, implementation="eager", return_mixed=True), exact(merged, return_mixed=True))


@pytest.mark.parametrize(
    ("S", "T", "d", "Q"),
    [(1, 3, 8, 1), (3, 37, 96, 12), (9, 5, 130, 24), (9, 15, 296, 12), (17, 4, 40, 2), (32, 3, 40, 3)],
)
def test_all_queries_of_a_block_equal_the_definition(S, T, d, Q, monkeypatch):
    from openk3.ops.attnres.kernels import operator

    monkeypatch.setattr(operator, "SLICES", 3)
    monkeypatch.setattr(operator, "PRODUCTS", operator.PRODUCTS | {"COLUMNS": 32})
    monkeypatch.setattr(operator, "MIXES", operator.MIXES | {"COLUMNS": 16})
    bank = draw(S + 1, T, d)["bank"]
    queries, gains = torch.randn(Q, d) * 3 / d**0.5, 1 + 0.3 * torch.randn(Q, d)
    wide = [x.double() for x in bank], queries.double(), gains.double()
    expected = attnres_bank_mixes(*wide, implementation="reference")
    for implementation in ("triton", "eager"):
        actual = attnres_bank_mixes(bank, queries, gains, implementation=implementation)
        assert len(actual) == Q
        for mine, oracle in zip(actual, expected, strict=True):
            assert relative_error(mine.values, oracle.values) < FP32
            assert (mine.lse - oracle.lse).abs().max() < 1e-5


@pytest.mark.parametrize("most", [1000, 20_000])
def test_where_shared_memory_is_small_less_is_copied_ahead(monkeypatch, most):
    from openk3.ops.attnres.kernels import operator

    bank, query, gain = draw(4, 37, 96)["bank"], torch.randn(96) / 3, torch.ones(96)
    h, _ = attnres_mix(bank, query, gain, implementation="triton")
    usual = operator.stages(128, bank[0], False)
    monkeypatch.setattr(operator, "shared_memory", lambda _: most)
    assert operator.stages(128, bank[0], False) == min(usual, max(2, 1 + most // 512))
    assert torch.equal(attnres_mix(bank, query, gain, implementation="triton")[0], h)


def test_a_zero_query_is_the_plain_average():
    inputs = draw(4, 5, 24)
    inputs["query"].zero_()
    sources = [*inputs["bank"], inputs["prefix"]]
    h, weights = attnres_mix(
        sources, inputs["query"], inputs["key_gain"], return_weights=True, implementation="triton"
    )
    torch.testing.assert_close(h, torch.stack(sources).mean(0))
    assert (weights == 0.25).all()
    assert_agree(results(inputs, implementation="triton"), exact(inputs))


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_huge_and_tiny_sources(size):
    """Where the mean square is far from eps, on either side; the norm's own eps counts for the tiny ones."""
    inputs = draw(4, 5, 24)
    for x in (*inputs["bank"], inputs["prefix"], inputs["output"]):
        x.mul_(size)
    assert_agree(results(inputs, implementation="triton"), exact(inputs))


def test_scores_of_hundreds_do_not_overflow():
    """exp of them alone would; one source takes nearly all."""
    inputs = draw(4, 5, 24)
    inputs["query"] *= 100
    expected = exact(inputs, return_mixed=True)
    actual = results(inputs, implementation="triton", return_mixed=True)
    for name in ("mixed", "normed", "prefix", "d_prefix"):
        assert relative_error(actual[name], expected[name]) < 1e-4, name
    assert all(torch.isfinite(x).all() for x in actual.values())


def test_a_zero_source_is_a_source_like_any_other():
    inputs = draw(3, 4, 24)
    inputs["bank"][0].zero_()
    assert_agree(results(inputs, implementation="triton"), exact(inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_goes_in_and_comes_out(dtype):
    """Within what truncation instead of rounding costs: the interpreter stores bf16 so."""
    inputs = draw(3, 5, 24, dtype)
    actual, expected = results(inputs, implementation="triton"), exact(inputs)
    assert all(
        actual[name].dtype == dtype for name in ("normed", "prefix", "d_bank_0", "d_prefix", "d_output")
    )
    assert all(actual[f"d_{name}"].dtype == torch.float32 for name in VECTORS)
    assert_agree(actual, expected, limit=2e-2)
    bank = inputs["bank"]
    mixes = attnres_bank_mixes(bank, inputs["query"][None], inputs["key_gain"][None], implementation="triton")
    exact_mixes = attnres_bank_mixes(
        [x.double() for x in bank], inputs["query"][None].double(), inputs["key_gain"][None].double()
    )
    assert mixes[0].values.dtype == dtype and mixes[0].lse.dtype == torch.float32
    assert relative_error(mixes[0].values, exact_mixes[0].values) < 1e-2


def test_rows_that_do_not_lie_on_words_or_lie_apart():
    """A prefix that starts in the middle of a word, a bank row of every second column."""
    inputs = draw(2, 3, 6, torch.float16)
    apart = torch.zeros(3, 12, dtype=torch.float16)
    apart[:, ::2] = inputs["bank"][0]
    shifted = torch.zeros(19, dtype=torch.float16)
    shifted[1:] = inputs["prefix"].flatten()
    moved = inputs | {"bank": [apart[:, ::2]], "prefix": shifted[1:].view(3, 6)}
    results_of = [attnres_add_mix_norm(**x, **EPS, implementation="triton") for x in (inputs, moved)]
    assert torch.equal(results_of[0].normed, results_of[1].normed)


def test_the_same_twice_to_the_bit():
    inputs = draw(4, 7, 96)
    once, again = (results(inputs, implementation="triton") for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)


def test_without_tokens():
    inputs = draw(3, 0, 24)
    actual = results(inputs, implementation="triton")
    assert actual["normed"].shape == (0, 24)
    assert all(not actual[f"d_{name}"].any() for name in VECTORS)
    mixes = attnres_bank_mixes(
        inputs["bank"], inputs["query"][None], inputs["key_gain"][None], implementation="triton"
    )
    assert mixes[0].values.shape == (0, 24) and mixes[0].lse.shape == (0,)


def test_backward_keeps_the_sources_and_two_scalars_per_token_and_source():
    S, T, d = 4, 7, 96
    inputs = draw(S, T, d)
    leaves = {name: inputs[name].requires_grad_() for name in ("prefix", "output", *VECTORS)}
    made = []
    kept = kept_by(
        lambda: made.append(
            attnres_add_mix_norm(inputs["bank"], **leaves, **EPS, implementation="triton").prefix
        )
    )
    rows = {x.data_ptr() for x in (*inputs["bank"], *made)}
    vectors = {leaves[name].data_ptr() for name in VECTORS}
    assert {x.data_ptr() for x in kept if x.numel() == T * d} == rows
    rest = [x.numel() for x in kept if x.data_ptr() not in rows | vectors]
    assert rest == [2 * T * S]


@pytest.mark.parametrize("form", ["plain", "all", "merged"])
def test_the_operators_pass_opcheck(form):
    inputs = draw(3, 4, 8)
    x, bank = inputs, inputs["bank"]
    add, norm = (None, None) if form == "plain" else (x["output"], x["norm_gain"])
    lse = torch.randn(4) if form == "merged" else None
    bank = bank[:1] if form == "merged" else bank
    vectors = x["query"], x["key_gain"], norm
    arguments = bank, x["prefix"], add, *vectors, lse, 1e-5, 1e-6, form != "merged"
    torch.library.opcheck(torch.ops.openk3.attnres.default, arguments)
    sources, d_h = [*bank, x["prefix"]], torch.randn(4, 8)
    d_passed = ([], None) if form == "plain" else ([torch.randn(4, 8) for _ in bank], torch.randn(4, 8))
    given = sources, *vectors, torch.randn(4, len(sources), 2), d_h, None if norm is None else d_h
    torch.library.opcheck(
        torch.ops.openk3.attnres_backward.default, (*given, *d_passed, 1e-6, form == "merged")
    )


def test_the_operator_of_the_first_phase_passes_opcheck():
    bank, queries = [torch.randn(4, 8) for _ in range(2)], torch.randn(3, 8)
    torch.library.opcheck(
        torch.ops.openk3.attnres_bank_mixes.default, (bank, queries, torch.ones(3, 8), 1e-5)
    )


def test_what_the_kernels_do_not_take_is_refused_where_they_are_asked_for():
    inputs = draw(2, 3, 7)
    with pytest.raises(KernelUnavailable, match="even widths"):
        attnres_add_mix_norm(**inputs, implementation="triton")
    inputs = draw(34, 3, 8)
    with pytest.raises(KernelUnavailable, match="up to 32 sources"):
        attnres_add_mix_norm(**inputs, implementation="triton")
    wide = draw(2, 3, 8, torch.float64)
    with pytest.raises(KernelUnavailable, match="not float64"):
        attnres_add_mix_norm(**wide, implementation="triton")
    bank, queries = wide["bank"], torch.randn(2, 8).double()
    assert attnres_bank_mixes(bank, queries, queries)[0].lse.dtype == torch.float64
    queries = torch.randn(2, 8).requires_grad_()
    with pytest.raises(KernelUnavailable, match="no gradient"):
        attnres_bank_mixes([torch.randn(3, 8)], queries, queries.detach(), implementation="triton")
    assert attnres_bank_mixes([torch.randn(3, 8)], queries, queries)[0].values.requires_grad
    with pytest.raises(KernelUnavailable, match="up to 32 queries"):
        attnres_bank_mixes([torch.randn(3, 8)], *[torch.randn(33, 8)] * 2, implementation="triton")
