"""A random model as our saver wrote it, and ours to compare with: what every test of a peer starts from."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from openk3.checkpoint.official.load import load_official
from openk3.checkpoint.official.save import save_official
from openk3.config import ModelConfig
from oracle.comparison import Ours, sequences_for
from oracle.random_models import in_fp32, random_model


@dataclass(frozen=True)
class Case:
    """`folder` holds the weights of `ours` in the released layout; `sequences` end around borders."""

    seed: int
    folder: Path
    ours: Ours
    sequences: list[torch.Tensor]


def saved(config: ModelConfig, seed: int, folder: Path) -> Case:
    """The model of `config` and `seed`, written to `folder`.

    With BF16 experts ours computes with the weights that were saved, so that the loader has no part in it.
    MXFP4 experts lose precision when they are saved, so ours is what was loaded.
    """
    model = random_model(config, seed)
    save_official(model, folder)
    ours = load_official(folder) if config.expert_format == "mxfp4" else in_fp32(model)
    return Case(seed, folder, Ours(ours), sequences_for(ours, seed))


def peer(module: str) -> ModuleType:
    """A module of this folder that imports a peer; skips the test where the peer is missing."""
    try:
        return importlib.import_module(f"oracle.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("oracle", "openk3"):
            raise
        pytest.skip(f"{error.name} is not installed; the peers come with: pip install 'openk3[oracle]'")
