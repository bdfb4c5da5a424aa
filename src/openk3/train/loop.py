"""The training loop, top to bottom (report §3.3).

A step: micro-batches, each divided by the step's count of valid tokens -> sum over ranks -> guard and clip
-> learning rate -> optimizer -> QK-clip -> balance biases -> metrics -> evaluation -> checkpoint. Every
quantity of the global batch goes through `openk3.train.reduce` before it is used. The loop knows the order
and nothing else: what each part does is in the part.
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
from openk3.checkpoint.jsonl import read_jsonl
from openk3.checkpoint.lock import only_writer
from openk3.checkpoint.train_state import CheckpointStore
from openk3.data import IGNORED
from openk3.errors import CheckpointError, TrainingDiverged
from openk3.model import K3, ForwardRecord
from openk3.optim import clip_grad_norm, lr_factor
from openk3.train.balance import update_biases
from openk3.train.config import TrainConfig
from openk3.train.data import TrainingData, open_data
from openk3.train.evaluate import FirstDocuments, evaluate
from openk3.train.flops import peak_flops
from openk3.train.metrics import (
    MetricsLog,
    Row,
    attention_metrics,
    bias_metrics,
    detail_metrics,
    expert_metrics,
)
from openk3.train.progress import Progress, Silent
from openk3.train.recipes import as_toml
from openk3.train.reduce import OneProcess, Reduction
from openk3.train.state import TrainState, begin, decisive
from openk3.train.totals import StepTotals
from openk3.train.weights import CHECKPOINTS

FIRST_LOSS_SLACK = 0.5
"""Nats that the first loss may differ from ln(vocabulary), what a model that knows nothing has."""


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        last: the row of the last step, with the evaluation on all held-out documents if there are any.
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
) -> RunResult:
    """Train to the end, going on from the latest checkpoint in `out` if there is one.

    Args:
        out: the run folder: `config.toml`, `metrics.jsonl`, `tensorboard/`, `checkpoints/`, `tiktoken.model`.
        data: what to read instead of what `config.data` names.
        init_from: start from the weights of this run or checkpoint; a run that goes on has its own already.
        progress: is told of everything; silent by default.

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
        return _run(config, folder, data, init_from, progress, reduction)


def _run(
    config: TrainConfig,
    folder: Path,
    data: TrainingData,
    init_from: str | Path | None,
    progress: Progress,
    reduction: Reduction,
) -> RunResult:
    steps = config.train.total_steps
    store = CheckpointStore(folder / CHECKPOINTS, keep=config.checkpoint.keep)
    state = begin(config, data, store, init_from=init_from, reduction=reduction)
    fresh = state.step == 0 and init_from is None
    atomic_write_text(folder / "config.toml", as_toml(config))
    if data.tokenizer is not None:
        data.tokenizer.save(folder)
    peak = config.logging.peak_flops or _known_peak(state.model)

    with MetricsLog(folder, state.step, tensorboard=config.logging.tensorboard) as log:
        progress.begins(state.step, steps)
        for note in data.notes:
            progress.notes(note)
        clock = time.perf_counter()
        while state.step < steps:
            try:
                row = train_step(state, config, reduction, peak)
            except TrainingDiverged as error:
                raise TrainingDiverged(_obituary(error, state.step + 1, store)) from error
            if fresh and state.step == 1:
                row |= _first_loss(row["loss"], config.model.vocab_size)
            if data.validation and _due(state.step, steps, config.evaluation.every):
                row |= _validation(state, data, config, reduction, whole=state.step == steps)
            now = time.perf_counter()
            state.seconds, clock = state.seconds + now - clock, now
            row["seconds"] = state.seconds
            log.write(row)
            progress.stepped(row)
            if _due(state.step, steps, config.checkpoint.every):
                log.sync()
                store.save(state.step, state.tree(), config=decisive(config, data))
    log_file = folder / "metrics.jsonl"
    last = next((row for row in reversed(read_jsonl(log_file)) if row["step"] == steps), None)
    if last is None:
        raise CheckpointError(f"{log_file}: the row of step {steps} is gone, though its checkpoint is there")
    return RunResult(folder, last, state.model.eval())


def train_step(state: TrainState, config: TrainConfig, reduction: Reduction, peak: float | None) -> Row:
    """One step, in place; returns its row.

    Raises:
        TrainingDiverged: the loss or a logit is not finite, or too many steps in a row were spikes (a
            gradient that is not finite is one).
    """
    began = time.perf_counter()
    model, optimizer, step = state.model, state.optimizer, state.step + 1
    device = model.embed_tokens.weight.device
    detail = step == 1 or step % config.logging.detail_every == 0

    batches = next(state.loader)
    valid = reduction.token_count(sum(int((batch.targets != IGNORED).sum()) for batch in batches))
    totals = StepTotals()
    for batch in batches:
        local = batch.to(device)
        record = ForwardRecord(token_mask=local.token_mask, detail=detail and totals.sample is None)
        loss = model.loss(
            local.tokens,
            local.targets,
            local.cu_seqlens,
            mtp_weight=config.train.mtp_weight,
            record=record,
        )
        torch.autograd.backward(loss.total / max(valid, 1))
        totals.add(loss, record, batch, config.model)
    reduction.gradients(model.named_parameters())
    totals = totals.reduced(reduction)

    mean_loss = float(totals.next_token) / max(valid, 1)
    if not math.isfinite(mean_loss):
        raise TrainingDiverged(f"the loss is {mean_loss}")
    norm = reduction.gradient_norm(model.named_parameters())
    lr = config.optim.lr * lr_factor(step - 1, config.train.total_steps, config.schedule)
    clipped: dict[int, int] = {}
    if admitted := state.guard.admits(norm, mean_loss):
        clip_grad_norm(model.named_parameters(), config.optim.grad_clip, norm)
        optimizer.step(lr)
        gammas = optimizer.qk_clip(totals.max_logit)
        clipped = {layer: int((gamma < 1).sum()) for layer, gamma in gammas.items()}
        update_biases(model, totals.load, totals.histogram, state.updates)
        state.updates += 1
    elif state.guard.exhausted:
        raise TrainingDiverged(
            f"{state.guard.skipped_in_a_row} gradients in a row were spikes, last {norm:.3g}"
        )
    optimizer.zero_grad()
    state.step, state.tokens = step, state.tokens + totals.tokens

    row: Row = {"step": step, "loss": mean_loss, "lr": lr, "grad_norm": norm, "skipped": not admitted}
    if config.train.mtp_weight:
        row["mtp_loss"] = float(totals.mtp) / max(int(totals.mtp_count), 1)
    row |= expert_metrics(totals.load, detail=detail) | bias_metrics(model)
    row |= attention_metrics(totals.max_logit, clipped) | detail_metrics(totals)
    seconds = time.perf_counter() - began  # after the reads above, which wait for the device
    row |= {"tokens": state.tokens, "flops": totals.flops}
    row |= {"step_seconds": seconds, "tokens_per_second": totals.tokens / seconds}
    if peak is not None:
        row["mfu"] = totals.flops / seconds / (peak * reduction.ranks)
    return row


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
