"""Checksums of a checkpoint in the released layout, beside it in `checksums.json`.

For each shard its size, the CRC-32 of its header, and of each tensor in the header's order; for the index its
own. They name a flipped bit at the moment when a tensor is read, without reading the rest. The file is ours
and optional: other readers ignore it, and a folder without it is read without the comparison. It guards
against accidents, not against people.
"""

from __future__ import annotations

import os
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openk3.checkpoint.official.config_reading import read_json
from openk3.errors import CheckpointError

FILE_NAME = "checksums.json"
FORMAT = 1
STALE = f"if another tool wrote it, {FILE_NAME} belongs to other shards: remove it, and nothing is compared"
"""What may be the matter when nothing is damaged: tools copy the file beside shards that they changed."""
_DIGITS = 8


@dataclass(frozen=True)
class ShardSums:
    """Of one shard. `tensors`: CRC-32 in the order of the tensors' bytes."""

    bytes: int
    header: int
    tensors: tuple[int, ...]


@dataclass(frozen=True)
class Checksums:
    """Of a folder: its shards by file name, and the CRC-32 of the index (None when there is no index)."""

    shards: Mapping[str, ShardSums]
    index: int | None


def to_json(sums: Checksums) -> dict[str, Any]:
    """The content of `checksums.json`; the tensors' sums are one text of 8 hexadecimal digits each."""
    return {
        "format": FORMAT,
        "algorithm": "crc32",
        "index": None if sums.index is None else _hex([sums.index]),
        "shards": {
            name: {"bytes": shard.bytes, "header": _hex([shard.header]), "tensors": _hex(shard.tensors)}
            for name, shard in sums.shards.items()
        },
    }


def read(folder: Path) -> Checksums | None:
    """The checksums in `folder`, or None where there are none.

    Raises:
        CheckpointError: the file is damaged or of a newer format.
    """
    path = folder / FILE_NAME
    if not os.path.lexists(path):  # a link that leads nowhere is a damaged one
        return None
    table = read_json(path)
    try:
        if table["format"] != FORMAT or table["algorithm"] != "crc32":
            raise CheckpointError(
                f"{path}: has format {table['format']!r}; this version reads {FORMAT}: update openk3"
            )
        shards = {
            name: ShardSums(
                int(shard["bytes"]), _numbers(shard["header"])[0], tuple(_numbers(shard["tensors"]))
            )
            for name, shard in table["shards"].items()
        }
        index = None if table["index"] is None else _numbers(table["index"])[0]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise CheckpointError(f"{path}: damaged") from None
    return Checksums(shards, index)


def _hex(sums: Iterable[int]) -> str:
    return "".join(f"{n:0{_DIGITS}x}" for n in sums)


def _numbers(text: str) -> list[int]:
    if len(text) % _DIGITS or not set(text) <= set(string.hexdigits):
        raise ValueError("no checksums")
    return [int(text[i : i + _DIGITS], 16) for i in range(0, len(text), _DIGITS)]
