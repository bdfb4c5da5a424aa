"""K3 against the formulas in NumPy, and the properties that training and serving rest on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from model import plain_k3
from model.tiny import BASE, VARIANTS, built, changed, packed
from openk3.errors import InvalidInput
from openk3.model import K3, DecodeState, ForwardRecord, KdaState, MlaState

ALL = pytest.mark.parametrize("variant", VARIANTS)


def weights(model: K3) -> dict[str, np.ndarray]:
    return {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}


def logits(model: K3, tokens: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
    return model.logits(model(tokens, cu).hidden)


@ALL
def test_logits_equal_the_formulas(variant):
    model = built(VARIANTS[variant])
    tokens, cu = packed([7], model.config.vocab_size)
    expected = plain_k3.logits(weights(model), model.config, tokens.tolist())
    assert (
        np.abs(logits(model, tokens, cu).detach().numpy() - expected).max() < 1e-10 * np.abs(expected).max()
    )


def test_mtp_loss_equals_the_formulas():
    model = built(VARIANTS["with MTP"])
    tokens, cu = packed([6], model.config.vocab_size)
    targets = torch.cat([tokens[1:], torch.tensor([3])])
    loss = model.loss(tokens, targets, cu, mtp_weight=0.3)
    expected = plain_k3.mtp_logits(weights(model), model.config, tokens.tolist())
    nll = np.log(np.exp(expected).sum(-1)) - expected[np.arange(5), targets[1:].numpy()]
    assert loss.mtp is not None
    assert loss.mtp_count.item() == 5
    assert loss.mtp.item() == pytest.approx(nll.sum(), rel=1e-9)
    assert loss.total.item() == pytest.approx(loss.next_token.item() + 0.3 * nll.sum(), rel=1e-9)


@settings(max_examples=8, deadline=None)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any))
def test_mtp_losses_of_packed_sequences_are_those_of_each_alone(lengths):
    """Also of empty ones, which start where others do."""
    model = built(VARIANTS["with MTP"])
    tokens, cu = packed(lengths, model.config.vocab_size)
    targets = tokens.roll(-1)
    together = model.loss(tokens, targets, cu, mtp_weight=1.0)
    alone = [
        model.loss(tokens[a:b], targets[a:b], torch.tensor([0, b - a], dtype=torch.int32), mtp_weight=1.0)
        for a, b in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)
        if a < b
    ]
    assert together.mtp.item() == pytest.approx(sum(loss.mtp.item() for loss in alone), rel=1e-9)
    assert together.mtp_count.item() == sum(length - 1 for length in lengths if length)


@ALL
@settings(max_examples=4, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_packed_sequences_equal_each_alone(variant, lengths):
    model = built(VARIANTS[variant])
    tokens, cu = packed(lengths, model.config.vocab_size)
    together = logits(model, tokens, cu)
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        alone = logits(model, tokens[start:end], torch.tensor([0, end - start], dtype=torch.int32))
        torch.testing.assert_close(together[start:end], alone, rtol=1e-9, atol=1e-11)


@ALL
@settings(max_examples=4, deadline=None)
@given(cuts=st.lists(st.integers(0, 11), max_size=4), n=st.integers(1, 3))
def test_decoding_in_pieces_equals_one_forward(variant, cuts, n):
    model = built(VARIANTS[variant])
    sequences = [packed([11], model.config.vocab_size, seed=i)[0] for i in range(n)]
    whole = torch.cat(sequences)
    expected = logits(model, whole, torch.arange(0, 11 * n + 1, 11, dtype=torch.int32)).view(
        n, 11, model.config.vocab_size
    )
    state: DecodeState | None = None
    for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), 11], strict=True):
        cu = torch.arange(n + 1, dtype=torch.int32) * (b - a)
        out = model(torch.cat([s[a:b] for s in sequences]), cu, state=state)
        state = out.state
        actual = model.logits(out.hidden).view(n, b - a, model.config.vocab_size)
        torch.testing.assert_close(actual, expected[:, a:b], rtol=1e-9, atol=1e-11)
    assert state is not None
    assert state.lengths.tolist() == [11] * n


def test_states_have_the_documented_layout():
    model = built(BASE)
    tokens, cu = packed([3, 8], BASE.vocab_size)
    state = model(tokens, cu).state
    kda, mla = state.layers[0], state.layers[3]
    assert isinstance(kda, KdaState)
    assert isinstance(mla, MlaState)
    assert kda.S.shape == (2, 2, 8, 8)
    assert kda.conv.shape == (2, 3, 3 * 2 * 8)
    assert mla.latents.shape == (11, 10 + 4)
    assert mla.cu_seqlens.tolist() == [0, 3, 11]


def test_precise_parameters_stay_fp32_in_a_bf16_model():
    model = K3(BASE, dtype=torch.bfloat16)
    precise = {n for n, t in model.state_dict().items() if t.dtype == torch.float32}
    suffixes = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
    assert precise == {n for n in model.state_dict() if n.endswith(suffixes)}


def test_bf16_logits_are_near_fp32_ones():
    """Without routers: a flipped choice is a different function, not a rounding error."""
    config = changed(dense_layers=5, moe=None, initializer_range=0.1)
    exact = built(config, dtype=torch.float32)
    rounded = K3(config, dtype=torch.bfloat16)
    rounded.load_state_dict(exact.state_dict())
    tokens, cu = packed([20, 12], config.vocab_size)
    a, b = logits(exact, tokens, cu), logits(rounded, tokens, cu)
    assert b.dtype == torch.float32
    error = float((a - b).detach().norm() / a.detach().norm())
    # About 80 roundings of 2^-9 one after another, independent: sqrt(80) * 0.2% = 1.8%, and weights on top.
    assert error < 0.06, f"relative error {error:.3g}"


@ALL
def test_recompute_gives_the_same_gradients_and_keeps_less(variant):
    tokens, cu = packed([40, 24], 61)
    targets = tokens.roll(-1)
    grads, kept, loads = [], [], []
    for recompute in (False, True):
        model = built(VARIANTS[variant], recompute=recompute)
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        seen: dict[int, int] = {}

        def pack(t, seen=seen, parameters=parameters):
            storage = t.untyped_storage()
            if storage.data_ptr() not in parameters:
                seen[storage.data_ptr()] = storage.nbytes()
            return t

        record = ForwardRecord()
        with saved_tensors_hooks(pack, lambda t: t):
            loss = model.loss(tokens, targets, cu, mtp_weight=0.5, record=record).total
        counted = {layer: load.clone() for layer, load in record.load.items()}
        loss.backward()
        assert record.load.keys() == counted.keys()
        assert all(torch.equal(record.load[layer], counted[layer]) for layer in counted)
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
        kept.append(sum(seen.values()))
        loads.append(record.load)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    # One layer that is not run again would be a fifth of all or more.
    assert kept[1] < 0.16 * kept[0], f"kept {kept[0]} bytes without recompute, {kept[1]} with"
    assert all(torch.equal(loads[0][i], loads[1][i]) for i in loads[0])


def test_a_recomputed_layer_routes_as_it_did_even_if_its_router_would_choose_otherwise_now():
    """As on a device whose second forward rounds otherwise; here the balance bias moves in between."""
    tokens, cu = packed([40, 24], 61)
    grads = []
    for recompute in (False, True):
        model = built(BASE, recompute=recompute)
        loss = model.loss(tokens, tokens.roll(-1), cu, record=ForwardRecord()).total
        for layer in model.layers[1:]:
            layer.block_sparse_moe.gate.e_score_correction_bias.neg_().add_(torch.linspace(-2, 2, 6))
        loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in grads[0].items():
        torch.testing.assert_close(grads[1][name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_every_parameter_of_every_variant_gets_a_gradient():
    for name, config in VARIANTS.items():
        model = built(config)
        tokens, cu = packed([30, 30], 61)
        model.loss(tokens, tokens.roll(-1), cu, mtp_weight=1.0).total.backward()
        # Layer 0 reads an empty bank: the release keeps these two tensors, and they have no effect.
        unused = ("layers.0.self_attention_res_norm.weight", "layers.0.self_attention_res_proj.weight")
        silent = [n for n, p in model.named_parameters() if p.grad is None and n not in unused]
        assert silent == [], name


def test_loss_gradient_equals_finite_differences():
    model = built(changed(num_layers=4, tie_embeddings=True))
    tokens, cu = packed([5, 4], 61)
    targets = tokens.roll(-1)
    model.loss(tokens, targets, cu).total.backward()
    generator = torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        direction = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        with torch.no_grad():
            sides = []
            for sign in (1, -1):
                p += sign * 1e-6 * direction
                sides.append(float(model.loss(tokens, targets, cu).total))
                p -= sign * 1e-6 * direction
        numeric = (sides[0] - sides[1]) / 2e-6
        assert float((p.grad * direction).sum()) == pytest.approx(numeric, rel=2e-5, abs=2e-6), name


def test_routers_count_each_unmasked_token_once_and_never_in_evaluation():
    model = built(BASE)
    tokens, cu = packed([9, 7], BASE.vocab_size)
    mask = torch.ones(16, dtype=torch.bool)
    mask[[0, 5, 15]] = False
    record = ForwardRecord(token_mask=mask)
    model(tokens, cu, record=record)
    assert sorted(record.load) == [1, 2, 3, 4]
    for layer in record.load:
        assert int(record.load[layer].sum()) == 13 * 2
        assert record.histogram[layer].sum(1).tolist() == [13] * 6
    model(tokens, cu, record=record)  # the same record again: a recompute
    assert int(record.load[1].sum()) == 13 * 2

    model.eval()
    record = ForwardRecord()
    model(tokens, cu, record=record)
    assert record.load == {}
    assert record.histogram == {}


def test_a_first_token_does_not_count_in_the_mtp_router_which_cannot_tell_experts_apart_for_it():
    """It enters as zeros, so its scores are all equal: ties that no bias can divide among experts."""
    model = built(VARIANTS["with MTP"])
    tokens, cu = packed([5, 0, 1, 10], model.config.vocab_size)
    mask = torch.ones(16, dtype=torch.bool)
    mask[[3, 15]] = False
    for token_mask, trunk, mtp in ((None, 16, 13), (mask, 14, 11)):
        record = ForwardRecord(token_mask=token_mask)
        model.loss(tokens, tokens.roll(-1), cu, mtp_weight=0.5, record=record)
        counted = {layer: histogram.sum(1).unique().tolist() for layer, histogram in record.histogram.items()}
        assert counted == {1: [trunk], 2: [trunk], 3: [trunk], 4: [trunk], 5: [mtp]}
        assert {layer: int(load.sum()) for layer, load in record.load.items()} == {
            layer: 2 * count for layer, (count,) in counted.items()
        }


def test_record_reports_max_logit_mixes_and_states():
    model = built(BASE)
    tokens, cu = packed([9], BASE.vocab_size)
    record = ForwardRecord(detail=True)
    model(tokens, cu, record=record)
    assert sorted(record.max_logit) == [3, 4]
    assert record.max_logit[3].shape == (3,)
    assert sorted(record.state_norm) == [0, 1, 2]
    assert "layers.0.attn" not in record.source_weights  # the bank is empty there
    assert record.source_weights["layers.0.mlp"].shape == (2,)
    assert record.source_weights["output"].shape == (4,)  # embedding, two blocks of two, and the third's sum
    for share in record.source_weights.values():
        assert float(share.sum()) == pytest.approx(1)


def test_malformed_input_is_named():
    model = built(BASE)
    tokens, cu = packed([4], BASE.vocab_size)
    with pytest.raises(InvalidInput, match="tokens must be int64"):
        model(tokens.int(), cu)
    with pytest.raises(InvalidInput, match="cu_seqlens must be int32"):
        model(tokens, cu.long())
    with pytest.raises(InvalidInput, match="token 61 at position 2"):
        model(torch.tensor([0, 1, 61, 2]), cu)
    with pytest.raises(InvalidInput, match="ends at 4, but there are 5 tokens"):
        model(torch.zeros(5, dtype=torch.int64), cu)
    state = model(tokens, cu).state
    with pytest.raises(InvalidInput, match="state is of 1 sequences, cu_seqlens of 2"):
        model(tokens, torch.tensor([0, 2, 4], dtype=torch.int32), state=state)
