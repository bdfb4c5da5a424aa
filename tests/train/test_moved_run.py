"""A run is what it read and how, not where it lies: it can be moved, and is not mixed up with another."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from tiny_run import tiny_config

from openk3.checkpoint.lock import only_writer
from openk3.checkpoint.train_state import CheckpointStore
from openk3.data import load_recipe, prepare
from openk3.errors import CheckpointError, StorageError
from openk3.train.config import TrainConfig
from openk3.train.loop import run

VOCAB = 520


def corpus(folder: Path, seed: int) -> Path:
    """A prepared folder of words of one length, so that every seed gives the same number of tokens."""
    chance = random.Random(seed)
    files = folder / f"files-{seed}"
    files.mkdir(parents=True)
    for number in range(8):
        (files / f"{number}.txt").write_text(" ".join(chance.choice("abcdefgh") for _ in range(200)))
    recipe = folder / f"{seed}.toml"
    recipe.write_text(
        f'name = "words"\n[[sources]]\nname = "words"\nkind = "tree"\npath = "{files.name}"\n'
        "[split]\nvalidation_share = 0.3\n[deduplication]\nnear = false\n[cleaning]\nmin_compressed = 0.0\n"
    )
    prepare(load_recipe(recipe), folder / f"prepared-{seed}", tokenizer=VOCAB)
    return folder / f"prepared-{seed}"


def config(*folders: Path, steps: int = 4) -> TrainConfig:
    sources = [{"folder": str(folder)} for folder in folders]
    return tiny_config(
        model={"vocab_size": VOCAB},
        data={"kind": "shards", "sources": sources},
        train={"steps": steps},
        checkpoint={"every": 2},
    )


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def interrupted(settings: TrainConfig, out: Path) -> None:
    """Train, then take the run back to its checkpoint of step 2."""
    run(settings, out)
    CheckpointStore(out / "checkpoints").rewind(2)


@pytest.mark.parametrize("sources", [1, 2])
def test_a_run_goes_on_after_it_and_its_corpus_were_moved(tmp_path, sources):
    first = corpus(tmp_path / "here", 1)
    folders = [first]
    if sources == 2:
        shutil.copytree(first, tmp_path / "here" / "again")
        folders.append(tmp_path / "here" / "again")
    interrupted(config(*folders), tmp_path / "here" / "run")
    (tmp_path / "here").rename(tmp_path / "über dort")
    moved = [tmp_path / "über dort" / folder.name for folder in folders]
    for folder, name in zip(moved, ("one", "two"), strict=False):
        folder.rename(folder.with_name(name))
    result = run(
        config(*(folder.with_name(name) for folder, name in zip(moved, ("one", "two"), strict=False))),
        tmp_path / "über dort" / "run",
    )
    assert result.last["step"] == 4


def test_another_corpus_of_the_same_size_in_the_same_place_is_refused(tmp_path):
    one, two = corpus(tmp_path, 1), corpus(tmp_path, 2)
    interrupted(config(one), tmp_path / "run")
    shutil.rmtree(one)
    two.rename(one)
    with pytest.raises(CheckpointError, match=r"data.sources"):
        run(config(one), tmp_path / "run")


def test_exchanges_are_known_by_their_content(tmp_path):
    folder = corpus(tmp_path, 1)
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"question": "a", "answer": "b"}) + "\n")

    def settings(path: Path) -> TrainConfig:
        return tiny_config(
            model={"vocab_size": VOCAB},
            data={"kind": "sft", "file": str(path), "tokenizer": str(folder)},
            train={"steps": 4, "context": 128, "micro_batch_tokens": 128},
            checkpoint={"every": 2},
        )

    interrupted(settings(file), tmp_path / "run")
    file.rename(tmp_path / "other.jsonl")
    run(settings(tmp_path / "other.jsonl"), tmp_path / "run")
    CheckpointStore(tmp_path / "run" / "checkpoints").rewind(2)
    file.write_text(json.dumps({"question": "a", "answer": "c"}) + "\n")
    with pytest.raises(CheckpointError, match=r"data.exchanges"):
        run(settings(file), tmp_path / "run")


def test_two_runs_in_one_folder_are_refused_before_anything_is_written(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    with only_writer(out), pytest.raises(StorageError, match="another process"):
        run(config(corpus(tmp_path, 1)), out)
    assert [path.name for path in out.iterdir()] == [".lock"]


@pytest.mark.parametrize("left", [None, b""])
def test_a_finished_run_whose_log_is_gone_says_so(tmp_path, left):
    settings = config(corpus(tmp_path, 1))
    run(settings, tmp_path / "run")
    log = tmp_path / "run" / "metrics.jsonl"
    log.unlink() if left is None else log.write_bytes(left)
    with pytest.raises(CheckpointError, match=r"metrics.jsonl: the row of step 4 is gone"):
        run(settings, tmp_path / "run")
