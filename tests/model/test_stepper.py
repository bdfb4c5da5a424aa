"""The stepper against the whole forward of the model, token by token."""

from __future__ import annotations

import pytest
import torch

from model.tiny import BASE, VARIANTS, built, packed
from openk3.model import K3, DecodeState, stepper
from openk3.model.generate import Sampling, generate
from openk3.model.protocols import LOCAL, LocalDispatch, Seams
from openk3.model.stepper import Stepper

ONE = torch.tensor([0, 1], dtype=torch.int32)


def states(state: DecodeState) -> list[torch.Tensor]:
    return [tensor for layer in state.layers for tensor in vars(layer).values()]


def largest_error(model: K3, prompt: int, steps: int) -> float:
    """Of a logit, over `steps` tokens after a prompt of `prompt`."""
    tokens, cu = packed([prompt], model.config.vocab_size)
    following, _ = packed([steps], model.config.vocab_size, seed=1)
    errors = []
    with torch.inference_mode():
        state = model(tokens, cu).state
        step = Stepper(model, state)
        for token in following:
            out = model(token[None], ONE, state=state)
            state = out.state
            errors.append(float((step(int(token)) - model.logits(out.hidden)[0]).abs().max()))
    return max(errors)


@pytest.mark.parametrize("join_bytes", [0, 1 << 22], ids=["apart", "joined"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_whole_forward(variant, join_bytes, monkeypatch):
    monkeypatch.setattr(stepper, "JOIN_BYTES", join_bytes)
    model = built(VARIANTS[variant])
    assert Stepper.suits(model)
    assert largest_error(model, prompt=5, steps=6) < 1e-11


def test_logits_stay_those_of_the_whole_forward_as_latents_outgrow_their_room():
    assert largest_error(built(BASE), prompt=1, steps=150) < 1e-11


def test_after_a_prompt_of_no_tokens_it_starts_the_sequence():
    assert largest_error(built(BASE), prompt=0, steps=3) < 1e-11


def test_a_state_is_a_value_that_several_steppers_can_start_from():
    model = built(BASE)
    tokens, cu = packed([5], BASE.vocab_size)
    with torch.inference_mode():
        state = model(tokens, cu).state
        before = [tensor.clone() for tensor in states(state)]
        first = [Stepper(model, state)(3) for _ in range(2)]
    assert torch.equal(*first)
    assert all(torch.equal(a, b) for a, b in zip(states(state), before, strict=True))


def test_generation_takes_it_and_writes_what_the_whole_forward_writes(monkeypatch):
    model = built(BASE)
    made = []
    monkeypatch.setattr(Stepper, "__init__", counted(Stepper.__init__, made))
    sampling = Sampling(temperature=0.7, seed=3)
    mine = list(generate(model, [1, 2, 3], 20, sampling=sampling))
    assert len(made) == 1
    monkeypatch.setattr(Stepper, "suits", staticmethod(lambda model: False))
    assert list(generate(model, [1, 2, 3], 20, sampling=sampling)) == mine
    assert len(made) == 1


def test_a_model_that_it_cannot_stand_for_is_run_whole():
    assert not Stepper.suits(K3(BASE, dtype=torch.bfloat16))
    assert not Stepper.suits(K3(BASE, device="meta"))
    assert not Stepper.suits(K3(BASE, seams=Seams(LocalDispatch(), LOCAL.context, LOCAL.tag)))
    assert not Stepper.suits(object())
    model = built(BASE)
    hook = model.layers[0].register_forward_hook(lambda *_: None)
    assert not Stepper.suits(model)
    hook.remove()
    assert Stepper.suits(model)


def counted(function, calls: list):
    def call(*arguments):
        calls.append(arguments)
        return function(*arguments)

    return call
