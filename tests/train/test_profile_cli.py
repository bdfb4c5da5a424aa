"""`openk3 profile` as a person calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli_w
import torch
from tiny_run import MODEL

from openk3.cli.main import main
from openk3.train.profile import Profile, load, parts
from openk3.train.profile.plot import IDLE, LEAST, SMALLER, floor_bar, grouped, time_bar


def run(capsys, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    captured = capsys.readouterr()
    return stopped.value.code or 0, captured.out, captured.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a tiny recipe."""
    folder = tmp_path_factory.mktemp("profile")
    table = {
        "model": MODEL,
        "data": {"kind": "corpus"},
        "train": {"steps": 2, "context": 32, "micro_batch_tokens": 64, "mtp_weight": 0.1, "device": "cpu"},
    }
    (folder / "tiny.toml").write_text(tomli_w.dumps(table))
    return folder


def test_a_recipe_becomes_a_table_numbers_and_pictures_and_is_compared_with_itself(
    folder, capsys, monkeypatch
):
    monkeypatch.chdir(folder)
    torch.set_num_threads(1)
    words = ("--json", "numbers.json", "--plot", "step.png", "--trace", "trace.json", "--pieces", "3")
    code, out, err = run(capsys, "profile", "tiny.toml", "--train.accumulation", "2", *words)
    assert (code, err) == (0, "")
    assert "2 x 64 tokens a step, context 32" in out
    for name in ("KDA recurrence", "Newton-Schulz", "outside operators", "tokens/s", "all floors"):
        assert name in out
    found = load("numbers.json")
    assert found.tokens == 128
    assert found.measured.steps == 1
    assert json.loads(Path("trace.json").read_text())["traceEvents"]
    assert Path("step.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in Path("step.svg").read_text()
    rows = [line.split("  ")[0].strip() for line in out.splitlines()]
    times = {part: time_bar(found).get(part, 0.0) for part in parts.PARTS if part in rows}
    assert list(times) != sorted(times)  # the order is not by chance that of the alphabet
    listed = [row for row in rows if row in times]
    assert listed[: len(times)] == sorted(times, key=lambda part: -times[part])

    code, out, _ = run(
        capsys,
        "profile",
        "numbers.json",
        "--compare",
        "numbers.json",
        "--plot",
        "both.svg",
        "--json",
        "again",
    )
    assert code == 0
    assert "1.00 times as long" in out
    assert Path("both.png").exists()
    assert load("again") == found


def test_floors_of_a_device_need_no_device(capsys):
    code, out, _ = run(capsys, "profile", "r1", "--floors", "H200")
    assert code == 0
    assert "1 x 131,072 tokens a step" in out
    assert "4.25 TB/s" in out
    assert "before" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nanoo"], "nanoo"),
        (["nano", "--floors", "abacus"], "no figures of 'abacus'"),
        (["nano", "--floors", "H200", "--steps", "2"], "--steps: says how to run"),
        (["missing.json"], "missing.json: No such file"),
        (["missing.json", "--real-data"], "--real-data: says how to run"),
        (["nano", "--compare", "missing.json"], "missing.json: No such file"),
        (["nano", "--train.contextt", "1"], "did you mean --train.context?"),
        (["nano", "--steps", "0"], "steps must be positive"),
    ],
)
def test_what_cannot_be_done_is_one_line(capsys, words, message):
    code, _, err = run(capsys, "profile", *words)
    assert code == 2
    (line,) = err.strip().splitlines()
    assert message in line


def test_bars_have_the_times_of_the_profile_and_small_parts_go_together(folder, tmp_path, capsys):
    code, _, _ = run(capsys, "profile", str(folder / "tiny.toml"), "--json", str(tmp_path / "numbers.json"))
    assert code == 0
    found: Profile = load(tmp_path / "numbers.json")
    bar = time_bar(found)
    assert sum(bar.values()) == pytest.approx(found.measured.whole)
    assert bar[IDLE] == found.measured.idle
    floors = floor_bar(found)
    assert sum(floors.values()) == pytest.approx(sum(item.floor or 0.0 for item in found.items))
    both = grouped({"step": bar, "floor": floors})
    for label, whole in (("step", bar), ("floor", floors)):
        assert sum(both[label].values()) == pytest.approx(sum(whole.values()))
    longest = max(sum(bar.values()), sum(floors.values()))
    drawn = {name for bar in both.values() for name in bar} - {SMALLER, IDLE}
    assert all(max(bar.get(n, 0), floors.get(n, 0)) >= LEAST * longest for n in drawn)
