"""AttnRes mixing: against the stacked equation in float64, and driven through a toy network's depth."""

from __future__ import annotations

import pytest
import torch
from closeness import kept_by, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.errors import InvalidInput, KernelUnavailable
from openk3.ops.attnres import attnres_mix, eager

IMPLEMENTATIONS = ["reference", "eager"]
LIMITS = [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 4e-3)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def inputs(S, T, d, dtype=torch.float64):
    sources = [(torch.randn(T, d, dtype=torch.float64) * 3**i).to(dtype) for i in range(S)]
    query, gain = torch.randn(d, dtype=torch.float64), 1 + 0.3 * torch.randn(d, dtype=torch.float64)
    return sources, (0.3 * query).to(dtype), gain.to(dtype)


def equation(sources, query, gain, eps=1e-5):
    """Eq. 8-9 with every tensor whole: phi(q, k) = exp(q . RMSNorm(k))."""
    V = torch.stack(list(sources))
    keys = gain * V / (V.square().mean(-1, keepdim=True) + eps).sqrt()
    phi = torch.exp((keys * query).sum(-1, keepdim=True))
    weights = phi / phi.sum(0)
    return (weights * V).sum(0), weights[..., 0].T


def run(function, sources, query, gain, d_h):
    leaves = [x.detach().clone().requires_grad_() for x in (*sources, query, gain)]
    h, weights = function(leaves[:-2], *leaves[-2:])
    return [h, *torch.autograd.grad(h, leaves, d_h.to(h.dtype))], weights


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "limit"), LIMITS)
@pytest.mark.parametrize(("S", "T", "d"), [(1, 5, 8), (2, 1, 16), (9, 33, 24)])
def test_output_weights_and_gradients_equal_the_equation(implementation, dtype, limit, S, T, d):
    sources, query, gain = inputs(S, T, d, dtype)
    d_h = torch.randn(T, d, dtype=torch.float64).to(dtype)
    expected, shares = run(equation, [x.double() for x in sources], query.double(), gain.double(), d_h)
    actual, weights = run(
        lambda *x: attnres_mix(*x, return_weights=True, implementation=implementation),
        sources, query, gain, d_h,
    )  # fmt: skip
    assert all(x.dtype == dtype for x in actual)
    for mine, oracle in zip(actual, expected, strict=True):
        assert (mine.double() - oracle).norm() <= limit * oracle.norm().clamp_min(1e-3 * d_h.norm())
    assert weights.dtype == torch.promote_types(dtype, torch.float32)
    assert not weights.requires_grad
    torch.testing.assert_close(weights.double(), shares.detach(), rtol=1e-5, atol=1e-6)


def test_each_source_gradient_is_accurate_over_eight_decades_of_source_size():
    """The norm on the keys makes the weights blind to size; a gradient is as large as its source is small."""
    sources, query, gain = inputs(5, 40, 32)
    sources = [x / x.norm(dim=-1, keepdim=True) * 10.0 ** (2 * i - 4) for i, x in enumerate(sources)]
    sources, query, gain = [x.float() for x in sources], query.float(), gain.float()
    d_h = torch.randn(40, 32)
    expected, _ = run(equation, [x.double() for x in sources], query.double(), gain.double(), d_h)
    actual, _ = run(attnres_mix, sources, query, gain, d_h)
    for mine, oracle in zip(actual, expected, strict=True):
        assert relative_error(mine, oracle) < 1e-5


@pytest.mark.parametrize("S", [1, 3])
def test_gradcheck(S):
    sources, query, gain = inputs(S, 4, 3)
    leaves = [x.requires_grad_() for x in (*sources, query, gain)]
    assert torch.autograd.gradcheck(
        lambda *x: attnres_mix(x[:-2], *x[-2:], implementation="eager")[0], leaves
    )


