"""`openk3 train` and `openk3 report` as a person calls them: what they print, and how they refuse."""

from __future__ import annotations

import contextlib
import io
import math
import random
import resource
import sys
from pathlib import Path

import pytest
import tomli_w
import torch
from tiny_run import MODEL

from openk3.checkpoint.jsonl import read_jsonl
from openk3.checkpoint.train_state import CheckpointStore
from openk3.cli.main import main
from openk3.cli.progress import TerminalProgress
from openk3.data import load_recipe, prepare
from openk3.model import K3

VOCAB = 520


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A prepared folder of generated text."""
    base = tmp_path_factory.mktemp("corpus")
    chance = random.Random(0)
    (base / "files").mkdir()
    for number in range(8):
        text = " ".join(chance.choice(["let", "x", "=", "y", "+", "one", "\n"]) for _ in range(200))
        (base / "files" / f"{number}.txt").write_text(text)
    recipe = base / "words.toml"
    recipe.write_text(
        'name = "words"\n[[sources]]\nname = "words"\nkind = "tree"\npath = "files"\n'
        "[split]\nvalidation_share = 0.3\n[deduplication]\nnear = false\n"
    )
    prepare(load_recipe(recipe), base / "prepared", tokenizer=VOCAB)
    return base / "prepared"


@pytest.fixture
def recipe(corpus, tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    table = {
        "model": {**MODEL, "vocab_size": VOCAB},
        "data": {"kind": "shards", "sources": [{"folder": str(corpus)}]},
        "train": {"steps": 8, "context": 32, "micro_batch_tokens": 64, "mtp_weight": 0.1, "device": "cpu"},
        "checkpoint": {"every": 4},
        "evaluation": {"every": 4, "tokens": 200},
        "logging": {"tensorboard": False},
    }
    Path("tiny.toml").write_text(tomli_w.dumps(table))
    return "tiny.toml"


def called(*words: str) -> None:
    with contextlib.suppress(SystemExit):
        main(words)


def refused(capsys, *words: str) -> str:
    """The one line on stderr; the exit code is 2."""
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("openk3: error: ")
    return lines[0]


def steps(run: str) -> list[int]:
    return [row["step"] for row in read_jsonl(Path(run) / "metrics.jsonl")]


def test_a_recipe_becomes_a_run_folder_and_a_report(recipe, capsys):
    called("train", recipe, "--optim.lr", "5e-3", "--train.steps=6")
    called("report", "runs/tiny")

    printed = capsys.readouterr().out
    assert "step 6/6" in printed
    assert "bits per byte" in " ".join(printed.split())
    folder = Path("runs/tiny")
    names = {"config.toml", "metrics.jsonl", "checkpoints", "tiktoken.model", "report.html"}
    assert names <= {entry.name for entry in folder.iterdir()}
    assert "lr = 0.005" in (folder / "config.toml").read_text()
    assert steps("runs/tiny") == [1, 2, 3, 4, 5, 6]


def test_a_resolved_config_is_a_recipe_of_the_same_run(recipe, capsys):
    called("train", recipe, "--train.steps", "4", "--out", "one")
    called("train", "one/config.toml", "--out", "two")
    assert Path("one/config.toml").read_bytes() == Path("two/config.toml").read_bytes()
    one, two = (read_jsonl(Path(run) / "metrics.jsonl")[-1]["loss"] for run in ("one", "two"))
    assert one == two


def test_a_run_that_is_given_its_seconds_stops_and_goes_on(recipe, capsys):
    called("train", recipe, "--out", "whole")
    called("train", recipe, "--out", "pieces", "--seconds", "0")
    assert [row["step"] for row in read_jsonl(Path("pieces/metrics.jsonl"))] == [1]
    called("train", recipe, "--out", "pieces")
    whole, pieces = (read_jsonl(Path(name) / "metrics.jsonl") for name in ("whole", "pieces"))
    assert [row["loss"] for row in pieces] == [row["loss"] for row in whole]


def test_init_from_starts_with_the_weights_of_another_run(recipe, capsys):
    called("train", recipe, "--out", "first", "--optim.lr", "2e-2", "--train.steps", "8")
    called("train", recipe, "--out", "second", "--init-from", "first", "--train.steps", "1")
    first, second = (read_jsonl(Path(run) / "metrics.jsonl") for run in ("first", "second"))
    assert second[0]["loss"] < first[0]["loss"] - 0.3
    assert "expected_first_loss" not in second[0]


def test_an_unknown_field_is_named_with_the_nearest(recipe, capsys):
    assert "--optim.lrr; did you mean --optim.lr?" in refused(capsys, "train", recipe, "--optim.lrr", "1")
    Path(recipe).write_text(Path(recipe).read_text() + "\n[evaluatoin]\nevery = 3\n")
    assert "unknown field evaluatoin" in refused(capsys, "train", recipe)
    assert not Path("runs").exists()


def test_another_vocabulary_is_named_with_both_sizes(recipe, corpus, capsys):
    message = refused(capsys, "train", recipe, "--model.vocab_size", "999")
    assert str(corpus) in message
    assert "520" in message
    assert "999" in message


def test_a_checkpoint_of_another_config_is_refused_and_kept(recipe, capsys):
    called("train", recipe)
    rows = Path("runs/tiny/metrics.jsonl").read_bytes()
    message = refused(capsys, "train", recipe, "--model.dense_width", "64")
    assert "model.dense_width is 48 there and 64 here" in message
    assert Path("runs/tiny/metrics.jsonl").read_bytes() == rows


def test_weights_of_another_model_are_refused_by_field(recipe, capsys):
    called("train", recipe, "--out", "first")
    message = refused(
        capsys, "train", recipe, "--out", "second", "--init-from", "first", "--model.dense_width", "64"
    )
    assert "first/checkpoints/step-00000008" in message
    assert "dense_width is 48 there and 64 here" in message
    assert "nothing: no checkpoint there: no such folder" in refused(
        capsys, "train", recipe, "--out", "x", "--init-from", "nothing"
    )


def test_a_full_disk_while_saving_keeps_the_last_checkpoint_and_the_run_goes_on_later(
    recipe, capsys, monkeypatch
):
    """The system itself refuses to write files of a checkpoint's size, as it would without space."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    heard = TerminalProgress.stepped

    def fill_the_disk(self, row):
        heard(self, row)
        if row["step"] == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))

    monkeypatch.setattr(TerminalProgress, "stepped", fill_the_disk)
    try:
        message = refused(capsys, "train", recipe, "--logging.tensorboard", "true")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        monkeypatch.setattr(TerminalProgress, "stepped", heard)

    assert "runs/tiny/checkpoints/step-00000008" in message
    assert "cannot write: File too large" in message
    store = CheckpointStore("runs/tiny/checkpoints")
    assert store.steps() == [4]
    store.load(4)
    called("train", recipe)
    assert store.steps() == [4, 8]
    assert steps("runs/tiny") == list(range(1, 9))


