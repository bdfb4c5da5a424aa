"""A model into a folder in the released layout: one shard per layer, an index, `config.json`, checksums.

The folder appears whole or not at all. Tensors are written one at a time, so that beside the model the host
holds one of them. Tokenizer and other small files come from the caller.
"""

from __future__ import annotations

import itertools
import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from openk3.checkpoint.atomic import atomic_folder, make_folder
from openk3.checkpoint.official import checksums
from openk3.checkpoint.official.checksums import Checksums, ShardSums
from openk3.checkpoint.official.config_writing import config_json_of, generation_config_of
from openk3.checkpoint.official.folder import INDEX, PACKED, SCALE, WEIGHTS, OfficialFolder
from openk3.checkpoint.official.layout import MX_GROUP, TensorSpec, official_tensors
from openk3.checkpoint.official.shard import ShardWriter
from openk3.config import ModelConfig
from openk3.errors import InvalidInput
from openk3.model import K3
from openk3.ops.mx import decode_mxfp4, encode_mxfp4

Tensor = torch.Tensor
Values = Callable[[TensorSpec], Tensor]
"""The stored form of a tensor, by its spec."""
WRITTEN = ("bfloat16", "float32")
"""What weights can be written in; float16 is only read."""
_TYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
GENERATION = "generation_config.json"


def save_official(
    model: K3,
    path: str | Path,
    *,
    experts: str | None = None,
    dtype: str = "bfloat16",
    like: OfficialFolder | None = None,
    companions: Iterable[Path] = (),
) -> Path:
    """Write the text model to a new folder at `path`.

    Args:
        experts: "bf16" or "mxfp4"; None is the configuration's `expert_format`. MXFP4 scales follow the EVEN
            rule of the public tools.
        dtype: of the other weights, "bfloat16" (the release's) or "float32" (keeps an fp32 model whole).
        like: the checkpoint that the model came from. Its unknown `config.json` fields are kept, its vision
            tensors pass through, and an expert that still has its values is written with the same bytes.
        companions: other files to copy into the folder, as the tokenizer's.

    Raises:
        InvalidInput: the released layout has no words for this model, or its experts cannot be packed.
        StorageError: the system refused a write, or `path` exists; nothing was left behind.
    """
    config = model.config
    if like is not None:
        config = config.model_copy(update={"vision": like.config.vision})
    config = with_experts(config, experts or config.expert_format)
    places = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return write_folder(
        path,
        config,
        _StoredForm(places, like),
        dtype=dtype,
        base=like.table if like is not None else None,
        companions=companions,
    )


def with_experts(config: ModelConfig, experts: str) -> ModelConfig:
    """`config` with its experts stored as `experts`.

    Raises:
        InvalidInput: there is no such format, or an expert's rows are not whole groups of it.
    """
    if experts not in ("bf16", "mxfp4"):
        raise InvalidInput(f"experts {experts!r}: want 'bf16' or 'mxfp4'")
    if experts == "mxfp4" and config.moe is not None:
        for name, width in {
            "moe.expert_width": config.moe.expert_width,
            "moe.latent_width": config.moe.latent_width or config.hidden_size,
        }.items():
            if width % MX_GROUP:
                raise InvalidInput(f"MXFP4 experts need {name} to be a multiple of {MX_GROUP}, it is {width}")
    return config.model_copy(update={"expert_format": experts})


