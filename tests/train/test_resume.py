"""A run that dies and goes on is, bit for bit, the run that did not die."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import nervous_config, tiny_config, tiny_data, tiny_run, without_timing

import openk3
from openk3.checkpoint.jsonl import read_jsonl
from openk3.checkpoint.train_state import CheckpointStore
from openk3.data.loader import Stream
from openk3.data.windows import Sample
from openk3.errors import CheckpointError, InvalidInput
from openk3.train.config import TrainConfig
from openk3.train.data import TrainingData
from openk3.train.loop import run
from openk3.train.progress import Silent

STEPS = 24
MANY_STEPS = 80
VICTIM = Path(__file__).with_name("tiny_run.py")


def start(out: Path, steps: int, *extra: str) -> subprocess.Popen[bytes]:
    environment = {
        "PYTHONPATH": f"{Path(openk3.__file__).parents[1]}:{VICTIM.parent}",
        "OMP_NUM_THREADS": "1",
        "PATH": "",
    }
    command = [sys.executable, str(VICTIM), str(out), "--steps", str(steps), *extra]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)


def rows_so_far(out: Path) -> int:
    log = out / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def kill_after(victim: subprocess.Popen[bytes], out: Path, rows: int, delay: float) -> None:
    """SIGKILL once the log has `rows` rows and `delay` more seconds have passed, wherever the run is then."""
    while rows_so_far(out) < rows:
        assert victim.poll() is None, victim.communicate()[1].decode()
        time.sleep(0.002)
    time.sleep(delay)
    victim.kill()
    assert victim.wait() == -signal.SIGKILL


def final_state(out: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    state = CheckpointStore(out / "checkpoints").load()
    state["counters"].pop("seconds")
    tensors: dict[str, torch.Tensor] = {}

    def walk(node: dict[str, Any], path: str) -> dict[str, Any]:
        values = {}
        for key, leaf in node.items():
            if isinstance(leaf, torch.Tensor):
                tensors[f"{path}/{key}"] = leaf
            else:
                values[key] = walk(leaf, f"{path}/{key}") if isinstance(leaf, dict) else leaf
        return values

    values = walk(state, "")
    return tensors, values


def assert_same_run(out: Path, reference: Path) -> None:
    tensors, values = final_state(out)
    expected_tensors, expected_values = final_state(reference)
    assert values == expected_values
    assert tensors.keys() == expected_tensors.keys()
    different = [name for name, t in tensors.items() if not torch.equal(t, expected_tensors[name])]
    assert not different
    rows, expected = (read_jsonl(folder / "metrics.jsonl") for folder in (out, reference))
    assert [row["step"] for row in rows] == list(range(1, len(expected) + 1))
    assert without_timing(rows) == without_timing(expected)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The uninterrupted run."""
    return uninterrupted(tmp_path_factory.mktemp("reference"), STEPS)


def uninterrupted(out: Path, steps: int) -> Path:
    tiny_run(nervous_config(steps), out)
    skipped = [row["skipped"] for row in read_jsonl(out / "metrics.jsonl")]
    assert 2 <= sum(skipped) <= steps // 2  # the guard's memory matters
    return out


def die_and_finish(out: Path, steps: int, kills: int, seed: int) -> None:
    """Run to the end through `kills` deaths: the first inside a save, the others at random moments."""
    chance = random.Random(seed)
    victim = start(out, steps, "--die-in-save", str(chance.choice([8, 12])))
    assert victim.wait() == -signal.SIGKILL
    for kill in range(1, kills):
        begun = rows_so_far(out)
        # A run that goes on takes its newest rows out first, so a row beyond `begun` is a new one.
        target = max(begun + 1, round(kill / kills * (steps - 8)) + chance.randint(-2, 2))
        assert target < steps
        kill_after(start(out, steps), out, target, chance.uniform(0, 0.05))
    assert start(out, steps).wait() == 0


def test_two_kills_of_which_one_is_inside_a_save_leave_no_trace(reference, tmp_path):
    die_and_finish(tmp_path / "run", STEPS, kills=2, seed=0)
    assert_same_run(tmp_path / "run", reference)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_ten_kills_leave_no_trace(seed, tmp_path):
    die_and_finish(tmp_path / "run", MANY_STEPS, kills=10, seed=seed)
    assert_same_run(tmp_path / "run", uninterrupted(tmp_path / "reference", MANY_STEPS))


def test_a_run_that_stops_when_its_time_is_up_goes_on_from_there(reference, tmp_path):
    config = nervous_config(STEPS)
    for step in range(1, STEPS + 1):
        assert tiny_run(config, tmp_path, seconds=0).last["step"] == step
    assert_same_run(tmp_path, reference)


def test_a_finished_run_started_again_changes_nothing_and_returns_its_result(reference):
    before = (reference / "metrics.jsonl").read_bytes()
    result = tiny_run(nervous_config(STEPS), reference)
    assert (reference / "metrics.jsonl").read_bytes() == before
    assert result.last["step"] == STEPS
    assert "bits_per_byte" in result.last


def with_changes(**changes: dict[str, Any]) -> TrainConfig:
    config = nervous_config(STEPS)
    tables = {name: getattr(config, name).model_copy(update=fields) for name, fields in changes.items()}
    return config.model_copy(update=tables)


def test_another_configuration_is_refused_by_field_and_nothing_is_overwritten(reference):
    config = (reference / "config.toml").read_bytes()
    with pytest.raises(CheckpointError) as caught:
        tiny_run(with_changes(optim={"lr": 0.02}), reference)
    assert "optim.lr is 0.01 there and 0.02 here" in str(caught.value)
    assert (reference / "config.toml").read_bytes() == config


def test_what_decides_no_number_may_change_between_sessions(reference):
    changed = with_changes(logging={"detail_every": 7}, checkpoint={"every": 3})
    assert tiny_run(changed, reference).last["step"] == STEPS


def test_other_data_is_refused(reference):
    config = nervous_config(STEPS)
    other = tiny_data(tiny_config(train={"seed": 3}))
    with pytest.raises(InvalidInput, match="seed"):
        run(config, reference, data=TrainingData(other.stream))


class Vanishing:
    """A stream whose data is gone from the third step on."""

    def __init__(self, stream: Stream) -> None:
        self.tokens_per_sample, self.epoch, self.identity = (
            stream.tokens_per_sample,
            stream.epoch,
            stream.identity,
        )
        self._sample = stream.sample

    def sample(self, index: int) -> Sample:
        if index >= 8:
            raise FileNotFoundError("train.tokens")
        return self._sample(index)


def test_the_step_before_one_that_cannot_be_read_has_its_row(tmp_path):
    config = tiny_config(evaluation={"every": None})
    data = tiny_data(config)
    with pytest.raises(FileNotFoundError, match=r"train\.tokens"):
        run(config, tmp_path, data=TrainingData(Vanishing(data.stream)))
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


def test_steps_go_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    later, save = threading.Event(), CheckpointStore.save
    seen: list[list[int]] = []

    def slow(store: CheckpointStore, step: int, *state: Any, **config: Any) -> Path:
        assert step != 4 or later.wait(30)
        return save(store, step, *state, **config)

    class Watcher(Silent):
        def stepped(self, at: dict[str, Any]) -> None:
            if at["step"] == 6:  # two steps after the save of step 4 began
                seen.append(CheckpointStore(tmp_path / "run" / "checkpoints").steps())
                later.set()

    monkeypatch.setattr(CheckpointStore, "save", slow)
    tiny_run(tiny_config(train={"steps": 8}), tmp_path / "run", progress=Watcher())
    assert seen == [[]]
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [4, 8]