def test_a_loss_that_is_not_a_number_names_the_step_and_the_last_good_checkpoint(recipe, capsys, monkeypatch):
    loss, calls = K3.loss, []

    def poisoned(self, *args, **kwargs):
        out = loss(self, *args, **kwargs)
        if kwargs.get("record") is not None:
            calls.append(None)
        return type(out)(
            out.total,
            out.next_token * (math.nan if len(calls) == 7 else 1),
            out.mtp,
            out.mtp_count,
            out.count,
        )

    monkeypatch.setattr(K3, "loss", poisoned)
    message = refused(capsys, "train", recipe)
    assert "step 7: the loss is nan" in message
    assert "runs/tiny/checkpoints/step-00000004" in message
    assert steps("runs/tiny") == [1, 2, 3, 4, 5, 6]


def tree_recipe(folder: Path) -> str:
    """A `data` table of a corpus over the files in `folder`."""
    path = folder.with_suffix(".toml")
    path.write_text(f'name = "t"\n[[sources]]\nname = "files"\nkind = "tree"\npath = "{folder.name}"\n')
    return f'{{kind = "corpus", recipe = "{path}", cache = "{folder.parent / "cache"}"}}'


def test_an_empty_corpus_is_named(recipe, corpus, capsys, tmp_path):
    (tmp_path / "barren").mkdir()
    data = tree_recipe(tmp_path / "barren")
    assert "barren: no file matches" in refused(capsys, "train", recipe, "--data", data)
    (tmp_path / "barren" / "a.txt").write_text(" \n")
    assert "'dropped_empty': 1" in refused(capsys, "train", recipe, "--data", data)
    Path("pairs.jsonl").write_text("")
    data = f'{{kind = "sft", file = "pairs.jsonl", tokenizer = "{corpus}"}}'
    assert "pairs.jsonl: holds no examples" in refused(capsys, "train", recipe, "--data", data)
    assert not list(tmp_path.glob("cache/corpora/*"))


