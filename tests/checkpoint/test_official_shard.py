"""One safetensors file, against the format's own library."""

from __future__ import annotations

import io
import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from openk3.checkpoint.official.shard import DTYPES, ShardWriter, TensorReader, read_header
from openk3.errors import CheckpointError

SAMPLE = {
    "weights": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4) / 7,
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 5, dtype=torch.int64),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "wide": torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    "mask": torch.tensor([True, False, True]),
    "eighth": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))
    )


def test_a_file_of_the_library_is_read_tensor_by_tensor(tmp_path):
    save_file(SAMPLE, tmp_path / "a.safetensors", metadata={"format": "pt", "note": "any text"})
    header = read_header(tmp_path / "a.safetensors")
    with TensorReader(header.tensors) as reader:
        assert header.tensors.keys() == SAMPLE.keys()
        for name, tensor in SAMPLE.items():
            assert _same(reader.read(name), tensor), name


def test_the_library_reads_a_file_of_ours(tmp_path):
    names = {dtype: name for name, dtype in DTYPES.items()}
    path = tmp_path / "b.safetensors"
    with path.open("wb") as file:
        writer = ShardWriter(file, [(n, names[t.dtype], tuple(t.shape)) for n, t in SAMPLE.items()])
        for tensor in SAMPLE.values():
            writer.write(tensor)
        writer.finish()
    read = load_file(path)
    assert read.keys() == SAMPLE.keys()
    assert all(_same(read[name], tensor) for name, tensor in SAMPLE.items())


def test_a_writer_takes_only_what_was_announced():
    writer = ShardWriter(io.BytesIO(), [("a", "F32", (2,))])
    with pytest.raises(ValueError, match="announced"):
        writer.write(torch.zeros(3))
    with pytest.raises(ValueError, match="announced"):
        writer.finish()


def test_rows_are_read_alone(tmp_path):
    table = torch.randn(50, 6)
    save_file({"table": table}, tmp_path / "a.safetensors")
    with TensorReader(read_header(tmp_path / "a.safetensors").tensors) as reader:
        out = torch.empty(2 * 6 * 4, dtype=torch.uint8)
        reader.read_rows_into("table", 17, out)
        assert out.view(torch.float32).reshape(2, 6).equal(table[17:19])
        with pytest.raises(ValueError, match="rows"):
            reader.read_rows_into("table", 49, out)


def _file(tmp_path, header: object, data: bytes = b"", *, length: int | None = None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"[1]", "JSON object"),
        (b"{", "header"),
        (b"\xff\xfe{}", "header"),
        (b"[" * 5000, "header"),
        (json.dumps({"a": GOOD, "b": GOOD}).replace("b", "a").encode(), "twice"),
        ({"__metadata__": 3, "a": GOOD}, "metadata"),
        ({"__metadata__": {"x": 1}, "a": GOOD}, "metadata"),
        ({"a": 5}, "just"),
        ({"a": {**GOOD, "more": 1}}, "just"),
        ({"a": {**GOOD, "data_offsets": [0]}}, "just"),
        ({"a": {**GOOD, "dtype": "F31"}}, "dtype"),
        ({"a": {**GOOD, "shape": [3]}}, "cannot"),
        ({"a": {**GOOD, "shape": [-2]}}, "count"),
        ({"a": {**GOOD, "shape": [True, 2]}}, "count"),
        ({"a": {**GOOD, "shape": [2.0]}}, "count"),
        ({"a": {**GOOD, "shape": [2**40, 2**40]}}, "cannot"),
        ({"a": {**GOOD, "shape": [2] + [1] * 40}}, "axes"),
        ({"a": {**GOOD, "data_offsets": [8, 0]}}, "cannot"),
        ({"a": GOOD, "b": GOOD}, "starts at"),
        ({"a": {**GOOD, "data_offsets": [4, 12]}}, "starts at"),
        ({}, "longer"),
    ],
)  # fmt: skip
def test_a_malformed_header_is_named(tmp_path, header, reason):
    with pytest.raises(CheckpointError, match=rf"x\.safetensors.*{reason}"):
        read_header(_file(tmp_path, header, b"12345678"))


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**40, 2**63, 2**64 - 1])
def test_an_absurd_header_length_reads_nothing(tmp_path, length):
    with pytest.raises(CheckpointError, match="header"):
        read_header(_file(tmp_path, {"a": GOOD}, b"12345678", length=length))


@pytest.mark.parametrize("size", [0, 7, 8, 20])
def test_a_file_that_ends_inside_its_header_is_truncated(tmp_path, size):
    path = _file(tmp_path, {"a": GOOD}, b"12345678")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(path)


def test_data_that_ends_early_or_late_is_named(tmp_path):
    for data in (b"1234567", b"123456789"):
        with pytest.raises(CheckpointError, match="bytes instead of"):
            read_header(_file(tmp_path, {"a": GOOD}, data))


def test_a_shard_that_shrinks_after_it_was_opened_is_noticed(tmp_path):
    path = _file(tmp_path, {"a": GOOD}, b"12345678")
    tensors = read_header(path).tensors
    path.write_bytes(path.read_bytes()[:-1])
    with TensorReader(tensors) as reader, pytest.raises(CheckpointError, match="truncated"):
        reader.read("a")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="cannot read"):
        read_header(tmp_path / "none.safetensors")
