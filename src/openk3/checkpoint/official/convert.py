"""A checkpoint in the released layout rewritten with its experts in the other format, tensor by tensor.

Nothing is loaded as a model: beside the file system the conversion holds one matrix. What the format of the
experts does not concern is copied byte for byte, vision tensors included.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from openk3.checkpoint.official.config_reading import weights_dtype
from openk3.checkpoint.official.folder import PACKED, SCALE, OfficialFolder
from openk3.checkpoint.official.layout import TensorSpec
from openk3.checkpoint.official.load import decoded, read_numbers
from openk3.checkpoint.official.save import companions_of, packed, with_experts, write_folder

Tensor = torch.Tensor


def convert_official(
    folder: OfficialFolder,
    path: str | Path,
    *,
    experts: str,
    progress: Callable[[int], None] = lambda done: None,
) -> Path:
    """Write `folder`'s checkpoint to a new folder at `path` with its experts as "bf16" or "mxfp4".

    BF16 holds every MXFP4 value exactly. The other way rounds, by the EVEN scale rule.

    Args:
        progress: called with the bytes of each tensor that was written.

    Raises:
        InvalidInput: an expert cannot be packed.
        CheckpointError: the data is damaged.
        StorageError: the system refused a write, or `path` exists; nothing was left behind.
    """
    config = with_experts(folder.config, experts)
    return write_folder(
        path,
        config,
        _Rewritten(folder),
        dtype=converted_dtype(folder),
        base=folder.table,
        companions=companions_of(folder),
        progress=progress,
    )


def converted_dtype(folder: OfficialFolder) -> str:
    """The type to write plain weights in: their own, but float32 for float16, which no release has."""
    dtype = weights_dtype(folder.table)
    return "float32" if dtype == "float16" else dtype


class _Rewritten:
    """The tensors of one format from a folder of either."""

    def __init__(self, folder: OfficialFolder) -> None:
        self._folder = folder
        self._scale: Tensor | None = None

    def __call__(self, spec: TensorSpec) -> Tensor:
        name = spec.name
        if name in self._folder.tensors:
            stored = read_numbers(self._folder, name)
            # What the layout keeps in F32 may have come in a narrower type.
            return stored.to(torch.float32) if spec.dtype == "F32" else stored
        if name.endswith(PACKED):
            plain = name.removesuffix(PACKED) + ".weight"
            bytes_, self._scale = packed(self._folder.read(plain), plain)
            return bytes_
        if name.endswith(SCALE):
            assert self._scale is not None  # the packed half comes just before
            return self._scale
        return decoded(self._folder, name.removesuffix(".weight") + PACKED, _TYPES[spec.dtype])


_TYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
