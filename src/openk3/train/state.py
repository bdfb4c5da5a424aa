"""The state of a run in memory, and as the tree that a checkpoint holds.

Everything that decides the next step is here: weights, moments and masters, balance biases, the spike guard's
memory, the place in the data, random generators and counters. What is not saved must not matter.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openk3.checkpoint.rng import capture_rng, restore_rng
from openk3.checkpoint.train_state import CheckpointStore
from openk3.data import Loader
from openk3.errors import InvalidInput
from openk3.model import K3, check, initialise
from openk3.optim import Optimizer
from openk3.train.config import TrainConfig
from openk3.train.data import TrainingData
from openk3.train.feed import Feed
from openk3.train.gradients import prepare_gradients
from openk3.train.recipes import as_table
from openk3.train.reduce import Reduction
from openk3.train.spike import SpikeGuard
from openk3.train.weights import DTYPES, initialise_from


@dataclass
class TrainState:
    """A run between two steps.

    Attributes:
        loader: its place in the data. feed: what brings that to the device.
        step: finished steps, or launched ones: of the last, the rest is known when it is read.
        updates: those of them whose update was applied.
        tokens: seen in all steps. seconds: of training so far, in all sessions.
    """

    model: K3
    optimizer: Optimizer
    guard: SpikeGuard
    loader: Loader
    feed: Feed
    step: int = 0
    updates: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def tree(self) -> dict[str, Any]:
        """What a checkpoint holds: live tensors and plain values."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "guard": self.guard.state(),
            "loader": self.loader.state_dict(),
            "counters": {"updates": self.updates, "tokens": self.tokens, "seconds": self.seconds},
            "rng": capture_rng(),
        }

    def restore(self, store: CheckpointStore, config: Mapping[str, Any]) -> None:
        """Go on from the latest checkpoint, in place.

        Args:
            config: the `decisive` part.

        Raises:
            CheckpointError: it is of another configuration (fields named), or damaged.
            InvalidInput: the data is not what it was.
        """
        step = store.latest()
        assert step is not None
        saved = store.load(step, into=self.tree(), config=config)
        self.guard.restore(saved["guard"])
        self.loader.load_state_dict(saved["loader"])
        self.updates, self.tokens = saved["counters"]["updates"], saved["counters"]["tokens"]
        self.seconds, self.step = saved["counters"]["seconds"], step
        restore_rng(saved["rng"])


def begin(
    config: TrainConfig,
    data: TrainingData,
    store: CheckpointStore,
    *,
    init_from: str | Path | None,
    reduction: Reduction,
) -> TrainState:
    """The state a session starts from: the latest checkpoint's, or that of step 0.

    Step 0 has new weights by the table of `openk3.model.init`, or those of the checkpoint `init_from`.

    Raises:
        InvalidInput: a tensor does not start as the table says (each named), or the data is not what it was.
        CheckpointError: the checkpoint to go on from, or `init_from`, is damaged or of another configuration.
    """
    model = K3(
        config.model,
        dtype=DTYPES[config.train.precision],
        device=device_of(config),
        recompute=config.train.recompute,
    )
    prepare_gradients(model)
    resumed = store.latest() is not None
    if not resumed:
        _fill(model, config, init_from)
    loader = Loader(
        data.stream,
        config.train.step_tokens // config.train.context,
        config.train.micro_batch_tokens // config.train.context,
        rank=reduction.rank,
        world=reduction.ranks,
    )
    optimizer = Optimizer(model.named_parameters(), config.optim, config.model)  # masters copy the weights
    state = TrainState(model, optimizer, SpikeGuard(config.train.spike), loader, Feed(loader, model.device))
    if resumed:
        state.restore(store, decisive(config, data))
    return state


def decisive(config: TrainConfig, data: TrainingData) -> dict[str, Any]:
    """What decides the numbers of a run: a checkpoint is resumed with the same only.

    Of the data that is what it holds, not where it lies, so that a run and its corpus can be moved.
    """
    table = as_table(config)
    return {key: table[key] for key in ("model", "train", "optim", "schedule")} | {"data": data.identity}


def _fill(model: K3, config: TrainConfig, init_from: str | Path | None) -> None:
    _seed_generators(config.train.seed)
    if init_from is not None:
        initialise_from(model, init_from)
        return
    initialise(model, config.train.seed)
    if findings := check(model):
        raise InvalidInput(f"initial weights are wrong: {'; '.join(findings)}")


def _seed_generators(seed: int) -> None:
    """The global generators, which a checkpoint carries on: nothing here draws from them, a caller may."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def device_of(config: TrainConfig) -> torch.device:
    """Where a run of `config` computes on this machine.

    Raises:
        InvalidInput: there is no such device.
    """
    wanted = config.train.device
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InvalidInput('train.device is "cuda", but torch sees no CUDA device; use "cpu" or "auto"')
    return torch.device(wanted)
