"""Whenever a saving process dies, the last complete checkpoint loads bit for bit and the run goes on."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from saving_child import CONFIG, flat, state_at

from openk3.checkpoint.train_state import CheckpointStore

CHILD = Path(__file__).with_name("saving_child.py")


def start(*arguments: str | Path, **options) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # what CUDA has started in a process does not survive a fork
    command = [sys.executable, CHILD, *arguments]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, **options)


def goes_on_after(folder: Path) -> int | None:
    """The step that is left, after checking that it is whole and that saving goes on from it."""
    store = CheckpointStore(folder)
    left = store.latest()
    if left is not None:
        assert flat(store.load(config=CONFIG)) == flat(state_at(left))
    store.save(10, state_at(10), config=CONFIG)
    assert flat(store.load()) == flat(state_at(10))
    assert [entry.name for entry in folder.iterdir() if ".partial-" in entry.name] == []
    assert len(store.steps()) <= 2
    return left


@pytest.mark.parametrize(
    ("operation", "before", "after"),
    [("save the first", [], {None, 1}), ("save another", [2, 3], {3, 4}), ("rewind", [2, 3, 4], {4, 3, 2})],
)
def test_a_kill_before_any_file_operation_leaves_the_last_complete_checkpoint(
    operation, before, after, tmp_path
):
    for step in before:
        CheckpointStore(tmp_path / "before", keep=3).save(step, state_at(step), config=CONFIG)
    (tmp_path / "before").mkdir(exist_ok=True)
    (tmp_path / "work").mkdir()

    child = start("dissect", tmp_path / "work", tmp_path / "before", operation)
    assert child.wait(timeout=120) == 0

    runs = sorted((tmp_path / "work").iterdir(), key=lambda run: int(run.name))
    assert len(runs) > (20 if "save" in operation else 6)
    left = [goes_on_after(run) for run in runs]
    assert set(left) == after
    # Once published, never unpublished: a later death leaves as much as an earlier one, or more.
    assert left == sorted(left, key=lambda step: step or 0, reverse=operation == "rewind")


def kill_at_random_moments(folder: Path, kills: int, seed: int) -> None:
    moments = random.Random(seed)
    for _ in range(kills):
        child = start("loop", folder)
        said = child.stdout.readline()
        time.sleep(moments.uniform(0, 0.3))
        child.kill()
        said += child.communicate()[0]
        reported = int(said.split()[-1])
        store = CheckpointStore(folder)
        assert store.latest() >= reported > 0
        assert flat(store.load(config=CONFIG)) == flat(state_at(store.latest(), 20_000))


def test_two_kills_at_random_moments_lose_nothing_that_was_reported_saved(tmp_path):
    kill_at_random_moments(tmp_path / "checkpoints", kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_ten_kills_at_random_moments_lose_nothing_that_was_reported_saved(tmp_path, seed):
    kill_at_random_moments(tmp_path / "checkpoints", kills=10, seed=100 + seed)


def test_ranks_of_a_group_save_together_and_fail_together(tmp_path):
    ranks = [start("rank", str(rank), tmp_path, stderr=subprocess.PIPE) for rank in range(2)]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    for said, _ in outputs:
        assert said.splitlines()[0].endswith("cannot write: File too large")
        assert said.splitlines()[1] == "latest 1"
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000001"]

    alone = CheckpointStore(tmp_path / "checkpoints").load()
    assert torch.equal(alone["model"]["sharded"], torch.arange(70_700.0).reshape(101, 700))
    assert alone["model"]["n"] == 0
    assert {part: alone[part]["position"] for part in alone if part.startswith("rng")} == {
        "rng-0": 10,
        "rng-1": 11,
    }