@settings(deadline=None, max_examples=15)
@given(T=st.integers(0, 20), S=st.integers(1, 4), piece=st.integers(1, 60))
def test_pieces_do_not_change_the_result(T, S, piece):
    sources, query, gain = inputs(S, T, 6)
    d_h = torch.randn(T, 6, dtype=torch.float64)
    whole, _ = run(attnres_mix, sources, query, gain, d_h)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "CPU_PIECE", piece)
        pieces, _ = run(attnres_mix, sources, query, gain, d_h)
    for mine, oracle in zip(pieces, whole, strict=True):
        torch.testing.assert_close(mine, oracle, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("zeroed", ["query", "key_gain"])
def test_a_zero_query_is_the_plain_average(implementation, zeroed):
    sources, query, gain = inputs(4, 7, 8)
    (query if zeroed == "query" else gain).zero_()
    h, weights = attnres_mix(sources, query, gain, return_weights=True, implementation=implementation)
    torch.testing.assert_close(h, torch.stack(sources).mean(0))
    assert (weights == 0.25).all()


def test_a_zero_source_is_a_source_like_any_other():
    """rms(0) is sqrt(eps): score 0, finite gradients."""
    sources, query, gain = inputs(2, 3, 8)
    sources[0].zero_()
    d_h = torch.randn(3, 8, dtype=torch.float64)
    expected, _ = run(equation, sources, query, gain, d_h)
    for mine, oracle in zip(run(attnres_mix, sources, query, gain, d_h)[0], expected, strict=True):
        torch.testing.assert_close(mine, oracle)


def test_backward_keeps_the_given_sources_and_two_scalars_per_token_and_source():
    S, T, d = 5, 40, 64
    sources, query, gain = inputs(S, T, d)
    leaves = [x.requires_grad_() for x in sources]
    kept = kept_by(lambda: attnres_mix(leaves, query.requires_grad_(), gain, implementation="eager"))
    given_sources = {x.data_ptr() for x in leaves}
    assert {t.data_ptr() for t in kept} >= given_sources
    rest = [t.numel() for t in kept if t.data_ptr() not in given_sources]
    assert sum(n for n in rest if n > d) == 2 * S * T
    assert max(rest) < T * d


# A toy network: L layers of two sublayers (attention, FFN), each the tanh of a matrix product.


def toy_network(layers, d=6):
    matrices = [torch.randn(d, d, dtype=torch.float64) for _ in range(2 * layers)]
    queries = [torch.randn(d, dtype=torch.float64) for _ in range(2 * layers + 1)]  # the last is the output's
    gains = [1 + 0.3 * torch.randn(d, dtype=torch.float64) for _ in range(2 * layers + 1)]
    return matrices, queries, gains, torch.randn(5, d, dtype=torch.float64)


def released_protocol(matrices, queries, gains, embedding, block_size, mix):
    """The bank of frozen rows and the running prefix, a block every `block_size` layers."""
    bank, prefix = [], embedding
    for layer in range(len(matrices) // 2):
        attention, ffn = 2 * layer, 2 * layer + 1
        h = mix([*bank, prefix], queries[attention], gains[attention]) if bank else prefix
        starts_block = layer % block_size == 0
        if starts_block:
            bank.append(prefix)
        out = torch.tanh(h @ matrices[attention])
        prefix = out if starts_block else prefix + out
        h = mix([*bank, prefix], queries[ffn], gains[ffn])
        prefix = prefix + torch.tanh(h @ matrices[ffn])
    return mix([*bank, prefix], queries[-1], gains[-1]), len(bank) + 1


def equation_10(matrices, queries, gains, embedding, sublayers_per_block):
    """Eq. 8-10 from the list of all sublayer outputs: nothing is carried, each block sum is added up anew."""
    outputs = []
    for sublayer in range(len(matrices) + 1):
        whole, rest = divmod(sublayer, sublayers_per_block)
        blocks = [range(n * sublayers_per_block, (n + 1) * sublayers_per_block) for n in range(whole)]
        if rest:
            blocks.append(range(whole * sublayers_per_block, sublayer))
        rows = [embedding, *(sum(outputs[j] for j in block) for block in blocks)]
        h, _ = equation(rows, queries[sublayer], gains[sublayer])
        if sublayer < len(matrices):
            outputs.append(torch.tanh(h @ matrices[sublayer]))
    return h, len(rows)


@pytest.mark.parametrize(("layers", "block_size"), [(6, 1), (6, 2), (7, 3), (5, 12), (1, 1)])
def test_the_bank_and_prefix_protocol_is_equation_10_with_blocks_of_two_sublayers_a_layer(layers, block_size):
    """Block size 1 is a source per *layer*, its two outputs summed; full AttnRes has one per sublayer."""
    *parameters, embedding = toy_network(layers)
    results = []
    for network in (
        lambda *x: released_protocol(*x, block_size, lambda *y: attnres_mix(*y)[0]),
        lambda *x: equation_10(*x, 2 * block_size),
    ):
        leaves = [[x.clone().requires_grad_() for x in group] for group in (*parameters, [embedding])]
        h, sources = network(*leaves[:3], leaves[3][0])
        # the first sublayer sees the embedding alone, so its query and gain have no effect in either form
        used = [x for group in leaves for x in group if x is not leaves[1][0] and x is not leaves[2][0]]
        results.append((sources, h, *torch.autograd.grad(h.square().sum(), used)))
    assert results[0][0] == results[1][0] == -(-layers // block_size) + 1
    for mine, oracle in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(mine, oracle, rtol=1e-9, atol=1e-11)


def test_full_attnres_is_equation_9_when_each_sublayer_output_is_its_own_bank_row():
    matrices, queries, gains, embedding = toy_network(4)
    bank = [embedding]
    for i, matrix in enumerate(matrices):
        bank.append(torch.tanh(attnres_mix(bank, queries[i], gains[i])[0] @ matrix))
    h = attnres_mix(bank, queries[-1], gains[-1])[0]
    expected, sources = equation_10(matrices, queries, gains, embedding, 1)
    assert sources == len(bank) == 9
    torch.testing.assert_close(h, expected, rtol=1e-10, atol=1e-12)


def test_k3s_output_sees_nine_sources():
    """93 layers in blocks of 12: the embedding, seven whole blocks, one of nine layers (report §2.2)."""
    d = 2
    matrices, vectors = [torch.zeros(d, d)] * 186, [torch.zeros(d)] * 187
    _, sources = released_protocol(matrices, vectors, vectors, torch.ones(1, d), 12, lambda rows, *_: rows[0])
    assert sources == 9


def test_wrong_inputs_are_named():
    sources, query, gain = inputs(3, 4, 8)
    with pytest.raises(InvalidInput, match="got no source"):
        attnres_mix([], query, gain)
    with pytest.raises(InvalidInput, match=r"source 2 is \(3, 8\)"):
        attnres_mix([*sources[:2], sources[2][1:]], query, gain)
    with pytest.raises(InvalidInput, match=r"source 1 is .*float32"):
        attnres_mix([sources[0], sources[1].float()], query, gain)
    with pytest.raises(InvalidInput, match=r"query is \(1, 8\), must be \(8,\)"):
        attnres_mix(sources, query[None], gain)
    with pytest.raises(InvalidInput, match="key_gain is"):
        attnres_mix(sources, query, gain[1:])
    with pytest.raises(InvalidInput, match="eps must be positive"):
        attnres_mix(sources, query, gain, eps=0.0)
    with pytest.raises(KernelUnavailable, match="computes in fp32, not float64"):
        attnres_mix(sources, query, gain, implementation="triton")
