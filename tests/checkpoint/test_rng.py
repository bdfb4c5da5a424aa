"""Every global generator continues where it was."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from openk3.checkpoint.rng import capture_rng, restore_rng
from openk3.checkpoint.train_state import CheckpointStore


def draw() -> list:
    """An odd number of normals, so that each generator's spare one is part of the state."""
    return [
        random.random(),
        random.gauss(0, 1),
        *np.random.standard_normal(3),
        np.random.randint(1 << 30),
        *torch.randn(17).tolist(),
        torch.randperm(50).tolist(),
    ]


@pytest.mark.parametrize("through_disk", [False, True])
def test_the_draws_after_a_restore_are_those_after_the_capture(tmp_path, through_disk):
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draw()
    state = capture_rng()
    expected = [draw() for _ in range(3)]
    if through_disk:
        store = CheckpointStore(tmp_path)
        store.save(1, {"rng": state}, config={})
        state = store.load()["rng"]
    random.seed(4)
    np.random.seed(5)
    torch.manual_seed(6)
    restore_rng(state)
    assert [draw() for _ in range(3)] == expected
    restore_rng(state)
    assert draw() == expected[0]


def test_the_state_is_the_same_shape_with_and_without_a_gpu(monkeypatch):
    """A run that began where torch sees a GPU goes on where it sees none."""
    here = capture_rng()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert capture_rng().keys() == here.keys() == {"python", "numpy", "torch"}
