"""A checkpoint folder in the released layout, as a checked inventory.

Opening reads `config.json`, the index and the header of every shard, never the data, and compares them with
what the configuration says the checkpoint holds. Everything that is wrong is said in one error. Whether
experts are BF16 or MXFP4 is decided by the tensors that are there: the release's own list of unquantised
modules is incomplete.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from openk3.checkpoint.official import checksums
from openk3.checkpoint.official.checksums import Checksums
from openk3.checkpoint.official.config_reading import model_config_from, read_config, read_json, weights_dtype
from openk3.checkpoint.official.layout import TensorSpec, official_tensors
from openk3.checkpoint.official.shard import Header, StoredTensor, TensorReader, read_header
from openk3.config import ModelConfig
from openk3.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PACKED, SCALE = ".weight_packed", ".weight_scale"
WEIGHTS = {"bfloat16": "BF16", "float32": "F32", "float16": "F16"}
"""The stored type of weights, by the name that `config.json` gives it."""
MOST_PROBLEMS = 12
"""How many of a folder's problems an error spells out."""
SPARE = 10_000
"""Tensors that may be missing beyond twice those that are there, for all of them to be listed."""
MOST_CHARACTERS = 400
"""Of one problem in such an error: names in a file may be of any length."""

Tensor = torch.Tensor


@dataclass
class Findings:
    """What opening a folder found, whether it can be loaded or not.

    Attributes:
        problems: one line each; a folder without any can be loaded.
        config: None when `config.json` describes no model that we have.
        table: `config.json` as it is.
        tensors: every tensor of every readable shard, by name.
        specs: what the configuration wants, by name.
        sums: the checksums that stand beside the shards, if any.
    """

    path: Path
    problems: list[str] = field(default_factory=list)
    config: ModelConfig | None = None
    table: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, Header] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    sums: Checksums | None = None


class OfficialFolder:
    """A checkpoint folder whose tensors are those of its configuration.

    Use as a context manager, or `close` it: shards stay open once something was read from them.

    Attributes:
        config: the model; `expert_format` is what the tensors are in.
        table: `config.json` as it is.
        specs: every tensor of the checkpoint, by name, with its place in our model.
        tensors: where each lies.
    """

    def __init__(self, findings: Findings) -> None:
        if findings.problems or findings.config is None:
            raise CheckpointError(f"{findings.path}: cannot be loaded: {_shortened(findings.problems)}")
        self.path = findings.path
        self.config = findings.config
        self.table = findings.table
        self.specs: Mapping[str, TensorSpec] = findings.specs
        self.tensors: Mapping[str, StoredTensor] = findings.tensors
        self.reader = TensorReader(findings.tensors, dict(_tensor_sums(findings)))

    @classmethod
    def open(cls, path: str | Path) -> OfficialFolder:
        """The folder at `path`.

        Raises:
            CheckpointError: something is missing, unexpected, of another shape or dtype, truncated or
                damaged; all of it in one error.
        """
        return cls(survey(Path(path)))

    def __enter__(self) -> OfficialFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the shards."""
        self.reader.close()

    def read(self, name: str) -> Tensor:
        """The tensor called `name` as stored, in memory of its own."""
        return self.reader.read(name)

    def read_into(self, name: str, out: Tensor) -> None:
        """The bytes of `name` into `out`, uint8 on the CPU of that size."""
        self.reader.read_into(name, out)


def is_official_folder(path: Path) -> bool:
    """Whether `path` looks like a checkpoint in the released layout, whole or not."""
    return any(os.path.lexists(path / name) for name in ("config.json", INDEX, SINGLE))


def survey(path: Path) -> Findings:
    """Everything that can be said of a folder without reading its data. Problems are collected."""
    found = Findings(path)
    if not path.is_dir():
        found.problems.append("no such folder")
        return found
    try:
        found.table = read_config(path)
        found.config = model_config_from(found.table, str(path / "config.json"))
        if weights_dtype(found.table) not in WEIGHTS:
            found.problems.append(
                f"config.json: dtype {weights_dtype(found.table)!r} is none of {', '.join(WEIGHTS)}"
            )
    except CheckpointError as error:
        found.problems.append(_within(path, error))
    try:
        found.sums = checksums.read(path)
        files = _read_index(found)
    except CheckpointError as error:
        found.problems.append(_within(path, error))
        return found
    for name in dict.fromkeys(files.values()):
        _read_shard(found, name)
    _compare_index(found, files)
    if found.config is not None and not found.problems:
        _compare_config(found, found.config)
    return found


def _read_index(found: Findings) -> dict[str, str]:
    """The shard of each tensor, by name; of a folder with one file and no index all are that file's."""
    index = found.path / INDEX
    if not index.is_file():
        if not (found.path / SINGLE).is_file():
            raise CheckpointError(f"{found.path}: holds neither {INDEX} nor {SINGLE}")
        return {"": SINGLE}
    table = read_json(index)
    match table:
        case {"weight_map": dict(files)}:
            pass
        case _:
            raise CheckpointError(f"{index}: has no weight_map")
    for name, file in files.items():
        if not isinstance(file, str) or "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: {name} is in {file!r}, which is no name of a shard in this folder"
            )
    written = found.sums.index if found.sums is not None else None
    if written is not None and zlib.crc32(index.read_bytes()) != written:
        raise CheckpointError(
            f"{index}: damaged: is not what was written (its checksum differs; {checksums.STALE})"
        )
    return files


