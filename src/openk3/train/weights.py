"""A trained model's weights without its training state: for `--init-from`, generation and chat.

Takes a run folder (its latest checkpoint) or one checkpoint folder in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from openk3.checkpoint.state_tree import differences
from openk3.checkpoint.train_state import CheckpointStore
from openk3.config import ModelConfig, parse
from openk3.errors import CheckpointError
from openk3.model import K3
from openk3.train.recipes import as_table, read_table

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run folder."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_model(
    path: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> K3:
    """The model of a run or checkpoint folder, ready to run (`eval`).

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    store, step = _find(Path(path))
    table = read_table(ModelConfig, _config(store, step)["model"])
    model = K3(parse(ModelConfig, table, str(store.path(step))), dtype=dtype, device=device)
    _fill(model, store, step)
    return model.eval()


def initialise_from(model: K3, path: str | Path) -> None:
    """Fill `model` with the weights and balance biases of a checkpoint of the same model configuration.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or of another model; names the fields.
    """
    store, step = _find(Path(path))
    there, here = _config(store, step)["model"], json.loads(json.dumps(as_table(model.config)))
    if fields := list(differences(there, here)):
        raise CheckpointError(f"{store.path(step)} holds another model: {'; '.join(fields)}")
    _fill(model, store, step)


def _fill(model: K3, store: CheckpointStore, step: int) -> None:
    """Read the weights in the dtype they were saved in, and round them into the model's."""
    saved_dtype = DTYPES[_config(store, step)["train"]["precision"]]
    shapes = K3(model.config, dtype=saved_dtype, device="meta").state_dict()
    saved: dict[str, Any] = {name: torch.empty_like(tensor, device="cpu") for name, tensor in shapes.items()}
    store.load(step, into={"model": saved})
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(saved[name])


def _config(store: CheckpointStore, step: int) -> dict[str, Any]:
    """What the checkpoint of a training run was saved with."""
    match config := store.config(step):
        case {"model": dict(), "train": {"precision": "fp32" | "bf16"}}:
            return config
    raise CheckpointError(f"{store.path(step)}: is no checkpoint of a training run: it names no model")


def _find(path: Path) -> tuple[CheckpointStore, int]:
    """The store and step that `path` means."""
    store = CheckpointStore(path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path)
    if (latest := store.latest()) is not None:
        return store, latest
    beside = CheckpointStore(path.parent)
    for step in beside.steps():
        if beside.path(step).name == path.name:
            return beside, step
    raise CheckpointError(f"{path}: holds no checkpoint; give a run folder, or a step-* folder of one")
