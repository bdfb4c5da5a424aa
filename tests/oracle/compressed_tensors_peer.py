"""MXFP4 as compressed-tensors computes it, set up from a checkpoint's own `config.json`.

Imported only where compressed-tensors is.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from compressed_tensors.compressors import MXFP4PackedCompressor
from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer, convert_checkpoint
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from loguru import logger

from openk3.checkpoint.official.checksums import FILE_NAME as CHECKSUMS

Tensor = torch.Tensor

logger.disable("compressed_tensors")


def scheme_of(folder: Path) -> QuantizationScheme:
    """What it reads in the `config.json` of a saved checkpoint."""
    table = json.loads((folder / "config.json").read_text())
    config = QuantizationConfig.model_validate(table.get("text_config", table)["quantization_config"])
    (scheme,) = config.config_groups.values()
    return scheme


def compress(weight: Tensor, scheme: QuantizationScheme) -> tuple[Tensor, Tensor]:
    """`[out, in]` to packed bytes `[out, in / 2]` and scale bytes `[out, in / 32]`."""
    groups = weight.view(weight.shape[0], -1, 32)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    stored = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    return stored["weight_packed"], stored["weight_scale"]


def decompress(packed: Tensor, scale: Tensor, scheme: QuantizationScheme) -> Tensor:
    """Packed bytes to BF16 values."""
    stored = {"weight_packed": packed, "weight_scale": scale}
    return MXFP4PackedCompressor.decompress(stored, scheme)["weight"]


def with_dense_experts(folder: Path, to: Path) -> Path:
    """The checkpoint in `folder`, its MXFP4 experts unpacked to BF16 by its own converter, written to `to`.

    The converter copies our checksums, which are those of the packed file, along with all small files.
    """
    convert_checkpoint(folder, to, CompressedTensorsDequantizer(folder), max_workers=1, device="cpu")
    (to / CHECKSUMS).unlink()
    return to