def _read_shard(found: Findings, name: str) -> None:
    path = found.path / name
    if not os.path.isfile(path):
        found.problems.append(f"{name} is missing")
        return
    try:
        header = read_header(path)
    except CheckpointError as error:
        found.problems.append(_within(found.path, error))
        return
    if found.sums is not None:
        sums = found.sums.shards.get(name)
        if sums is None:
            found.problems.append(f"{name} is not in {checksums.FILE_NAME} ({checksums.STALE})")
        elif sums.bytes != header.file_bytes or sums.header != header.crc32:
            found.problems.append(
                f"{name}: damaged header: it is not what was written "
                f"(its checksum differs; {checksums.STALE})"
            )
        elif len(sums.tensors) != len(header.tensors):
            found.problems.append(
                f"{name} has {len(header.tensors)} tensors, {checksums.FILE_NAME} other ones "
                f"({checksums.STALE})"
            )
    found.headers[name] = header
    for tensor, stored in header.tensors.items():
        if tensor in found.tensors:
            found.problems.append(f"{tensor} is in {found.tensors[tensor].file.name} and in {name}")
        found.tensors[tensor] = stored


def _compare_index(found: Findings, files: Mapping[str, str]) -> None:
    """The index says which shard holds which tensor, and how many bytes there are."""
    if files == {"": SINGLE}:
        return
    for name, file in files.items():
        if file in found.headers and name not in found.headers[file].tensors:
            found.problems.append(f"{name} is missing in {file}, where the index says it is")
    for name, stored in found.tensors.items():
        if name not in files:
            found.problems.append(f"{name} in {stored.file.name} is unknown to the index")
    table = read_json(found.path / INDEX)
    metadata = table.get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = sum(stored.bytes for stored in found.tensors.values())
    if said is not None and said != total and not found.problems:
        found.problems.append(f"the index speaks of {said} bytes of tensors, the shards hold {total}")


def _compare_config(found: Findings, config: ModelConfig) -> None:
    packed = any(name.endswith(PACKED) for name in found.tensors)
    found.config = config = config.model_copy(update={"expert_format": "mxfp4" if packed else "bf16"})
    least = _least_tensors(config)
    if least > 2 * len(found.tensors) + SPARE:  # such a list would be as long as the numbers are absurd
        found.problems.append(
            f"config.json wants more than {least:,} tensors, the shards hold {len(found.tensors):,}"
        )
        return
    weights = WEIGHTS[weights_dtype(found.table)]
    found.specs = {spec.name: spec for spec in official_tensors(config, weights=weights)}
    for name, spec in found.specs.items():
        stored = found.tensors.get(name)
        if stored is None:
            found.problems.append(f"{name} is missing")
        elif stored.shape != spec.shape:
            found.problems.append(
                f"{name} is {list(stored.shape)}, the configuration says {list(spec.shape)}"
            )
        elif stored.dtype not in _accepted(spec, weights):
            found.problems.append(
                f"{name} is {stored.dtype}, the layout says {spec.dtype} "
                f"(config.json: dtype {weights_dtype(found.table)})"
            )
    found.problems += [f"{name} is unexpected" for name in found.tensors if name not in found.specs]


def _least_tensors(config: ModelConfig) -> int:
    """Fewer than the configuration's checkpoint holds, without deriving their names."""
    experts = config.moe.num_experts if config.moe else 0
    vision = config.vision.num_layers if config.vision else 0
    return config.num_layers + vision + max(0, config.num_layers - config.dense_layers) * experts


def _accepted(spec: TensorSpec, weights: str) -> set[str]:
    """What is kept in F32 may also come in the weights' type: widening is exact."""
    return {spec.dtype, weights} if spec.dtype == "F32" else {spec.dtype}


def _tensor_sums(found: Findings) -> Iterator[tuple[str, int]]:
    if found.sums is not None:
        for file, header in found.headers.items():
            yield from zip(header.tensors, found.sums.shards[file].tensors, strict=True)


def _within(path: Path, error: CheckpointError) -> str:
    return str(error).removeprefix(f"{path}/").removeprefix(f"{path}: ")


def _shortened(problems: list[str]) -> str:
    shown = [
        text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
        for text in itertools.islice(problems, MOST_PROBLEMS)
    ]
    more = len(problems) - len(shown)
    return "; ".join([*shown, f"and {more} more"] if more else shown)
