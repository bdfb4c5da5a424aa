"""A log that was cut anywhere and continued holds each step exactly once."""

from __future__ import annotations

import json
import resource

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.checkpoint.jsonl import JsonlLog, read_jsonl
from openk3.errors import CheckpointError, InvalidInput, StorageError


def rows(first: int, last: int) -> list[dict]:
    return [{"step": step, "loss": 1 / step, "load": [step, "é"]} for step in range(first, last + 1)]


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_run_killed_anywhere_and_resumed_logs_each_step_once(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    with JsonlLog(path, 0) as log:
        for row in rows(1, 9):
            log.append(row)
    whole = path.read_bytes()
    assert read_jsonl(path) == rows(1, 9)

    cut = data.draw(st.integers(0, len(whole)), label="bytes that reached the disk")
    path.write_bytes(whole[:cut])
    reached = len(read_jsonl(path))
    # A row counts from its closing brace on: without its line end it is already whole.
    assert reached == whole[:cut].count(b"}")
    saved = data.draw(st.integers(0, reached), label="step of the last checkpoint")
    with JsonlLog(path, saved) as log:
        assert read_jsonl(path) == rows(1, saved)
        for row in rows(saved + 1, 12):
            log.append(row)
    assert read_jsonl(path) == rows(1, 12)


def test_several_rows_of_one_step_stay_together(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonlLog(path, 0) as log:
        for row in ({"step": 1}, {"step": 2, "loss": 3.0}, {"step": 2, "validation": 2.5}, {"step": 3}):
            log.append(row)
        log.sync()
    with JsonlLog(path, 2):
        pass
    assert read_jsonl(path) == [{"step": 1}, {"step": 2, "loss": 3.0}, {"step": 2, "validation": 2.5}]


def test_what_a_power_cut_leaves_of_the_last_line_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\x00\x00\x00')
    with JsonlLog(path, 5) as log:
        log.append({"step": 2})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_last_row_that_only_lost_its_line_end_is_a_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    with JsonlLog(path, 2) as log:
        log.append({"step": 3})
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}, {"step": 3}]


@pytest.mark.parametrize("line", ["{", "[1]", '{"loss": 1}', '{"step": "2"}', "", "\x00"])
def test_a_finished_line_that_is_no_row_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    before = path.read_bytes()
    for use in (read_jsonl, lambda path: JsonlLog(path, 1)):
        with pytest.raises(
            CheckpointError, match=r"metrics.jsonl: line 2 is not a JSON object with an integer"
        ):
            use(path)
    assert path.read_bytes() == before


def test_numbers_that_json_lacks_are_null_so_that_every_reader_can_read(tmp_path):
    with JsonlLog(tmp_path / "m.jsonl", 0) as log:
        log.append(
            {"step": 1, "max_logit": [float("-inf"), 2.0], "loss": float("nan"), "by": {"x": float("inf")}}
        )

    def refuse(constant):
        pytest.fail(f"{constant} is not JSON")

    row = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse)
    assert row == {"step": 1, "max_logit": [None, 2.0], "loss": None, "by": {"x": None}}


@pytest.mark.parametrize(
    "row", [{}, {"step": "1"}, {"step": True}, {"step": 1.0}, {"step": 1, "x": object()}]
)
def test_a_row_that_could_not_be_read_back_is_refused(tmp_path, row):
    with JsonlLog(tmp_path / "m.jsonl", 0) as log:
        with pytest.raises(InvalidInput, match=r"m\.jsonl: "):
            log.append(row)
        log.append({"step": 1})
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1}]


def test_a_full_disk_takes_no_half_row(tmp_path):
    path = tmp_path / "m.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with JsonlLog(path, 0) as log:
        log.append({"step": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 30, hard))
        try:
            with pytest.raises(StorageError, match=r"m.jsonl: cannot write: File too large$"):
                log.append({"step": 2, "text": "x" * 100})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes() == b'{"step": 1}\n'
        log.append({"step": 2})
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


def test_a_log_in_a_missing_folder_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"nowhere/m.jsonl: cannot write: No such file or directory$"):
        JsonlLog(tmp_path / "nowhere" / "m.jsonl", 0)
    with pytest.raises(StorageError, match=r"m.jsonl: cannot read: No such file or directory$"):
        read_jsonl(tmp_path / "m.jsonl")
