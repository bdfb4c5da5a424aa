"""A run of a second: a model with every kind of layer, on documents with something to learn in them.

As a program it is the victim of the kill tests: `python tiny_run.py OUT [--die-in-save STEP]`.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openk3.checkpoint import train_state
from openk3.data import Windows
from openk3.train.config import TrainConfig
from openk3.train.data import TrainingData
from openk3.train.loop import RunResult, run
from openk3.train.progress import Progress
from openk3.train.recipes import read_table

VOCAB = 64
TIMING = {"seconds", "step_seconds", "tokens_per_second", "mfu"}
"""What a row says of the clock, and may differ between equal runs."""

MODEL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_layers": 2,
    "kda": {"num_heads": 2, "head_dim": 16},
    "mla": {
        "num_heads": 2,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "moe": {"num_experts": 8, "experts_per_token": 2, "expert_width": 16, "latent_width": 16, "qb_ema": 0.5},
    "dense_width": 48,
    "attn_res": {"kind": "block", "block_size": 1},
    "initializer_range": 0.1,
    "tie_embeddings": True,
    "mtp_layers": 1,
}


def tiny_config(**changes: dict[str, Any]) -> TrainConfig:
    """The config with some tables' fields changed, as `tiny_config(train={"steps": 3})`."""
    values: dict[str, Any] = {
        "model": MODEL,
        "data": {"kind": "given"},
        "train": {
            "steps": 12,
            "context": 32,
            "micro_batch_tokens": 64,
            "accumulation": 2,
            "mtp_weight": 0.1,
            "device": "cpu",
        },
        "optim": {"lr": 0.01},
        "evaluation": {"every": 5, "tokens": 200},
        "checkpoint": {"every": 4},
        "logging": {"detail_every": 3, "tensorboard": False},
    }
    for table, fields in changes.items():
        values[table] = {**values.get(table, {}), **fields}
    return TrainConfig.model_validate(read_table(TrainConfig, values))


def nervous_config(steps: int) -> TrainConfig:
    """With a spike guard that skips a step now and then, so that its memory matters."""
    return tiny_config(train={"steps": steps, "spike": {"multiple": 1.01, "history": 4, "patience": 100}})


class TinyDocuments:
    """Counting sequences with random starts and steps; the last id ends a document."""

    def __init__(self, n: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._documents = [
            np.append(
                (random.integers(0, 60) + random.integers(1, 4) * np.arange(random.integers(2, 60)))
                % (VOCAB - 1),
                VOCAB - 1,
            ).astype(np.uint32)
            for _ in range(n)
        ]
        self.lengths = np.array([len(d) for d in self._documents])
        self.byte_counts = 3 * self.lengths

    def tokens(self, document: int) -> np.ndarray:
        return self._documents[document]


def tiny_data(config: TrainConfig) -> TrainingData:
    stream = Windows(TinyDocuments(50, seed=1), config.train.context, config.train.seed)
    return TrainingData(stream, (TinyDocuments(12, seed=2),))


def tiny_run(
    config: TrainConfig, out: Path, progress: Progress | None = None, seconds: float | None = None
) -> RunResult:
    torch.set_num_threads(1)
    return run(config, out, data=tiny_data(config), progress=progress, seconds=seconds)


def without_timing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in TIMING} for row in rows]


def _die_in_save(step: int) -> None:
    """Kill this process in the save of `step`: tensors are written, nothing is published."""
    write = train_state.write_tensors

    def write_and_die(folder: Path, *rest: Any) -> None:
        write(folder, *rest)
        if folder.name.startswith(f"step-{step:08d}"):
            os.kill(os.getpid(), signal.SIGKILL)

    train_state.write_tensors = write_and_die


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--die-in-save", type=int)
    arguments = parser.parse_args()
    if arguments.die_in_save is not None:
        _die_in_save(arguments.die_in_save)
    tiny_run(nervous_config(arguments.steps), arguments.out)
