"""A model trained on a recall probe and asked: how many answers are right, at which length.

The training is an ordinary run whose data is a probe; what is new is the counting after it. The sequences
that are counted are the same for every model and seed of a probe, and none of them was trained on. Knows
nothing of variants or of comparing them: that is the business of whoever runs several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from openk3.checkpoint.atomic import atomic_write_json
from openk3.data import IGNORED, Batch
from openk3.data.loader import collate
from openk3.data.probes import Probe, measured_sequence
from openk3.data.windows import Sample
from openk3.errors import InvalidInput
from openk3.model import K3
from openk3.train.config import ProbeData, TrainConfig
from openk3.train.loop import run
from openk3.train.progress import Progress

RESULT = "probe.json"
"""The result's file in the run folder."""

MEASURE_SEED = 0
"""Of the sequences that are counted, whatever the seed of the run."""

MEASURE_TOKENS = 8192
"""Tokens of one forward pass of the measurement; a longer sequence is a pass of its own."""


@dataclass(frozen=True)
class Recalled:
    """What a model answered at one length.

    Attributes:
        length: tokens of a sequence. sequences, answers: how many were counted, of all sequences together.
        accuracy: share of answers that are right, each with the right ones before it.
        exact: share of sequences with every answer right. It is also the share that greedy decoding of the
            answers would get right, which goes the same way for as long as it is right.
        chance: accuracy of a guess out of the alphabet. unbound: of one who knows which values were shown,
            but not where; see `openk3.data.probes`.
    """

    length: int
    sequences: int
    answers: int
    accuracy: float
    exact: float
    chance: float
    unbound: float


@dataclass(frozen=True)
class ProbeResult:
    """A model on a probe after its training.

    Attributes:
        probe: its kind. seed: of the weights and of the training sequences.
        parameters: of the model. steps, tokens: of the training. seconds: of the training alone.
        loss: of the last step, nats per answer.
        recalled: by length, in the order asked for.
    """

    probe: str
    seed: int
    parameters: int
    steps: int
    tokens: int
    seconds: float
    loss: float
    recalled: tuple[Recalled, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values, as in `probe.json`."""
        return asdict(self)


def run_probe(config: TrainConfig, out: str | Path, *, progress: Progress | None = None) -> ProbeResult:
    """Train on the probe of `config.data` as `openk3.train.run` does, count answers, write `probe.json`.

    Raises:
        InvalidInput: `config.data` is no probe, or a length to measure cannot be; before the training.
        CheckpointError, StorageError, TrainingDiverged: as `openk3.train.run`.
    """
    if not isinstance(config.data, ProbeData):
        raise InvalidInput(f'data.kind is {config.data.kind!r}: a probe needs data.kind = "probe"')
    data = config.data
    lengths = data.measured or (config.train.context,)
    for length in lengths:
        data.probe.check(length)
    trained = run(config, out, progress=progress)
    recalled = tuple(
        measure(trained.model, data.probe, length, data.measured_sequences) for length in lengths
    )
    result = ProbeResult(
        data.probe.kind,
        config.train.seed,
        sum(parameter.numel() for parameter in trained.model.parameters()),
        trained.last["step"],
        trained.last["tokens"],
        trained.last["seconds"],
        trained.last["loss"],
        recalled,
    )
    atomic_write_json(trained.folder / RESULT, result.as_json())
    return result


@torch.no_grad()
def measure(model: K3, probe: Probe, length: int, sequences: int) -> Recalled:
    """Ask `model` on the first `sequences` sequences of `length` tokens.

    An answer is the likeliest of all tokens, not of the values alone.

    Raises:
        InvalidInput: the probe has no sequences of that length, or tokens that the model does not have.
    """
    probe.check(length)
    per_pass = max(1, MEASURE_TOKENS // length)
    right: list[torch.Tensor] = []  # per sequence, its answers
    training = model.training
    model.eval()
    try:
        for first in range(0, sequences, per_pass):
            batch = _batch(probe, length, range(first, min(first + per_pass, sequences)))
            right += _right(model, batch).cpu().view(-1, probe.answers(length))
    finally:
        model.train(training)
    table = torch.stack(right)  # bool [sequences, answers of each]
    return Recalled(
        length,
        sequences,
        table.numel(),
        float(table.double().mean()),
        float(table.all(dim=1).double().mean()),
        probe.chance,
        probe.unbound(length),
    )


def _batch(probe: Probe, length: int, indices: Sequence[int]) -> Batch:
    sequences = (measured_sequence(probe, length, MEASURE_SEED, index) for index in indices)
    return collate([Sample(tokens, targets, [length]) for tokens, targets in sequences])


def _right(model: K3, batch: Batch) -> torch.Tensor:
    """Which answers of a batch the model gives, bool, in the order of their places."""
    local = batch.to(model.embed_tokens.weight.device)
    asked = local.targets != IGNORED
    hidden = model(local.tokens, local.cu_seqlens).hidden[asked]
    return model.logits(hidden).argmax(-1) == local.targets[asked]
