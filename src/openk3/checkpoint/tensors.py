"""The tensors of a checkpoint in the files of `torch.distributed.checkpoint` (DCP), by path.

Each rank writes what it holds (`__RANK_N.distcp`), and `.metadata` says where each piece of each tensor lies,
so that other ranks, more or fewer, can read the pieces that they hold. Uses only calls that torch 2.11 and
2.13 share. Knows nothing about when a checkpoint counts.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from openk3.checkpoint.atomic import storage_errors
from openk3.checkpoint.ranks import Ranks


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor], ranks: Ranks) -> None:
    """Write `tensors` (any device, DTensors too) into `folder`, synced; called on every rank.

    A tensor that several ranks have under one path and that is no DTensor is written by one of them.

    Raises:
        StorageError: the system refused a write on some rank.
    """
    with storage_errors(folder):
        try:
            with _quiet_without_group():
                save(
                    tensors,
                    storage_writer=_Writer(folder),
                    process_group=ranks.group,
                    no_dist=ranks.group is None,
                )
        except CheckpointException as error:
            # A BaseException, which no handler expects, around the first failure (an interrupt included).
            cause, _ = next(iter(error.failures.values()))
            raise cause from None


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Shape (`size`) and dtype (`properties.dtype`) of every tensor in `folder`, by path."""
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {path: one for path, one in stored.items() if isinstance(one, TensorStorageMetadata)}


def read_tensors(folder: Path, tensors: dict[str, torch.Tensor], ranks: Ranks) -> None:
    """Fill `tensors`, whose paths, shapes and dtypes are the stored ones, in place; called on every rank."""
    with _quiet_without_group():
        load(
            tensors,
            storage_reader=FileSystemReader(folder),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )


def mismatches(
    stored: Mapping[str, TensorStorageMetadata], targets: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """One phrase per path where the stored tensors and the tensors to load into are not the same."""
    for path in sorted(stored.keys() | targets.keys()):
        theirs, ours = stored.get(path), targets.get(path)
        if theirs is None:
            yield f"{path} is absent there"
        elif ours is None:
            yield f"{path} is absent here"
        elif (theirs.size, theirs.properties.dtype) != (ours.shape, ours.dtype):
            yield (
                f"{path} is {theirs.properties.dtype} {[*theirs.size]} there "
                f"and {ours.dtype} {[*ours.shape]} here"
            )


class _Writer(FileSystemWriter):
    """DCP's writer, with the reason for a failed write, which torch's archive writer hides in a RuntimeError.

    It is found here, on the rank that failed: what led to an exception does not travel to other ranks.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


@contextlib.contextmanager
def _quiet_without_group() -> Iterator[None]:
    """DCP warns at each call without a process group, though `no_dist` asks for just that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
