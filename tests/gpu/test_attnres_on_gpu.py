"""The AttnRes kernels on a GPU: against float64 at the widths of models, and what they promise to the bit.

Run with `pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from openk3.ops.attnres import BankMix, attnres_add_mix_norm, attnres_bank_mixes, attnres_mix
from ops.closeness import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16 = 6e-3  # relative L2 that rounding results to bf16 explains, with room
VECTORS = ("query", "key_gain", "norm_gain")
TRITON: dict[str, Any] = {"implementation": "triton"}


@pytest.fixture(autouse=True, params=["rows in registers", "rows in shared memory"])
def _where_rows_wait(request, monkeypatch):
    """Both ways; what the kernels with rows in shared memory do not take goes to the others in any case."""
    from openk3.ops.attnres.kernels import operator

    if request.param == "rows in registers":
        monkeypatch.setattr(operator, "ring_launch", lambda rows: None)


def draw(S: int, T: int, d: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    make = torch.Generator("cuda").manual_seed(S + T + d)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=make)

    return {
        "bank": [(normal(T, d) * 2.0 ** (i % 3)).to(dtype) for i in range(S - 1)],
        "prefix": normal(T, d).to(dtype),
        "output": normal(T, d).to(dtype),
        "query": normal(d) * 3 / d**0.5,
        "key_gain": 1 + 0.3 * normal(d),
        "norm_gain": 1 + 0.3 * normal(d),
    }


def results(inputs: dict[str, Any], *, chained: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    """All outputs and gradients; chained, with gradients that reach the bank's rows through later readers."""
    own = {
        n: [x.detach().clone().requires_grad_() for x in v] if isinstance(v, list)
        else v.detach().clone().requires_grad_()
        for n, v in inputs.items()
    }  # fmt: skip
    lse = own.pop("lse", None)
    bank = own["bank"] if lse is None else BankMix(own["bank"][0], lse)
    made = attnres_add_mix_norm(**own | {"bank": bank}, return_mixed=True, **options)._asdict()
    del made["weights"]
    passed = made.pop("bank")
    made |= {f"bank_{i}": x for i, x in enumerate(passed)} if chained else {}
    seed = torch.Generator("cuda").manual_seed(1)
    d_made = [
        torch.randn(x.shape, device="cuda", generator=seed).bfloat16().to(x.dtype) for x in made.values()
    ]
    leaves = {f"d_bank_{i}": x for i, x in enumerate(own["bank"])}
    leaves |= {f"d_{n}": own[n] for n in ("prefix", "output", *VECTORS)}
    leaves |= {} if lse is None else {"d_lse": lse}
    gradients = torch.autograd.grad(list(made.values()), list(leaves.values()), d_made)
    return {n: x.detach() for n, x in made.items()} | dict(zip(leaves, gradients, strict=True))


