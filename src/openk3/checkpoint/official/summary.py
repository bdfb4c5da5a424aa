"""What a checkpoint folder holds, in numbers: for people who want to know before they load.

Works from the inventory alone, so that a folder of terabytes takes seconds, and on folders that cannot be
loaded too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from openk3.checkpoint.official.config_reading import weights_dtype
from openk3.checkpoint.official.folder import PACKED, SCALE, Findings, OfficialFolder
from openk3.checkpoint.official.load import read_numbers
from openk3.checkpoint.official.shard import StoredTensor


@dataclass(frozen=True)
class Part:
    """Tensors of one kind. `parameters` counts weights: two in a byte of MXFP4, none in its scales."""

    tensors: int
    bytes: int
    parameters: int


@dataclass(frozen=True)
class Summary:
    """Of one folder.

    Attributes:
        form: `model_type` of `config.json`, or None.
        expert_format: of the routed experts, None without any.
        dtype: of the other weights, as `config.json` says.
        parts: by kind: routed experts, other text weights, vision.
        dtypes: bytes by stored type.
        checked: whether checksums stand beside the shards.
        problems: why it will not load; empty when it will.
    """

    form: str | None
    expert_format: str | None
    dtype: str
    shards: int
    parts: Mapping[str, Part]
    dtypes: Mapping[str, int]
    checked: bool
    problems: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts.values())

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts.values())


def summarise(found: Findings) -> Summary:
    """The numbers of a surveyed folder."""
    parts: dict[str, list[tuple[str, StoredTensor]]] = {}
    dtypes: dict[str, int] = {}
    for name, stored in found.tensors.items():
        parts.setdefault(_kind(name), []).append((name, stored))
        dtypes[stored.dtype] = dtypes.get(stored.dtype, 0) + stored.bytes
    experts = [name for name, _ in parts.get("routed experts", [])]
    kind = found.table.get("model_type")
    return Summary(
        form=kind if isinstance(kind, str) else None,
        expert_format=("mxfp4" if any(n.endswith(PACKED) for n in experts) else "bf16") if experts else None,
        dtype=weights_dtype(found.table),
        shards=len(found.headers),
        parts={
            kind: Part(len(held), sum(t.bytes for _, t in held), sum(_parameters(n, t) for n, t in held))
            for kind, held in sorted(parts.items())
        },
        dtypes=dict(sorted(dtypes.items())),
        checked=found.sums is not None,
        problems=tuple(found.problems),
    )


def verify(folder: OfficialFolder, progress: Callable[[int], None] = lambda done: None) -> None:
    """Read every byte, look for what is no number, and compare with the checksums where the folder has them.

    Args:
        progress: called with the bytes of each tensor that was read.

    Raises:
        CheckpointError: a tensor is not what was written, or holds NaN or infinity; names it and its shard.
    """
    for name, stored in folder.tensors.items():
        read_numbers(folder, name)
        progress(stored.bytes)


def _kind(name: str) -> str:
    if ".experts." in name:
        return "routed experts"
    if name.startswith(("vision_tower.", "mm_projector.")):
        return "vision"
    return "other text weights"


def _parameters(name: str, stored: StoredTensor) -> int:
    if name.endswith(SCALE):
        return 0
    return prod(stored.shape) * (2 if name.endswith(PACKED) else 1)