def write_folder(
    path: str | Path,
    config: ModelConfig,
    values: Values,
    *,
    dtype: str = "bfloat16",
    base: Mapping[str, Any] | None = None,
    companions: Iterable[Path] = (),
    progress: Callable[[int], None] = lambda done: None,
) -> Path:
    """Write a checkpoint of `config` whose tensors come from `values`, asked for in the order of the files.

    Args:
        base: the `config.json` to start from.
        companions: files to copy into the folder.
        progress: called with the bytes of each tensor that was written.
    """
    if dtype not in WRITTEN:
        raise InvalidInput(f"dtype {dtype!r}: want {' or '.join(WRITTEN)}")
    table = config_json_of(config, base, dtype=dtype)
    shards = _shards(official_tensors(config, weights=WEIGHTS[dtype]))
    path = Path(path)
    make_folder(path.parent)
    with atomic_folder(path) as folder:
        names = [f"model-{n:05d}-of-{len(shards):06d}.safetensors" for n in range(1, len(shards) + 1)]
        sums = {}
        for name, specs in zip(names, shards, strict=True):
            with (folder / name).open("wb") as file:
                writer = ShardWriter(file, ((spec.name, spec.dtype, spec.shape) for spec in specs))
                for spec in specs:
                    writer.write(values(spec))
                    progress(spec.bytes)
                writer.finish()
                sums[name] = ShardSums(file.tell(), writer.header_crc32, tuple(writer.crc32.values()))
        total = sum(spec.bytes for specs in shards for spec in specs)
        weight_map = {spec.name: name for name, specs in zip(names, shards, strict=True) for spec in specs}
        index = _dump({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
        (folder / INDEX).write_bytes(index)
        (folder / "config.json").write_bytes(_dump(table))
        (folder / GENERATION).write_bytes(_dump(generation_config_of(config)))
        (folder / checksums.FILE_NAME).write_bytes(
            _dump(checksums.to_json(Checksums(sums, zlib.crc32(index))))
        )
        for companion in companions:
            shutil.copyfile(companion, folder / companion.name)
    return path


def companions_of(folder: OfficialFolder) -> list[Path]:
    """What a checkpoint folder holds beside its weights: tokenizer, licence, other tools' files."""
    written = {INDEX, "config.json", checksums.FILE_NAME}
    files = (file for file in sorted(folder.path.iterdir()) if file.is_file())
    return [file for file in files if file.suffix != ".safetensors" and file.name not in written]


def _dump(table: Mapping[str, Any]) -> bytes:
    return (json.dumps(table, indent=2) + "\n").encode()


def _shards(specs: Iterable[TensorSpec]) -> list[list[TensorSpec]]:
    """One per layer, one of what belongs to no layer, then projector and vision tower as released.

    In a shard an expert's tensors lie together, so that one expert is one stretch of the file.
    """

    def shard(spec: TensorSpec) -> tuple[int, int]:
        if spec.layer is not None:
            return 0, spec.layer
        return 1 if spec.ours is not None else 2 if spec.name.startswith("mm_projector.") else 3, 0

    def within(spec: TensorSpec) -> tuple[bool, int, str]:
        return spec.expert is not None, spec.expert or 0, spec.name

    grouped = itertools.groupby(sorted(specs, key=shard), key=shard)
    return [sorted(group, key=within) for _, group in grouped]


class _StoredForm:
    """Our tensors as they are stored."""

    def __init__(self, places: Mapping[str, Tensor], like: OfficialFolder | None) -> None:
        self._places = places
        self._like = like
        self._scale: Tensor | None = None

    def __call__(self, spec: TensorSpec) -> Tensor:
        if spec.ours is None:
            assert self._like is not None
            return self._like.read(spec.name).to(_TYPES[spec.dtype])
        value = self._places[spec.ours].detach()
        if spec.expert is not None:
            value = value[spec.expert]
        value = value.cpu()
        if spec.name.endswith(PACKED):
            halves = _unchanged(value, spec.name, self._like) or packed(value, spec.name)
            self._scale = halves[1]
            return halves[0]
        if spec.name.endswith(SCALE):
            assert self._scale is not None  # the packed half comes just before
            return self._scale
        dtype = _TYPES[spec.dtype]
        if not bool(value.isfinite().all()):
            raise InvalidInput(f"{spec.ours} holds values that are not finite; such a model is not saved")
        if spec.ours.endswith(".A_log"):
            padded = torch.zeros(spec.shape, dtype=dtype)
            padded.view(-1)[: value.shape[0]] = value
            return padded
        return value.to(dtype)


def _unchanged(value: Tensor, name: str, like: OfficialFolder | None) -> tuple[Tensor, Tensor] | None:
    """The bytes that an expert came in, while it still has their values."""
    if like is None or name not in like.tensors:
        return None
    halves = like.read(name), like.read(name.removesuffix(PACKED) + SCALE)
    return halves if torch.equal(decode_mxfp4(*halves, torch.float32), value.to(torch.float32)) else None


def packed(value: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """An expert's matrix `[out, in]` in MXFP4: `[out, in / 2]` and scales `[out, in / 32]`, both uint8."""
    try:
        return encode_mxfp4(value)
    except InvalidInput as error:
        raise InvalidInput(f"{name.removesuffix(PACKED)}: {error}") from None
