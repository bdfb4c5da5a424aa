"""Damaged checkpoints: each gives a clear error, or loads as exactly the model that was saved.

A mutation either breaks a whole folder (checksums beside it, so that any flipped bit shows) or one as other
tools write it (no checksums: structure alone must give it away).
"""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections import Counter
from pathlib import Path

import pytest
import torch

from checkpoint.official_folders import K3_FORM, header_of, saved, shards, write_shard
from openk3.checkpoint.official.folder import INDEX
from openk3.checkpoint.official.load import load_official
from openk3.errors import CheckpointError

CASES = 300
SLOW_CASES = 2000


def truncated(folder: Path, rng: random.Random) -> None:
    file = rng.choice([*shards(folder), folder / INDEX, folder / "config.json"])
    raw = file.read_bytes()
    file.write_bytes(raw[: rng.randrange(len(raw) - 1)])


def extended(folder: Path, rng: random.Random) -> None:
    with rng.choice(shards(folder)).open("ab") as file:
        file.write(rng.randbytes(rng.randint(1, 100)))


def removed(folder: Path, rng: random.Random) -> None:
    rng.choice([*shards(folder), folder / INDEX, folder / "config.json"]).unlink()


def emptied(folder: Path, rng: random.Random) -> None:
    file = rng.choice(shards(folder))
    file.write_bytes(rng.choice([b"", bytes(8), rng.randbytes(200), bytes(file.stat().st_size)]))


def exchanged(folder: Path, rng: random.Random) -> None:
    """Two shards have each other's names."""
    a, b = rng.sample(shards(folder), 2)
    a.rename(folder / "aside")
    b.rename(a)
    (folder / "aside").rename(b)


def with_length(folder: Path, rng: random.Random) -> None:
    """A header length from another world."""
    shard = rng.choice(shards(folder))
    raw = shard.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    absurd = rng.choice([0, 1, length - 1, length + 1, length * 2, 2**31, 2**40, 2**63, 2**64 - 1])
    shard.write_bytes(struct.pack("<Q", absurd) + raw[8:])


def _entry(header: dict, rng: random.Random) -> str:
    return rng.choice([name for name in header if name != "__metadata__"])


def renamed(folder: Path, rng: random.Random) -> None:
    shard = rng.choice(shards(folder))
    header, data = header_of(shard)
    old = _entry(header, rng)
    new = rng.choice([old + "x", old[1:], old.replace("layers.", "layers.9"), "", old.upper()])
    write_shard(shard, {new if name == old else name: entry for name, entry in header.items()}, data)
    if rng.random() < 0.5:  # also in the index
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][new] = index["weight_map"].pop(old)
        (folder / INDEX).write_text(json.dumps(index))


def reshaped(folder: Path, rng: random.Random) -> None:
    shard = rng.choice(shards(folder))
    header, data = header_of(shard)
    entry = header[_entry(header, rng)]
    shape = entry["shape"]
    entry["shape"] = rng.choice(
        [shape[::-1], [1, *shape], [*shape[:-1], shape[-1] * 2], [-1], [], None, "2", [2**62, 4]]
    )
    write_shard(shard, header, data)


def retyped(folder: Path, rng: random.Random) -> None:
    shard = rng.choice(shards(folder))
    header, data = header_of(shard)
    entry = header[_entry(header, rng)]
    entry["dtype"] = rng.choice(["F16", "I16", "I8", "F8_E4M3", "F64", "F4", "", None, 3])
    write_shard(shard, header, data)


def relocated(folder: Path, rng: random.Random) -> None:
    """Offsets that overlap, leave holes or point outside."""
    shard = rng.choice(shards(folder))
    header, data = header_of(shard)
    entry = header[_entry(header, rng)]
    by = rng.choice([-(2**40), -2, 2, 64, 2**40, 2**70])
    entry["data_offsets"] = rng.choice([[o + by for o in entry["data_offsets"]], [0], [], "ab", [0.5, 2]])
    write_shard(shard, header, data)


