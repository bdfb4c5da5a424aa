"""Shards: what was written is read, nothing half-written is ever seen, and damage is named."""

from __future__ import annotations

import errno
import hashlib
import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.chat import Tokenizer
from openk3.data.corpus import SourceReport
from openk3.data.recipe import Recipe
from openk3.data.shards import EncodedDocument, Provenance, open_dataset, write_dataset
from openk3.errors import InvalidInput, StorageError

TOKENIZER = Tokenizer([bytes([i]) for i in range(256)] + [b"th", b"the"])
RECIPE = Recipe.model_validate({"name": "made-up", "sources": [{"name": "t", "kind": "pydoc-topics"}]})
PROVENANCE = Provenance(
    recipe=RECIPE,
    corpus_sha256="0" * 64,
    sources={"t": SourceReport(documents=1, bytes=1, sha256="1" * 64)},
    cleaning={"documents": 3},
    deduplication={},
    versions={"openk3": "0"},
)
TEXTS = ["the other thing", "é", "", "中文\n" * 5]


def encoded(texts: list[str]) -> list[EncodedDocument]:
    return [
        EncodedDocument(TOKENIZER.encode(text), len(text.encode()), f"s/{i}\n")
        for i, text in enumerate(texts)
    ]


def write(folder, train=TEXTS, validation=("held out",), **options):
    splits = {"train": encoded(list(train)), "validation": encoded(list(validation))}
    return write_dataset(folder, TOKENIZER, splits, PROVENANCE, **options)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=30), min_size=1), st.integers(1, 60)
)
def test_documents_come_back_whatever_the_size_of_a_shard(tmp_path_factory, texts, shard_tokens):
    folder = tmp_path_factory.mktemp("d") / "data"
    manifest = write(folder, texts, shard_tokens=shard_tokens)
    dataset = open_dataset(folder, vocab_size=TOKENIZER.vocab_size, verify=True)
    train = dataset.train
    assert len(train) == len(texts)
    for i, text in enumerate(texts):
        tokens = train.tokens(i)
        assert tokens.dtype == np.uint32
        assert tokens.tolist() == [*TOKENIZER.encode(text), TOKENIZER.eos_id]
        assert (len(tokens), len(text.encode())) == (train.lengths[i], train.byte_counts[i])
        assert dataset.text("train", i) == text.encode()
    assert (train.n_tokens, train.n_bytes) == (train.lengths.sum(), train.byte_counts.sum())
    assert train.sources() == [f"s/{i}\n" for i in range(len(texts))]
    assert dataset.validation_bytes() == b"held out"
    for shard in manifest.splits["train"].shards:
        inside = manifest.files[shard].bytes // 4
        assert inside <= shard_tokens or inside in train.lengths


def test_ids_above_16_bits_survive(tmp_path):
    document = EncodedDocument([163_839, 70_000, 1], 3, "s")
    write_dataset(tmp_path / "d", TOKENIZER, {"train": [document], "validation": [document]}, PROVENANCE)
    stored = np.fromfile(tmp_path / "d" / "train-00000.tokens", "<u4")
    assert stored.tolist() == [163_839, 70_000, 1, TOKENIZER.eos_id]


