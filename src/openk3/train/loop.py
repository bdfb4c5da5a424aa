"""The training loop (report §3.3): steps, and between them metrics -> evaluation -> checkpoint.

A step (`openk3.train.step`) is read while the next one runs; before an evaluation or a checkpoint it is read
at once, so that nothing is saved of a step that went wrong. A checkpoint is written while steps go on. The
loop knows the order and nothing else: what each part does is in the part.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openk3.checkpoint.atomic import atomic_write_text, make_folder
from openk3.checkpoint.background import BackgroundSaves
from openk3.checkpoint.jsonl import read_jsonl
from openk3.checkpoint.lock import only_writer
from openk3.checkpoint.train_state import CheckpointStore
from openk3.errors import CheckpointError, TrainingDiverged
from openk3.model import K3
from openk3.train.config import TrainConfig
from openk3.train.data import TrainingData, open_data
from openk3.train.evaluate import FirstDocuments, evaluate
from openk3.train.flops import peak_flops
from openk3.train.metrics import MetricsLog, Row
from openk3.train.progress import Progress, Silent
from openk3.train.recipes import as_toml
from openk3.train.reduce import OneProcess, Reduction
from openk3.train.state import TrainState, begin, decisive
from openk3.train.step import Unread, launch, read, update
from openk3.train.weights import CHECKPOINTS

FIRST_LOSS_SLACK = 0.5
"""Nats that the first loss may differ from ln(vocabulary), what a model that knows nothing has."""


@dataclass(frozen=True)
class RunResult:
    """A run that has ended, or stopped after the time that it was given.

    Attributes:
        last: the row of its last step, at the end with the evaluation on all held-out documents, if any.
        model: as trained, in evaluation mode.
    """

    folder: Path
    last: Row
    model: K3


def run(
    config: TrainConfig,
    out: str | Path,
    *,
    data: TrainingData | None = None,
    init_from: str | Path | None = None,
    progress: Progress | None = None,
    reduction: Reduction | None = None,
    seconds: float | None = None,
) -> RunResult:
    """Train to the end, going on from the latest checkpoint in `out` if there is one.

    Args:
        out: the run folder: `config.toml`, `metrics.jsonl`, `tensorboard/`, `checkpoints/`, `tiktoken.model`.
        data: what to read instead of what `config.data` names.
        init_from: start from the weights of this run or checkpoint; a run that goes on has its own already.
        progress: is told of everything; silent by default.
        seconds: save and stop after so many, at the end of a step, if the run has not ended by then.

    Raises:
        InvalidInput: the data does not fit the model, or is empty.
        CheckpointError: a checkpoint or the log is damaged, or of another configuration.
        StorageError: a write failed, or another process trains in `out`; the last checkpoint is whole.
        TrainingDiverged: a loss or gradient is not finite, or only spikes come; names the step.
    """
    progress, reduction = progress or Silent(), reduction or OneProcess()
    folder = make_folder(out)
    with only_writer(folder) if reduction.rank == 0 else contextlib.nullcontext():
        data = data or open_data(config, progress.preparing)
        return _run(config, folder, data, init_from, progress, reduction, seconds)


def _run(
    config: TrainConfig,
    folder: Path,
    data: TrainingData,
    init_from: str | Path | None,
    progress: Progress,
    reduction: Reduction,
    seconds: float | None,
) -> RunResult:
    steps = config.train.total_steps
    store = CheckpointStore(folder / CHECKPOINTS, keep=config.checkpoint.keep)
    state = begin(config, data, store, init_from=init_from, reduction=reduction)
    fresh = state.step == 0 and init_from is None
    atomic_write_text(folder / "config.toml", as_toml(config))
    if data.tokenizer is not None:
        data.tokenizer.save(folder)
    peak = config.logging.peak_flops or _known_peak(state.model)
    peak = None if peak is None else peak * reduction.ranks

    with (
        MetricsLog(folder, state.step, tensorboard=config.logging.tensorboard) as log,
        state.feed,
        BackgroundSaves(store) as saves,
    ):
        progress.begins(state.step, steps)
        for note in data.notes:
            progress.notes(note)
        begun = clock = time.perf_counter()

        def died(error: TrainingDiverged, step: int) -> TrainingDiverged:
            saves.settle()  # the checkpoint being written may be the last good one
            return TrainingDiverged(_obituary(error, step, store))

        def finish(unread: Unread, *, evaluation: bool = False) -> None:
            """Read a step and write its row."""
            nonlocal clock
            try:
                row = read(state, unread, peak)
            except TrainingDiverged as error:
                raise died(error, unread.step) from error
            if fresh and unread.step == 1:
                row |= _first_loss(row["loss"], config.model.vocab_size)
            if evaluation:
                row |= _validation(state, data, config, reduction, whole=unread.step == steps)
            now = time.perf_counter()
            state.seconds, clock = state.seconds + now - clock, now
            row["seconds"] = state.seconds
            log.write(row)
            progress.stepped(row)

        unread: Unread | None = None
        while state.step < steps:
            saves.check()
            try:
                launched = launch(state, config, reduction)
            finally:  # also where this one failed: what was wrong with the one before may be why
                if unread is not None:
                    finish(unread)
            try:
                unread = update(state, config, reduction, launched)
            except TrainingDiverged as error:  # on the CPU, where nothing keeps a bad logit from being seen
                raise died(error, launched.step) from error
            stops = seconds is not None and time.perf_counter() - begun >= seconds
            evaluates = bool(data.validation) and _due(state.step, steps, config.evaluation.every)
            keeps = stops or _due(state.step, steps, config.checkpoint.every)
            if evaluates or keeps:
                finish(unread, evaluation=evaluates)
                unread = None
            if keeps:
                log.sync()
                saves.save(state.step, state.tree(), config=decisive(config, data))
            if stops:
                break
    log_file = folder / "metrics.jsonl"
    last = next((row for row in reversed(read_jsonl(log_file)) if row["step"] == state.step), None)
    if last is None:
        raise CheckpointError(
            f"{log_file}: the row of step {state.step} is gone, though its checkpoint is there"
        )
    return RunResult(folder, last, state.model.eval())


def _validation(
    state: TrainState, data: TrainingData, config: TrainConfig, reduction: Reduction, *, whole: bool
) -> Row:
    most = None if whole else config.evaluation.tokens
    context = config.evaluation.context or config.train.context
    found = evaluate(
        state.model,
        data.validation if most is None else [FirstDocuments(d, most) for d in data.validation],
        context=context,
        windows=max(1, config.train.micro_batch_tokens // context),
        reduction=reduction,
    )
    return {
        "val_loss": found.loss,
        "bits_per_byte": found.bits_per_byte,
        "val_tokens": found.tokens,
        "val_bytes": found.bytes,
    }


def _due(step: int, steps: int, every: int | None) -> bool:
    return step == steps or (every is not None and step % every == 0)


def _first_loss(loss: float, vocab_size: int) -> dict[str, Any]:
    expected = math.log(vocab_size)
    row: dict[str, Any] = {"expected_first_loss": expected}
    if abs(loss - expected) > FIRST_LOSS_SLACK:
        row["warning"] = (
            f"the first loss is {loss:.3f}, ln(vocabulary) is {expected:.3f}: check the initial weights"
        )
    return row


def _known_peak(model: K3) -> float | None:
    device = model.embed_tokens.weight.device
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def _obituary(error: TrainingDiverged, step: int, store: CheckpointStore) -> str:
    last = store.latest()
    left = (
        f"the last good checkpoint is {store.path(last)}"
        if last is not None
        else "no checkpoint was saved yet"
    )
    return f"step {step}: {error}; nothing was overwritten, {left}; lower optim.lr or look at the data"
