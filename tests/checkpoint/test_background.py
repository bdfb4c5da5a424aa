"""A checkpoint written behind the caller's back is what was saved, comes in order, never fails in silence."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from openk3.checkpoint.background import BackgroundSaves
from openk3.checkpoint.train_state import CheckpointStore
from openk3.errors import StorageError


class SlowStore(CheckpointStore):
    """Writes once it may; fails where it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, keep=10)
        self.may_write = threading.Event()
        self.began = threading.Event()
        self.fails_at: set[int] = set()

    def save(self, step, state, *, config):
        self.began.set()
        assert self.may_write.wait(20)
        if step in self.fails_at:
            raise StorageError(f"{self.path(step)}: no space left")
        return super().save(step, state, config=config)


@pytest.fixture
def store(tmp_path) -> SlowStore:
    return SlowStore(tmp_path / "store")


def state() -> dict[str, object]:
    tied = torch.arange(6.0).view(2, 3)
    return {
        "model": {"weight": tied, "view": tied.T[1:], "scalar": torch.tensor(3, dtype=torch.int64)},
        "loader": {"place": [1, [2, 3]], "name": "x"},
    }


def test_what_changes_after_the_call_is_not_in_the_checkpoint(store):
    mine = state()
    with BackgroundSaves(store) as saves:
        saves.save(1, mine, config={})
        assert store.began.wait(20)
        mine["model"]["weight"].fill_(-1)
        mine["model"]["scalar"].fill_(-1)
        mine["loader"]["place"][1][0] = -1
        mine["loader"]["name"] = "y"
        store.may_write.set()
    saved, expected = store.load(1), state()
    for name, value in expected["model"].items():
        assert torch.equal(saved["model"][name], value), name
    assert saved["loader"] == expected["loader"]


def test_a_save_does_not_wait_for_the_disk_and_the_next_one_waits_for_it(store):
    with BackgroundSaves(store) as saves:
        saves.save(1, state(), config={})
        saves.check()
        assert store.steps() == []
        threading.Timer(0.1, store.may_write.set).start()
        saves.save(2, state(), config={})
        assert store.steps()[:1] == [1]
        saves.finish()
        assert store.steps() == [1, 2]


def test_an_error_is_raised_once_by_what_is_called_next(store):
    store.may_write.set()
    store.fails_at = {2, 4}
    with BackgroundSaves(store) as saves:
        saves.save(1, state(), config={})
        saves.save(2, state(), config={})
        with pytest.raises(StorageError, match="step-00000002: no space left"):
            saves.save(3, state(), config={})
        saves.check()
        saves.save(4, state(), config={})
        saves.settle()
        with pytest.raises(StorageError, match="step-00000004"):
            saves.check()
        saves.save(5, state(), config={})
    assert store.steps() == [1, 5]


def test_the_end_waits_and_tells(store):
    store.may_write.set()
    store.fails_at = {2, 3}
    with pytest.raises(StorageError, match="step-00000002"), BackgroundSaves(store) as saves:
        saves.save(2, state(), config={})
    with pytest.raises(ZeroDivisionError) as told:
        save_and_raise(store, 3, ZeroDivisionError())
    assert "step-00000003: no space left" in told.value.__notes__[0]


def test_an_exception_does_not_cost_the_checkpoint_being_written(store):
    threading.Timer(0.1, store.may_write.set).start()
    with pytest.raises(KeyboardInterrupt):
        save_and_raise(store, 1, KeyboardInterrupt())
    assert store.steps() == [1]


def save_and_raise(store: CheckpointStore, step: int, error: BaseException) -> None:
    with BackgroundSaves(store) as saves:
        saves.save(step, state(), config={})
        raise error