def test_text_that_is_not_utf_8_is_named_by_file_and_byte(recipe, corpus, capsys, tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "good.txt").write_text("good " * 40)
    (tmp_path / "files" / "latin.txt").write_bytes("für".encode("latin-1"))
    data = tree_recipe(tmp_path / "files")
    assert "files/latin.txt: byte 1 (0xfc) is not UTF-8" in refused(capsys, "train", recipe, "--data", data)
    Path("pairs.jsonl").write_bytes(
        b'{"question": "a", "answer": "b"}\n{"question": "\xfc", "answer": "b"}\n'
    )
    data = f'{{kind = "sft", file = "pairs.jsonl", tokenizer = "{corpus}"}}'
    assert "pairs.jsonl: line 2: not JSON in UTF-8" in refused(capsys, "train", recipe, "--data", data)
    Path("latin.toml").write_bytes('model = "für"'.encode("latin-1"))
    assert "latin.toml: not TOML" in refused(capsys, "train", "latin.toml")
    assert not Path("runs/tiny/metrics.jsonl").exists()


def typed(monkeypatch, raw: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))


def test_a_trained_model_continues_a_text_and_answers_and_refuses_what_is_not_utf_8(
    recipe, capsys, monkeypatch
):
    called("train", recipe, "--train.steps", "2")
    capsys.readouterr()
    called("generate", "runs/tiny", "--prompt", "let x", "-n", "5", "--temperature", "0")
    once = capsys.readouterr().out
    assert once.startswith("let x")
    typed(monkeypatch, b"let x")
    called("generate", "runs/tiny", "--prompt", "-", "-n", "5", "--temperature", "0")
    assert capsys.readouterr().out == once

    typed(monkeypatch, b"one\n\n/reset\none\n/quit\ntwo\n")
    called("chat", "runs/tiny", "-n", "5")
    said = capsys.readouterr().out
    assert said[: len(said) // 2] == said[len(said) // 2 :] != ""  # two answers, the first one forgotten

    typed(monkeypatch, b"let \xff")
    assert "byte 4 (0xff) is not UTF-8" in refused(capsys, "generate", "runs/tiny", "--prompt", "-")
    typed(monkeypatch, b"\xff\n")
    assert "byte 0 (0xff) is not UTF-8" in refused(capsys, "chat", "runs/tiny")
    assert "lone surrogate" in refused(capsys, "generate", "runs/tiny", "--prompt", "a\udcff")


def test_a_report_of_what_is_no_run_is_refused(tmp_path, capsys):
    assert "is not a run folder" in refused(capsys, "report", str(tmp_path))


def test_progress_is_plain_lines_where_nobody_watches(capsys):
    row = {"step": 1, "loss": 2.0, "lr": 1e-3, "tokens_per_second": 7100.0, "mfu": 0.125, "skipped": False}
    with TerminalProgress() as progress:
        progress.preparing("encoding", 1, 2)
        progress.preparing("encoding", 2, 2)
        progress.begins(0, 2)
        progress.stepped(row)
        progress.stepped(
            {**row, "step": 2, "skipped": True, "grad_norm": 9.0, "bits_per_byte": 1.5, "val_loss": 1}
        )
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "encoding"
    assert printed[1].startswith("step 1/2  loss 2.000  lr 1.00e-03  7.1k tok/s  mfu 12.5%  eta ")
    assert printed[2].startswith("step 2/2  loss 2.000  bpb 1.500  ")
    assert printed[3] == "step 2: loss 2.000, gradient norm 9: a spike, skipped"
    assert "\x1b" not in "".join(printed)