def header_flipped(folder: Path, rng: random.Random) -> None:
    shard = rng.choice(shards(folder))
    raw = bytearray(shard.read_bytes())
    (length,) = struct.unpack("<Q", raw[:8])
    raw[rng.randrange(8 + length)] ^= 1 << rng.randrange(8)
    shard.write_bytes(raw)


def data_flipped(folder: Path, rng: random.Random) -> None:
    shard = rng.choice(shards(folder))
    raw = bytearray(shard.read_bytes())
    (length,) = struct.unpack("<Q", raw[:8])
    for _ in range(rng.choice([1, 1, 3, 1000])):
        raw[rng.randrange(8 + length, len(raw))] ^= 1 << rng.randrange(8)
    shard.write_bytes(raw)


def index_flipped(folder: Path, rng: random.Random) -> None:
    raw = bytearray((folder / INDEX).read_bytes())
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    (folder / INDEX).write_bytes(raw)


def sums_flipped(folder: Path, rng: random.Random) -> None:
    raw = bytearray((folder / "checksums.json").read_bytes())
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    (folder / "checksums.json").write_bytes(raw)


def misconfigured(folder: Path, rng: random.Random) -> None:
    """Sizes and kinds that the tensors do not have."""
    table = json.loads((folder / "config.json").read_text())
    text = table["text_config"]
    field = rng.choice(
        ["vocab_size", "hidden_size", "num_experts", "kv_lora_rank", "v_head_dim", "num_hidden_layers"]
    )
    text[field] = rng.choice([text[field] * 2, text[field] + 1, 0, -1, 2**70, None, "many", 1.5, [], {}])
    (folder / "config.json").write_text(json.dumps(table))


WITH_CHECKSUMS = (header_flipped, data_flipped, index_flipped, sums_flipped, truncated, exchanged)
WITHOUT = (
    truncated, extended, removed, emptied, exchanged, with_length, renamed, reshaped, retyped, relocated,
    misconfigured,
)  # fmt: skip


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    root = tmp_path_factory.mktemp("originals")
    folders = [saved(root / experts, K3_FORM, experts=experts) for experts in ("bf16", "mxfp4")]
    return [(folder, load_official(folder, dtype=torch.bfloat16).state_dict()) for folder in folders]


def _is_the_original(folder: Path, state: dict) -> bool:
    loaded = load_official(folder, dtype=torch.bfloat16)
    return loaded.config.moe == K3_FORM.moe and all(
        torch.equal(t, state[n]) for n, t in loaded.state_dict().items()
    )


def _survives(originals, tmp_path: Path, seed: int) -> tuple[str, bool]:
    """Mutate a copy; returns the mutation and whether it was refused."""
    rng = random.Random(seed)
    source, state = rng.choice(originals)
    folder = tmp_path / "mutant"
    shutil.copytree(source, folder)
    sums = rng.random() < 0.5
    mutation = rng.choice(WITH_CHECKSUMS if sums else WITHOUT)
    if not sums:
        (folder / "checksums.json").unlink()
    mutation(folder, rng)
    error = None
    try:
        harmless = _is_the_original(folder, state)
    except CheckpointError as refusal:
        error = refusal
    shutil.rmtree(folder)
    where = f"{mutation.__name__}, seed {seed}"
    if error is not None:
        assert str(folder) in str(error), f"{where}: the error names no file: {error}"
        return mutation.__name__, True
    assert harmless, f"{where}: loaded silently as another model"
    return mutation.__name__, False


def _fuzz(originals, tmp_path: Path, cases: int) -> None:
    refused: Counter[str] = Counter()
    for seed in range(cases):
        name, was_refused = _survives(originals, tmp_path, seed)
        refused[name] += was_refused
    assert all(refused[m.__name__] for m in {*WITH_CHECKSUMS, *WITHOUT}), refused
    # What is harmless: a digit of a checksum in the other case, a space that a line end replaced.
    assert sum(refused.values()) > 0.97 * cases


def test_a_mutated_checkpoint_is_refused_or_is_the_original(originals, tmp_path):
    _fuzz(originals, tmp_path, CASES)


@pytest.mark.slow
def test_many_mutated_checkpoints_are_refused_or_are_the_original(originals, tmp_path):
    _fuzz(originals, tmp_path, SLOW_CASES)
