"""Kernels are launched on the card that holds their tensors, whichever is current."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from openk3.ops.kernel_operator import kernel_operator

OPS = Path(__file__).resolve().parents[2] / "src/openk3/ops"


@pytest.fixture
def cards(monkeypatch):
    """A machine of several cards, of which card 0 is current; `.entered` lists those made current."""
    cards = SimpleNamespace(current=0, entered=[])

    class Device:
        def __init__(self, card: int) -> None:
            self.card, self.before = card, cards.current

        def __enter__(self) -> None:
            cards.current = self.card
            cards.entered.append(self.card)

        def __exit__(self, *_: object) -> None:
            cards.current = self.before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: cards.current)
    monkeypatch.setattr(torch.cuda, "device", Device)
    return cards


@pytest.mark.parametrize(("card", "entered"), [(-1, []), (0, []), (1, [1])])
def test_the_card_of_the_first_argument_is_current_in_the_body_and_only_there(
    monkeypatch, cards, card, entered
):
    registered = []
    monkeypatch.setattr(
        torch.library, "custom_op", lambda name, body, **options: registered.append((name, body, options))
    )

    def body(x: torch.Tensor, factor: float) -> torch.Tensor:
        if factor == 0:
            raise ZeroDivisionError
        return x, factor, cards.current  # type: ignore[return-value]

    kernel_operator("openk3::tried", mutates_args=("x",))(body)
    ((name, on_its_card, options),) = registered
    assert name == "openk3::tried"
    assert options == {"mutates_args": ("x",), "schema": "(Tensor(a0!) x, float factor) -> Tensor"}
    x = torch.ones(1)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: card)
    assert on_its_card(x, 2.0) == (x, 2.0, max(card, 0))
    assert (cards.current, cards.entered) == (0, entered)
    for of_a_list in ([x, x], 2.0), ([], x):
        assert on_its_card(*of_a_list)[2] == max(card, 0)
    with pytest.raises(ZeroDivisionError):
        on_its_card(x, 0.0)
    assert cards.current == 0


def test_every_operator_with_kernels_is_registered_with_it():
    """Kernels are launched in operators of torch alone, and those are made in one place."""
    for path in OPS.rglob("*.py"):
        made = re.findall(r"library\.(custom_op|define|impl|triton_op)\b|Library\(", path.read_text())
        assert len(made) == (2 if path.name == "kernel_operator.py" else 0), path
