"""A trained model's weights without its training state: for `--init-from`, generation and chat.

Takes a run folder (its latest checkpoint), one checkpoint folder in it, or a folder in the released layout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from openk3.checkpoint.official.config_reading import canonical
from openk3.checkpoint.official.folder import OfficialFolder, is_official_folder
from openk3.checkpoint.official.load import fill, load_official
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
    """The model of a run, a checkpoint of one, or a folder in the released layout, ready to run (`eval`).

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    if is_official_folder(Path(path)):
        return load_official(path, dtype=dtype, device=device)
    store, step, config = describe_run(path)
    model = K3(config, dtype=dtype, device=device)
    _fill(model, store, step)
    return model.eval()


def describe_run(path: str | Path) -> tuple[CheckpointStore, int, ModelConfig]:
    """The store, the step and the model that a run or checkpoint folder means.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    store, step = _find(Path(path))
    table = read_table(ModelConfig, _config(store, step)["model"])
    return store, step, parse(ModelConfig, table, str(store.path(step)))


def initialise_from(model: K3, path: str | Path) -> None:
    """Fill `model` with the weights and balance biases of a checkpoint of the same model configuration.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or of another model; names the fields.
    """
    if is_official_folder(Path(path)):
        with OfficialFolder.open(path) as folder:
            _check_same(folder.config, model.config, str(path))
            fill(model, folder)
        return
    store, step, there = describe_run(path)
    _check_same(there, model.config, str(store.path(step)))
    _fill(model, store, step)


def save_weights(model: K3, path: str | Path) -> Path:
    """Write the weights alone to a new folder at `path`, which is then read like a run's.

    Raises:
        InvalidInput: there is a checkpoint already.
        StorageError: the system refused a write.
    """
    store = CheckpointStore(Path(path) / CHECKPOINTS)
    dtypes = {dtype: name for name, dtype in DTYPES.items()}
    config = {
        "model": as_table(model.config),
        "train": {"precision": dtypes[model.embed_tokens.weight.dtype]},
    }
    return store.save(0, {"model": model.state_dict()}, config=config)


_OF_STORAGE = {"vision": None, "expert_format": "bf16"}
"""What a model in memory is not told by: how its checkpoint stores it."""


def _check_same(there: ModelConfig, here: ModelConfig, source: str) -> None:
    tables = (
        json.loads(json.dumps(as_table(canonical(config.model_copy(update=_OF_STORAGE)))))
        for config in (there, here)
    )
    if fields := list(differences(*tables)):
        raise CheckpointError(f"{source} holds another model: {'; '.join(fields)}")


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
    if not path.is_dir():
        raise CheckpointError(f"{path}: no checkpoint there: no such folder")
    store = CheckpointStore(path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path)
    if (latest := store.latest()) is not None:
        return store, latest
    beside = CheckpointStore(path.parent)
    for step in beside.steps():
        if beside.path(step).name == path.name:
            return beside, step
    raise CheckpointError(
        f"{path}: holds no checkpoint; give a run folder, a step-* folder of one, or a folder in the "
        "released layout (with a config.json)"
    )