def exact(inputs: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
    wide = {n: [x.double() for x in v] if isinstance(v, list) else v.double() for n, v in inputs.items()}
    # The new prefix is rounded before it is mixed.
    wide["prefix"] = (inputs["prefix"] + inputs["output"]).double() - wide["output"]
    return results(wide, implementation="reference", **options)


@pytest.mark.parametrize(
    ("S", "T", "d"),
    [
        (9, 301, 7168),
        (1, 50, 96),
        (2, 1000, 512),
        (5, 1, 7168),
        (17, 64, 4096),
        (13, 2000, 256),
        (3, 40, 16384),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chained", [False, True])
def test_outputs_and_gradients_against_float64(S, T, d, dtype, chained):
    inputs = draw(S, T, d, dtype)
    actual = results(inputs, implementation="triton", chained=chained)
    expected = exact(inputs, chained=chained)
    for name, oracle in expected.items():
        fp32 = 2e-4 if name.startswith("d_") else 1e-5  # gradients to scores are differences
        if S > 1 or name not in ("d_query", "d_key_gain"):  # one source has no choice: zero
            assert relative_error(actual[name], oracle) < (BF16 if dtype == torch.bfloat16 else fp32), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("S", "T", "d", "Q"), [(9, 301, 7168, 12), (1, 33, 96, 1), (8, 100, 7168, 24)])
def test_all_queries_against_float64(S, T, d, Q, dtype):
    """bf16 goes through tensor cores with the queries in three parts, which no interpreter runs."""
    bank = draw(S + 1, T, d, dtype)["bank"]
    queries = torch.stack([draw(1, 1, d)["query"] * (1 + q) for q in range(Q)])
    gains = 1 + 0.1 * torch.randn(Q, d, device="cuda")
    wide = [x.double() for x in bank], queries.double(), gains.double()
    expected = attnres_bank_mixes(*wide, implementation="reference")
    actual = attnres_bank_mixes(bank, queries, gains, implementation="triton")
    again = attnres_bank_mixes(bank, queries, gains, implementation="triton")
    for q, (mine, same, oracle) in enumerate(zip(actual, again, expected, strict=True)):
        # Scores have a deviation of 3 (1 + q), of which fp32 has sums of 7,168 products to 1e-5.
        fine = 1e-5 * (1 + q)
        assert relative_error(mine.values, oracle.values) < (fine if dtype == torch.float32 else BF16)
        assert (mine.lse - oracle.lse).abs().max() < 3 * fine
        assert torch.equal(mine.values, same.values) and torch.equal(mine.lse, same.lse)


def test_both_phases_are_the_mix_of_all_sources():
    inputs = draw(9, 200, 7168)
    whole = attnres_add_mix_norm(**inputs, implementation="triton")
    queries, gains = inputs["query"][None], inputs["key_gain"][None]
    (mix,) = attnres_bank_mixes(inputs["bank"], queries, gains, implementation="triton")
    merged = attnres_add_mix_norm(**inputs | {"bank": mix}, implementation="triton")
    assert relative_error(merged.normed, whole.normed) < 2 * BF16
    inputs |= {"bank": [mix.values], "lse": mix.lse}
    actual, expected = results(inputs, implementation="triton"), exact(inputs)
    for name, oracle in expected.items():
        assert relative_error(actual[name], oracle) < BF16, name


def test_the_same_twice_and_no_wait_for_the_device():
    inputs = draw(9, 1000, 7168)
    results(inputs, implementation="triton")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        once, again = (results(inputs, implementation="triton") for _ in range(2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(once[name], again[name]) for name in once)


def test_a_chain_compiles_and_has_the_gradients_of_rows_that_autograd_adds():
    inputs = draw(3, 500, 512)
    vectors = [inputs[name] for name in VECTORS]

    def gradients(passed_on: bool, compiled: bool = False) -> torch.Tensor:
        bank = [row.detach().requires_grad_() for row in inputs["bank"]]

        def run(*rows: torch.Tensor) -> torch.Tensor:
            given, prefix, output = rows, inputs["prefix"], inputs["output"]
            for _ in range(4):
                made = attnres_add_mix_norm(given, prefix, output, *vectors, **TRITON)
                given, prefix, output = made.bank if passed_on else rows, made.prefix, made.normed
            return made.normed

        made = (torch.compile(run, fullgraph=True) if compiled else run)(*bank)
        return torch.stack(torch.autograd.grad(made, bank, torch.ones_like(made)))

    apart = gradients(passed_on=False)
    chained = gradients(passed_on=True)
    assert relative_error(chained, apart.double()) < 2 * BF16
    assert torch.equal(chained, gradients(passed_on=True))
    assert relative_error(gradients(passed_on=True, compiled=True), chained.double()) < BF16


def test_a_token_is_the_same_alone_and_among_others():
    inputs = draw(9, 700, 7168)
    vectors = {n: inputs[n] for n in VECTORS}
    whole = attnres_add_mix_norm(**inputs, implementation="triton")
    for start, end in ((0, 1), (333, 340)):
        rows = {n: inputs[n][start:end] for n in ("prefix", "output")}
        part = attnres_add_mix_norm([x[start:end] for x in inputs["bank"]], **rows, **vectors, **TRITON)
        assert torch.equal(part.normed, whole.normed[start:end])


def test_replay_in_a_graph_and_compile_without_a_break():
    inputs = draw(4, 300, 512)
    sources, vectors = [*inputs["bank"], inputs["prefix"]], (inputs["query"], inputs["key_gain"])
    expected, _ = attnres_mix(sources, *vectors, **TRITON)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attnres_mix(sources, *vectors, **TRITON)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h, _ = attnres_mix(sources, *vectors, **TRITON)
    graph.replay()
    assert torch.equal(h, expected)
    compiled = torch.compile(
        lambda *x: attnres_add_mix_norm(inputs["bank"], *x, **TRITON).normed, fullgraph=True
    )
    own = inputs["prefix"], inputs["output"], *vectors, inputs["norm_gain"]
    assert torch.equal(compiled(*own), attnres_add_mix_norm(inputs["bank"], *own, **TRITON).normed)
