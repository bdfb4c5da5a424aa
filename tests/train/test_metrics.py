"""The numbers of a row, and where they go."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import RecordWriter  # noqa: F401  (the format read below is this writer's)
from tiny_run import TIMING, tiny_config, tiny_run

from openk3.checkpoint.jsonl import read_jsonl
from openk3.train.metrics import MetricsLog, expert_metrics, scalars


def test_expert_metrics_come_from_counts():
    row = expert_metrics({3: torch.tensor([10, 0, 20, 10]), 1: torch.tensor([5, 5, 5, 5])}, detail=True)
    assert list(row["load"]) == ["1", "3"]
    assert row["load_max"] == {"1": 1.0, "3": 2.0}
    assert row["maxvio"] == {"1": 0.0, "3": 1.0}
    assert row["dead_experts"] == {"1": 0.0, "3": 0.25}
    assert "load" not in expert_metrics({1: torch.tensor([1, 2])}, detail=False)


def test_a_layer_that_counted_nothing_is_dead_but_finite():
    row = expert_metrics({0: torch.zeros(4, dtype=torch.int64)}, detail=False)
    assert row["dead_experts"] == {"0": 1.0}
    assert row["load_max"] == {"0": 0.0}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    tiny_run(tiny_config(logging={"tensorboard": True, "peak_flops": 1e12}), out)
    return out


def test_every_step_has_one_row_with_what_it_takes_to_see_the_run(run_folder):
    rows = read_jsonl(run_folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    every = {
        "loss", "mtp_loss", "lr", "grad_norm", "skipped", "tokens", "load_max", "maxvio", "dead_experts",
        "bias_range", "max_logit", "clipped_heads",
    }  # fmt: skip
    for row in rows:
        assert every | TIMING <= row.keys()
        assert (
            ("attn_res" in row)
            == ("state_norm" in row)
            == ("load" in row)
            == (row["step"] in (1, 3, 6, 9, 12))
        )
        assert ("bits_per_byte" in row) == (row["step"] in (5, 10, 12))
    assert rows[-1]["tokens"] == 12 * 128
    assert set(rows[0]["max_logit"]) == {"1", "2"}
    assert set(rows[0]["state_norm"]) == {"0"}
    assert rows[9]["val_tokens"] < rows[11]["val_tokens"]  # the last measures all documents
    for weights in rows[0]["attn_res"].values():
        assert sum(weights) == pytest.approx(1, abs=1e-5)


def test_mfu_is_model_flops_over_time_and_peak(run_folder):
    from openk3.train.flops import model_flops

    for row in read_jsonl(run_folder / "metrics.jsonl"):
        flops = row["mfu"] * 1e12 * row["step_seconds"]
        # Document borders only take attention pairs away.
        most = model_flops(tiny_config().model, [32] * 4, mtp=True)
        assert most.weights + most.recurrence < flops <= most.total * 1.000001
        assert row["flops"] == pytest.approx(flops)


def test_scalars_name_layers_from_one_and_leave_lists_out():
    row = {
        "step": 3,
        "loss": 1.5,
        "skipped": False,
        "maxvio": {"0": 0.1, "7": 0.2},
        "load": {"0": [1, 2]},
        "x": "y",
    }
    assert dict(scalars(row)) == {"loss": 1.5, "skipped": 0.0, "maxvio/layer_1": 0.1, "maxvio/layer_8": 0.2}


def records(folder):
    """Every event in TensorBoard files, in order of files: length, crc, payload, crc."""
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            yield event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size


def events(folder):
    """(step, tag, value) of every scalar."""
    for event in records(folder):
        for value in event.summary.value:
            yield event.step, value.tag, value.simple_value


def test_tensorboard_has_the_scalars_of_every_row(run_folder):
    seen = {(step, tag): value for step, tag, value in events(run_folder / "tensorboard")}
    for row in read_jsonl(run_folder / "metrics.jsonl"):
        for tag, value in scalars(row):
            assert seen[row["step"], tag] == pytest.approx(value, rel=1e-6, abs=1e-12)


def test_a_session_that_goes_on_takes_back_what_was_shown_of_later_steps(tmp_path):
    for first, step in ((1, 0), (3, 2)):
        with MetricsLog(tmp_path, step, tensorboard=True) as log:
            for at in range(first, first + 3):
                log.write({"step": at, "loss": 1.0})
    starts = [event.step for event in records(tmp_path / "tensorboard") if event.HasField("session_log")]
    assert starts == [3]
    assert [step for step, *_ in events(tmp_path / "tensorboard")] == [1, 2, 3, 3, 4, 5]


@pytest.mark.parametrize(
    ("value", "named"), [([0.0] * 20, "metrics.jsonl"), (0.0, "tensorboard")], ids=["rows", "events"]
)
def test_a_full_disk_is_one_error_that_names_the_file(tmp_path, value, named):
    """In a process of its own, because what a writer leaves behind may speak up at exit."""
    code = f"""
import resource
from pathlib import Path
from openk3.errors import StorageError
from openk3.train.metrics import MetricsLog
try:
    with MetricsLog(Path({str(tmp_path)!r}), 0, tensorboard=True) as log:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        for step in range(1, 101):
            log.write({{"step": step, "a": 0.5, "b": {value!r}}})
        log.sync()
except StorageError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout == f"{tmp_path / named}: cannot write: File too large\n"
    assert done.returncode == 0


def test_rows_are_json_without_nan(run_folder):
    for line in (run_folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))
