"""Training on a GPU: the host never waits inside a step, and reads what it would have read had it waited.

Run with `pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openk3.checkpoint import background
from openk3.checkpoint.jsonl import read_jsonl
from openk3.checkpoint.train_state import CheckpointStore
from openk3.data import Windows
from openk3.train.config import TrainConfig
from openk3.train.data import TrainingData
from openk3.train.loop import run
from openk3.train.recipes import read_table
from openk3.train.reduce import OneProcess
from openk3.train.state import TrainState, begin
from openk3.train.step import launch, read, update

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB = 512
TIMING = {"seconds", "step_seconds", "tokens_per_second", "mfu"}
# Every kind of layer, in sizes that the kernels take.
MODEL = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_layers": 4,
    "kda": {"num_heads": 2, "head_dim": 64},
    "mla": {
        "num_heads": 2,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "moe": {"num_experts": 16, "experts_per_token": 2, "expert_width": 64, "latent_width": 64},
    "dense_width": 256,
    "attn_res": {"kind": "block", "block_size": 1},
    "tie_embeddings": True,
    "mtp_layers": 1,
}


def config(**changes: dict[str, Any]) -> TrainConfig:
    values: dict[str, Any] = {
        "model": MODEL,
        "data": {"kind": "given"},
        "train": {
            "steps": 8,
            "context": 256,
            "micro_batch_tokens": 1024,
            "accumulation": 2,
            "precision": "bf16",
            "mtp_weight": 0.1,
            "device": "cuda",
            "spike": {"multiple": 1.01, "history": 2, "patience": 100},  # skips a step now and then
        },
        "optim": {"lr": 0.01},
        "evaluation": {"every": None},
        "checkpoint": {"every": 100},
        "logging": {"detail_every": 3, "tensorboard": False},
    }
    for table, fields in changes.items():
        values[table] = {**values.get(table, {}), **fields}
    return TrainConfig.model_validate(read_table(TrainConfig, values))


class Documents:
    """Random walks over the vocabulary, of many lengths."""

    def __init__(self, n: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._documents = [
            (np.cumsum(random.integers(0, 3, length)) % VOCAB).astype(np.uint32)
            for length in random.integers(1, 700, n)
        ]
        self.lengths = np.array([len(document) for document in self._documents])
        self.byte_counts = 3 * self.lengths

    def tokens(self, document: int) -> np.ndarray:
        return self._documents[document]


def data(settings: TrainConfig) -> TrainingData:
    stream = Windows(Documents(200, 1), settings.train.context, settings.train.seed)
    return TrainingData(stream, (Documents(8, 2),))


def fresh(tmp_path: Path, settings: TrainConfig) -> TrainState:
    store = CheckpointStore(tmp_path / "none")
    return begin(settings, data(settings), store, init_from=None, reduction=OneProcess())


@contextmanager
def never_waiting() -> Iterator[None]:
    """Any call of torch that makes the host wait for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def steps(state: TrainState, settings: TrainConfig, count: int, *, late: bool) -> list[dict[str, Any]]:
    """The rows of so many steps, each read while the next one runs, or at once."""
    one, unread, rows = OneProcess(), None, []
    for _ in range(count):
        launched = launch(state, settings, one)
        if unread is not None:
            rows.append(read(state, unread, None))
        unread = update(state, settings, one, launched)
        if not late:
            rows.append(read(state, unread, None))
            unread = None
    return rows if unread is None else [*rows, read(state, unread, None)]


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in TIMING} for row in rows]


def different(one: TrainState, other: TrainState) -> list[str]:
    pairs = zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True)
    return [name for (name, tensor), twin in pairs if not torch.equal(tensor, twin)]


def test_the_host_never_waits_inside_a_step(tmp_path):
    settings = config()
    state = fresh(tmp_path, settings)
    with state.feed:
        steps(state, settings, 2, late=True)  # compiles, and fills the allocators
        with never_waiting():
            rows = steps(state, settings, 4, late=True)
    assert [row["step"] for row in rows] == [3, 4, 5, 6]
    assert all(row["step_seconds"] > 0 for row in rows)


def test_rows_and_weights_are_those_of_reading_each_step_at_once(tmp_path):
    settings = config()
    late, at_once = fresh(tmp_path, settings), fresh(tmp_path, settings)
    with late.feed, at_once.feed:
        rows, expected = steps(late, settings, 8, late=True), steps(at_once, settings, 8, late=False)
    assert untimed(rows) == untimed(expected)
    assert not different(late, at_once)
    assert late.guard.state() == at_once.guard.state()
    assert 0 < late.guard.skipped < 8


@pytest.mark.parametrize("room_on_the_card", [True, False])
def test_a_run_that_stopped_when_its_time_was_up_goes_on_as_if_it_had_not(
    tmp_path, monkeypatch, room_on_the_card
):
    monkeypatch.setattr(background, "_has_room", lambda device, size: room_on_the_card)
    settings = config(checkpoint={"every": 3})
    run(settings, tmp_path / "whole", data=data(settings))
    while True:
        result = run(settings, tmp_path / "pieces", data=data(settings), seconds=0)
        if result.last["step"] == settings.train.total_steps:
            break
    whole, pieces = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("whole", "pieces"))
    assert untimed(pieces) == untimed(whole)


def test_what_is_fed_ahead_is_what_the_loader_gives(tmp_path):
    settings = config()
    fed, plain = fresh(tmp_path, settings), fresh(tmp_path, settings)
    with fed.feed, plain.feed:
        for _ in range(4):
            batches, expected = next(fed.feed), next(plain.loader)
            for batch, host in zip(batches, expected, strict=True):
                assert batch.local.tokens.is_cuda
                for name in ("tokens", "targets", "cu_seqlens"):
                    assert torch.equal(getattr(batch.local, name).cpu(), getattr(host, name)), name
            assert fed.loader.state_dict() == plain.loader.state_dict()
