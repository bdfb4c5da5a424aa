"""The whole path in one call: corpus, tokenizer, pretraining, fine-tuning; each stage resumes.

Text comes from the running Python: its standard library and the documentation behind `help()`. How many steps
fit into the time is measured once, on a throw-away run, and kept in `plan.json`, so that an interrupted
quickstart goes on with the same runs.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openk3.checkpoint.atomic import atomic_write_json, atomic_write_text, make_folder
from openk3.checkpoint.lock import only_writer
from openk3.config import Count, StrictModel, parse
from openk3.data import TokenDataset, open_dataset, prepare
from openk3.data.baselines import gzip_bits_per_byte, xz_bits_per_byte
from openk3.data.docstrings import exchanges
from openk3.data.recipe import load_recipe as load_corpus
from openk3.data.stdlib import stdlib_documents
from openk3.errors import CheckpointError, InvalidInput
from openk3.train.config import TrainConfig
from openk3.train.loop import RunResult, run
from openk3.train.progress import Progress, Silent
from openk3.train.recipes import load_recipe

PRETRAIN, FINETUNE = "quickstart", "quickstart-finetune"
PROBE_STEPS = 5
MOST_MINUTES = 7 * 24 * 60
FINETUNE_SHARE = 0.12
"""Of the time for training."""
AFTERWARDS = 25.0
"""Seconds kept for the full evaluation, compressors, checkpoints and answers."""
EVALUATION_SHARE = 0.04
"""Of the time for pretraining: the evaluations on the way."""


class Plan(StrictModel):
    """What a quickstart does, decided once: the corpus recipe, and the steps of both runs."""

    corpus: str
    steps: Count
    finetune_steps: Count


@dataclass(frozen=True)
class Trained:
    """A finished quickstart, before anybody asks it anything.

    Attributes:
        pretrained, finetuned: the two runs; held-out text is measured on the first.
        gzip_bits_per_byte, xz_bits_per_byte: of general compressors at their best on the same held-out bytes.
    """

    pretrained: RunResult
    finetuned: RunResult
    gzip_bits_per_byte: float
    xz_bits_per_byte: float


def quickstart(
    out: Path,
    *,
    minutes: float,
    smoke: bool,
    announce: Callable[[str], None],
    progress: Progress,
) -> Trained:
    """Run every stage that is not finished in `out`.

    Args:
        minutes: aim for this much time in all; more time, more steps.
        smoke: a few steps on a small corpus, to see that everything works.
        announce: told of each stage in a sentence.

    Raises:
        OpenK3Error: as `openk3.train.run` and `openk3.data.prepare`.
    """
    if not 1 <= minutes <= MOST_MINUTES:
        raise InvalidInput(f"quickstart: {minutes} minutes; give 1 to {MOST_MINUTES}")
    with only_writer(make_folder(out)):
        return _quickstart(out, minutes, smoke, announce, progress)


def _quickstart(
    out: Path, minutes: float, smoke: bool, announce: Callable[[str], None], progress: Progress
) -> Trained:
    began = time.perf_counter()
    corpus = "topics" if smoke else "stdlib"
    announce("preparing text that is already on this machine, and a tokenizer for it")
    data = _corpus(out / "corpus", corpus, progress)
    announce("writing questions and answers from docstrings")
    questions = _questions(out / "questions.jsonl")

    def left() -> float:
        return 60 * minutes - (time.perf_counter() - began)

    plan = _planned(out / "plan.json", corpus, data, smoke=smoke, left=left, announce=announce)
    announce(f"pretraining the nano model for {plan.steps:,} steps")
    pretrained = run(_pretrain(data, plan.steps), out / "pretrain", progress=progress)
    announce(f"fine-tuning it on questions and answers for {plan.finetune_steps:,} steps")
    overrides = {
        "data.file": str(questions),
        "data.tokenizer": str(out / "pretrain"),
        "train.steps": str(plan.finetune_steps),
    }
    finetuned = run(
        load_recipe(FINETUNE, overrides), out / "finetune", init_from=out / "pretrain", progress=progress
    )
    announce("compressing the held-out text with gzip and xz, for comparison")
    held_out = data.validation_bytes()
    return Trained(pretrained, finetuned, gzip_bits_per_byte(held_out), xz_bits_per_byte(held_out))


def _corpus(folder: Path, recipe: str, progress: Progress) -> TokenDataset:
    vocabulary = load_recipe(PRETRAIN).model.vocab_size
    if not folder.exists():
        prepare(load_corpus(recipe), folder, tokenizer=vocabulary, progress=progress.preparing)
    data = open_dataset(folder)
    if data.manifest.vocab_size != vocabulary:
        raise InvalidInput(
            f"{folder.parent}: holds a quickstart of another version of openk3, with a vocabulary of "
            f"{data.manifest.vocab_size}, not {vocabulary}; give another --out"
        )
    return data


def _questions(file: Path) -> Path:
    """Exchanges from the standard library's docstrings as JSON lines."""
    if not file.exists():
        rows = (exchange._asdict() for exchange in exchanges(stdlib_documents()))
        atomic_write_text(file, "".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def _planned(
    file: Path,
    corpus: str,
    data: TokenDataset,
    *,
    smoke: bool,
    left: Callable[[], float],
    announce: Callable[[str], None],
) -> Plan:
    if file.exists():
        plan = _read_plan(file)
        if plan.corpus != corpus:
            raise CheckpointError(
                f"{file.parent}: holds a quickstart on the corpus {plan.corpus!r}, not {corpus!r}; "
                "give another --out"
            )
        return plan
    if smoke:
        plan = Plan(corpus=corpus, steps=8, finetune_steps=4)
    else:
        announce("measuring how fast this machine trains")
        step_seconds = _step_seconds(_pretrain(data, PROBE_STEPS))
        for_training = max(left() - AFTERWARDS, 0)
        plan = Plan(
            corpus=corpus,
            steps=max(20, int((1 - FINETUNE_SHARE - EVALUATION_SHARE) * for_training / step_seconds)),
            finetune_steps=max(10, int(FINETUNE_SHARE * for_training / step_seconds)),
        )
    atomic_write_json(file, plan.model_dump())
    return plan


def _read_plan(file: Path) -> Plan:
    try:
        values = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{file}: not JSON: {error}; remove it to plan anew") from error
    if not isinstance(values, dict):
        raise InvalidInput(f"{file}: expected a JSON object; remove it to plan anew")
    return parse(Plan, values, str(file))


def _pretrain(data: TokenDataset, steps: int) -> TrainConfig:
    folder = json.dumps(str(data.folder))  # quoted as TOML quotes too
    return load_recipe(
        PRETRAIN,
        {"data": f'{{kind = "shards", sources = [{{folder = {folder}}}]}}', "train.steps": str(steps)},
    )


def _step_seconds(config: TrainConfig) -> float:
    """Seconds of a step of `config` here: the median of a few, without the first, which warms up."""
    watch = _Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        quick = config.model_copy(
            update={"evaluation": config.evaluation.model_copy(update={"every": None, "tokens": 1})}
        )
        run(quick, folder, progress=watch)
    return statistics.median(watch.seconds[1:])


class _Stopwatch(Silent):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def stepped(self, row: dict[str, Any]) -> None:
        self.seconds.append(row["step_seconds"])
