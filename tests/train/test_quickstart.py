"""The quickstart around its two trainings: what it plans, what an interruption keeps, what it writes down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import tiny_config, tiny_run

from openk3.chat import Tokenizer
from openk3.cli.main import main
from openk3.data import load_recipe, open_dataset, prepare
from openk3.data.baselines import gzip_bits_per_byte, xz_bits_per_byte
from openk3.data.docstrings import Exchange
from openk3.errors import CheckpointError
from openk3.train import quickstart as stages
from openk3.train.loop import RunResult
from openk3.train.progress import Silent

STEP_SECONDS = 0.5


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """The trainings that were asked for, as (steps, folder, init_from); nothing is trained."""
    asked: list[tuple[int, str, str | None]] = []

    def run(config, out, *, init_from=None, progress=None):
        asked.append((config.train.total_steps, Path(out).name, init_from and Path(init_from).name))
        if Path(out).name == getattr(run, "dies_at", None):
            raise KeyboardInterrupt
        if Path(out).name == "pretrain":
            assert config.model.vocab_size == open_dataset(config.data.sources[0].folder).manifest.vocab_size
        return RunResult(Path(out), {"step": config.train.total_steps}, model=None)

    monkeypatch.setattr(stages, "run", run)
    monkeypatch.setattr(stages, "exchanges", lambda documents: [Exchange("what", "that")])
    monkeypatch.setattr(stages, "_step_seconds", lambda config: STEP_SECONDS)
    return run, asked


def start(out: Path, **changes) -> stages.Trained:
    options = {"minutes": 7.0, "smoke": True, "announce": lambda text: None, "progress": Silent()}
    return stages.quickstart(out, **(options | changes))


def test_a_smoke_run_trains_twice_and_the_second_starts_from_the_first(tmp_path, trained):
    _, asked = trained
    found = start(tmp_path / "out")
    assert asked == [(8, "pretrain", None), (4, "finetune", "pretrain")]
    held_out = open_dataset(tmp_path / "out" / "corpus").validation_bytes()
    assert found.gzip_bits_per_byte == gzip_bits_per_byte(held_out)
    assert found.xz_bits_per_byte == xz_bits_per_byte(held_out)


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_an_interrupted_quickstart_goes_on_with_its_corpus_and_its_plan(
    tmp_path, trained, monkeypatch, stage
):
    run, asked = trained
    monkeypatch.setattr(run, "dies_at", stage, raising=False)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "out")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"plan.json", "questions.jsonl", "manifest.json"} <= {path.name for path in kept}

    monkeypatch.delattr(run, "dies_at")
    asked.clear()
    monkeypatch.setattr(stages, "_step_seconds", lambda config: pytest.fail("measured again"))
    start(tmp_path / "out", minutes=60.0)
    assert asked == [(8, "pretrain", None), (4, "finetune", "pretrain")]
    assert all(path.stat().st_mtime_ns == before for path, before in kept.items())


def test_another_corpus_in_the_same_folder_is_refused(tmp_path, trained):
    start(tmp_path / "out")
    plan = tmp_path / "out" / "plan.json"
    plan.write_text(plan.read_text().replace("topics", "stdlib"))
    with pytest.raises(CheckpointError, match="holds a quickstart on the corpus 'stdlib', not 'topics'"):
        start(tmp_path / "out")


@pytest.mark.parametrize("minutes", [2.0, 7.0, 60.0])
def test_the_steps_are_those_that_fit_into_the_minutes(tmp_path, trained, monkeypatch, minutes):
    _, asked = trained
    monkeypatch.setattr(stages, "load_corpus", lambda name: load_recipe("topics"))
    start(tmp_path / "out", minutes=minutes, smoke=False)
    (pretraining, *_), (finetuning, *_) = asked
    used = (pretraining + finetuning) * STEP_SECONDS
    assert 0.8 * 60 * minutes - 60 < used < 60 * minutes - stages.AFTERWARDS


def test_the_command_writes_exactly_the_promised_summary(tmp_path, monkeypatch, capsys):
    """Keys as people's scripts read them; the values are those that are printed."""
    (tmp_path / "files").mkdir()
    for i in range(4):
        (tmp_path / "files" / f"{i}.txt").write_text(
            f"words and {i} more words\n" * 3 + "".join(map(chr, range(300, 500)))
        )
    (tmp_path / "w.toml").write_text(
        'name = "w"\n[[sources]]\nname = "w"\nkind = "tree"\npath = "files"\n[deduplication]\nnear = false\n'
    )
    prepare(load_recipe(tmp_path / "w.toml"), tmp_path / "corpus", tokenizer=520)
    tiny = tiny_run(tiny_config(model={"vocab_size": 520}, train={"steps": 1}), tmp_path / "run")
    Tokenizer.load(tmp_path / "corpus").save(tmp_path / "run")
    last = {**tiny.last, "tokens": 1234, "bits_per_byte": 1.5}
    result = RunResult(tiny.folder, last, tiny.model)
    monkeypatch.setattr(stages, "quickstart", lambda out, **_: stages.Trained(result, result, 1.75, 1.25))

    with pytest.raises(SystemExit) as stopped:
        main(["quickstart", "--out", str(tmp_path)])

    assert not stopped.value.code
    summary = json.loads((tmp_path / "summary.json").read_text())
    names = [
        "seconds",
        "train_tokens",
        "val_bits_per_byte",
        "gzip_bits_per_byte",
        "xz_bits_per_byte",
        "answers",
    ]
    assert list(summary) == names
    assert [summary[name] for name in names[1:5]] == [1234, 1.5, 1.75, 1.25]
    assert summary["seconds"] > 0
    assert len(summary["answers"]) == 3
    assert all(answer.keys() == {"question", "answer"} for answer in summary["answers"])
    printed = capsys.readouterr().out
    assert "1.500 this model, 1.750 gzip -9, 1.250 xz -9" in " ".join(printed.split())
    for answer in summary["answers"]:
        assert f"> {answer['question']}\n{answer['answer']}" in printed
    assert f"openk3 chat {tmp_path}/finetune" in printed
