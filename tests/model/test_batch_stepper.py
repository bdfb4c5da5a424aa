"""Decoding of many sequences against the whole forward of the model, row by row."""

from __future__ import annotations

import pytest
import torch

from model.tiny import BASE, VARIANTS, built, packed
from openk3.errors import InvalidInput
from openk3.model import K3
from openk3.model.decoding import BatchStepper, projections
from openk3.model.protocols import LOCAL, LocalDispatch, Seams


class Sequence:
    """One sequence by the whole forward: the oracle."""

    def __init__(self, model: K3, prompt: torch.Tensor) -> None:
        self.model, self.state, self.length = model, None, 0
        self.logits = self(prompt)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits `[V]` after `tokens`."""
        cu = torch.tensor([0, len(tokens)], dtype=torch.int32)
        with torch.inference_mode():
            out = self.model(tokens, cu, state=self.state)
            self.state, self.length = out.state, self.length + len(tokens)
            return self.model.logits(out.hidden)[-1]


def loaded(model: K3, lengths: list[int], slots: list[int], count: int, **options):
    """A stepper whose `slots` hold prompts of `lengths`, and each prompt's own oracle."""
    tokens, cu = packed(lengths, model.config.vocab_size)
    stepper = BatchStepper(model, count, max(lengths) + 20, **options)
    with torch.inference_mode():
        stepper.load(slots, model(tokens, cu).state, lengths)
    return stepper, [Sequence(model, part) for part in tokens.split(lengths)]


def largest_error(model: K3, lengths: list[int], slots: list[int], steps: int, **options) -> float:
    """Of a logit, relative to the largest, over steps in which each row may also rest."""
    stepper, oracles = loaded(model, lengths, slots, max(slots) + 2, **options)
    generator = torch.Generator().manual_seed(5)
    worst = 0.0
    for step in range(steps):
        tokens = torch.randint(0, model.config.vocab_size, (len(slots),), generator=generator)
        live = [(step + row) % 3 != 0 for row in range(len(slots))]
        rows = torch.tensor(
            [slot if here else -1 for slot, here in zip(slots, live, strict=True)], dtype=torch.int32
        )
        logits = stepper(tokens, rows)
        assert logits.isfinite().all()
        for row, oracle in enumerate(oracles):
            if live[row]:
                right = oracle(tokens[row : row + 1])
                worst = max(worst, float((logits[row] - right).abs().max() / right.abs().max()))
    return worst


@pytest.mark.parametrize("folded", [0, 1 << 20], ids=["apart", "folded"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_each_row_are_those_of_the_whole_forward(variant, folded, monkeypatch):
    monkeypatch.setattr(projections, "FOLDED_ELEMENTS", folded)
    model = built(VARIANTS[variant])
    assert largest_error(model, [5, 1, 9], [3, 0, 1], steps=7) < 1e-11


def test_a_row_of_no_sequence_changes_no_slot():
    model = built(BASE)
    stepper, (oracle, _) = loaded(model, [4, 6], [0, 1], 2)
    nobody = torch.tensor([-1, -1], dtype=torch.int32)
    for _ in range(3):
        assert stepper(torch.tensor([7, 9]), nobody).isfinite().all()
    logits = stepper(torch.tensor([3]), torch.tensor([0], dtype=torch.int32))
    assert float((logits[0] - oracle(torch.tensor([3]))).abs().max()) < 1e-11


def test_a_slot_is_taken_over_by_a_shorter_sequence():
    model = built(BASE)
    stepper, _ = loaded(model, [9], [1], 2)
    one = torch.tensor([1], dtype=torch.int32)
    stepper(torch.tensor([5]), one)
    tokens, cu = packed([2], BASE.vocab_size, seed=3)
    with torch.inference_mode():
        stepper.load([1], model(tokens, cu).state, [2])
    oracle = Sequence(model, tokens)
    for token in (8, 2, 60):
        given = torch.tensor([token])
        assert float((stepper(given, one)[0] - oracle(given)).abs().max()) < 1e-11


def test_a_state_that_does_not_fit_its_slots_is_refused():
    model = built(BASE)
    stepper, _ = loaded(model, [4], [0], 2)
    tokens, cu = packed([3, 30], BASE.vocab_size)
    with torch.inference_mode():
        state = model(tokens, cu).state
    for slots, lengths, reason in [
        ([0, 0], [3, 30], "different ones of 2"),
        ([0, 2], [3, 30], "different ones of 2"),
        ([0], [3], "a state of 2 sequences"),
        ([0, 1], [3, 30], "30 tokens, a slot has room for 24"),
    ]:
        with pytest.raises(InvalidInput, match=reason):
            stepper.load(slots, state, lengths)
    with pytest.raises(InvalidInput, match="at least 1"):
        BatchStepper(model, 0, 4)


def test_tokens_and_slots_that_do_not_fit_are_refused():
    stepper, _ = loaded(built(BASE), [4, 3], [0, 1], 2)
    tokens, slots = torch.tensor([1, 2]), torch.tensor([0, 1], dtype=torch.int32)
    for wrong in [(tokens, slots[:1]), (tokens[:1], slots), (tokens.int(), slots), (tokens, slots.long())]:
        with pytest.raises(InvalidInput, match="BatchStepper: tokens and slots"):
            stepper(*wrong)
    assert stepper.memory.lengths.tolist() == [4, 3, 0]
    assert stepper(tokens[:0], slots[:0]).shape == (0, BASE.vocab_size)


def test_a_model_that_it_cannot_stand_for_is_refused():
    model = built(BASE)
    assert BatchStepper.suits(model)
    assert not BatchStepper.suits(K3(BASE, device="meta"))
    assert not BatchStepper.suits(object())
    other = K3(BASE, seams=Seams(LocalDispatch(), LOCAL.context, LOCAL.tag))
    with pytest.raises(InvalidInput, match="local seams"):
        BatchStepper(other, 1, 1)
    model.layers[0].register_forward_hook(lambda *_: None)
    assert not BatchStepper.suits(model)