def test_the_same_documents_give_the_same_bytes(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b")
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_the_folder_carries_the_tokenizer_that_made_it(tmp_path):
    manifest = write(tmp_path / "d")
    dataset = open_dataset(tmp_path / "d")
    assert dataset.tokenizer.sha256 == manifest.tokenizer_sha256 == TOKENIZER.sha256
    assert (manifest.vocab_size, manifest.eos_id) == (TOKENIZER.vocab_size, TOKENIZER.eos_id)
    assert dataset.manifest == manifest
    assert dataset.manifest.provenance == PROVENANCE


def test_a_full_disk_leaves_neither_a_folder_nor_leftovers(tmp_path, monkeypatch):
    def disk_full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(StorageError, match="No space left"):
        write(tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_replaced(tmp_path):
    write(tmp_path / "d")
    before = {file.name: file.read_bytes() for file in (tmp_path / "d").iterdir()}
    with pytest.raises(StorageError, match="exists already"):
        write(tmp_path / "d", ["something else"])
    assert {file.name: file.read_bytes() for file in (tmp_path / "d").iterdir()} == before


def test_an_empty_split_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(InvalidInput, match="the validation split has no documents"):
        write(tmp_path / "d", validation=())
    assert list(tmp_path.iterdir()) == []


def test_another_vocabulary_is_refused_with_both_sizes(tmp_path):
    write(tmp_path / "d")
    with pytest.raises(InvalidInput, match="vocabulary of 514, the model has 163840"):
        open_dataset(tmp_path / "d", vocab_size=163840)


def test_missing_truncated_and_altered_files_are_named(tmp_path):
    folder = tmp_path / "d"
    write(folder)
    shard = folder / "train-00000.tokens"
    content = shard.read_bytes()
    shard.write_bytes(content[:-4])
    with pytest.raises(InvalidInput, match=r"train-00000\.tokens: has \d+ bytes, the manifest says \d+"):
        open_dataset(folder)
    shard.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    open_dataset(folder)
    with pytest.raises(InvalidInput, match=r"train-00000\.tokens: is not what was written"):
        open_dataset(folder, verify=True)
    shard.unlink()
    with pytest.raises(InvalidInput, match=r"train-00000\.tokens: is missing"):
        open_dataset(folder)


def test_a_folder_without_a_manifest_or_with_a_wrong_one_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="no prepared corpus here; `openk3 data prepare"):
        open_dataset(tmp_path)
    folder = tmp_path / "d"
    write(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    for spoiled, message in (
        (manifest | {"eos": 1}, "eos: unknown field"),
        ({k: v for k, v in manifest.items() if k != "vocab_size"}, "vocab_size"),
        (manifest | {"format": 2}, "format"),
        ([], "expected a JSON object"),
    ):
        (folder / "manifest.json").write_text(json.dumps(spoiled))
        with pytest.raises(InvalidInput, match=rf"manifest\.json: .*{message}"):
            open_dataset(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(InvalidInput, match="not JSON"):
        open_dataset(folder)


def rewritten(folder, change) -> None:
    """`change` the manifest and make it agree with the files again, as damage before the hashes would."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_bytes())
    change(manifest)
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        digest = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest["files"][name] = digest
    file.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["splits"].pop("validation"),
        lambda m: m["splits"]["train"].update(shards=[]),
        lambda m: m["splits"]["train"].update(shards=["../elsewhere"]),
        lambda m: m["splits"]["train"].update(tokens=0),
        lambda m: m["splits"]["train"].update(tokens=m["splits"]["train"]["tokens"] + 1),
        lambda m: m["splits"]["train"].update(bytes=1),
        lambda m: m["splits"]["train"].update(documents=1),
        lambda m: m["files"].clear(),
    ],
)
def test_a_manifest_that_does_not_fit_its_files_is_refused(tmp_path, change):
    write(tmp_path / "d")
    rewritten(tmp_path / "d", change)
    with pytest.raises(InvalidInput, match=f"^{tmp_path / 'd'}"):
        open_dataset(tmp_path / "d")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.documents.npy", b"x" * 100),
        ("train.documents.npy", b""),
        ("train-00000.tokens", b""),
        ("train-00000.tokens", b"xyz"),
    ],
)
def test_files_that_are_no_tables_of_numbers_are_refused(tmp_path, name, content):
    write(tmp_path / "d")
    (tmp_path / "d" / name).write_bytes(content)
    rewritten(tmp_path / "d", lambda manifest: None)
    with pytest.raises(InvalidInput, match=f"^{tmp_path / 'd'}: .*train split"):
        open_dataset(tmp_path / "d")


@pytest.mark.parametrize("table", [[[-5, 1]], [[10**9, 1]], [[0, 0]], [[1.0, 1.0]], [1, 1]])
def test_a_table_of_documents_that_cannot_be_is_refused(tmp_path, table):
    write(tmp_path / "d", train=["one text"])
    np.save(tmp_path / "d" / "train.documents.npy", np.array(table))
    rewritten(tmp_path / "d", lambda manifest: None)
    with pytest.raises(InvalidInput, match="train split"):
        open_dataset(tmp_path / "d")


@pytest.mark.parametrize("name", ["train.documents.npy", "train.sources.jsonl", "tiktoken.model"])
def test_a_flipped_bit_in_a_small_file_is_always_found(tmp_path, name):
    write(tmp_path / "d")
    content = bytearray((tmp_path / "d" / name).read_bytes())
    content[-2] ^= 1
    (tmp_path / "d" / name).write_bytes(content)
    with pytest.raises(InvalidInput, match=f"{name}: is not what was written"):
        open_dataset(tmp_path / "d")


def test_a_token_outside_the_vocabulary_is_found_when_it_is_read(tmp_path):
    write(tmp_path / "d")
    file = tmp_path / "d" / "train-00000.tokens"
    tokens = np.fromfile(file, "<u4")
    tokens[1] = TOKENIZER.vocab_size
    tokens.tofile(file)
    with pytest.raises(InvalidInput, match=rf"{tmp_path / 'd'}: .*document 0 holds token"):
        open_dataset(tmp_path / "d").train.tokens(0)


def test_a_corpus_is_the_same_wherever_it_lies(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b")
    write(tmp_path / "c", train=["another text"])
    a, b, c = (open_dataset(tmp_path / name).manifest.content_sha256 for name in "abc")
    assert a == b != c
