"""Decoding one token at a time without gradients, which takes a path of its own, against the other path."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from model.tiny import BASE, VARIANTS, built, packed
from openk3.model import K3, DecodeState, step
from openk3.model.decoder import LOCAL
from openk3.model.protocols import LocalDispatch, Seams


def states(state: DecodeState) -> list[torch.Tensor]:
    return [tensor for layer in state.layers for tensor in vars(layer).values()]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("prompts", [[5], [3, 0, 7], [1] * 9], ids=["one", "some", "many"])
def test_steps_equal_the_packed_path_in_logits_and_states(variant, prompts, monkeypatch):
    model = built(VARIANTS[variant])
    taken = count_steps(monkeypatch)
    tokens, cu = packed(prompts, model.config.vocab_size)
    state = other = model(tokens, cu).state
    each = torch.arange(len(prompts) + 1, dtype=torch.int32)
    for seed in range(4):
        tokens, _ = packed([len(prompts)], model.config.vocab_size, seed=seed)
        expected = model(tokens, each, state=other)
        with torch.no_grad():
            out = model(tokens, each, state=state)
        torch.testing.assert_close(out.hidden, expected.hidden, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(out.mixed, expected.mixed, rtol=1e-9, atol=1e-11)
        for mine, theirs in zip(states(out.state), states(expected.state), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
            assert mine.is_contiguous()
        assert out.state.lengths.tolist() == expected.state.lengths.tolist()
        state, other = out.state, expected.state
    assert taken == [4]


def test_a_step_in_half_precision_is_as_near_to_float64_as_the_packed_path():
    """Without routers: a flipped choice is a different function, not a rounding error."""
    config = VARIANTS["dense only"]
    exact, rounded = built(config, dtype=torch.float64), K3(config, dtype=torch.bfloat16)
    rounded.load_state_dict(exact.state_dict())
    tokens, _ = packed([12], config.vocab_size)
    errors = []
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            hidden = []
            for model in (exact, rounded):
                state = None
                for token in tokens:
                    out = model(token[None], torch.tensor([0, 1], dtype=torch.int32), state=state)
                    state = out.state
                assert out.hidden.dtype == model.embed_tokens.weight.dtype
                hidden.append(out.hidden.double())
            errors.append(float((hidden[0] - hidden[1]).detach().norm() / hidden[0].detach().norm()))
    assert errors[1] < 1.5 * errors[0] < 0.1


def test_states_are_values_that_a_step_does_not_write_into():
    model = built(BASE)
    tokens, cu = packed([5, 3], BASE.vocab_size)
    with torch.no_grad():
        state = model(tokens, cu).state
        before = [tensor.clone() for tensor in states(state)]
        model(tokens[:2], torch.arange(3, dtype=torch.int32), state=state)
    assert all(torch.equal(a, b) for a, b in zip(states(state), before, strict=True))


def test_only_what_a_step_can_do_becomes_one(monkeypatch):
    model = built(BASE)
    taken = count_steps(monkeypatch)
    tokens, cu = packed([4, 4], BASE.vocab_size)
    one, two = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 2, 2], dtype=torch.int32)
    with torch.no_grad():
        state = model(tokens, cu).state
        model(tokens[:2], one)  # no state: a prompt of one token
        model(tokens[:2], two, state=state)  # two tokens of the first sequence
    model(tokens[:2], one, state=state)  # gradients
    elsewhere = K3(BASE, dtype=torch.float64, seams=Seams(LocalDispatch(), LOCAL.context, LOCAL.tag))
    elsewhere.load_state_dict(model.state_dict())
    with torch.no_grad():
        elsewhere(tokens[:2], one, state=state)  # someone else's experts
        assert taken == [0]
        model(tokens[:2], one, state=state)
    assert taken == [1]


def count_steps(monkeypatch) -> list[int]:
    """How often the path was taken, in place of a number."""
    taken = [0]
    real = step.step

    def counted(model: nn.Module, *inputs):
        taken[0] += 1
        return real(model, *inputs)

    monkeypatch.setattr("openk3.model.decoder.step", counted)
    return taken
