"""`openk3 data` as people call it."""

from __future__ import annotations

import random

import pytest
from typer.testing import CliRunner

from openk3.cli.data import app
from openk3.errors import InvalidInput, StorageError


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    r = random.Random(0)
    rows = ("".join(f"{r.choice('abcdefgh')}{r.randrange(400)} " for _ in range(120)) for _ in range(60))
    (folder / "rows.jsonl").write_text("".join(f'{{"text": "{row}"}}\n' for row in rows))
    source = '[[sources]]\nname = "rows"\nkind = "jsonl"\npath = "rows.jsonl"\n'
    (folder / "mine.toml").write_text(f'name = "mine"\n{source}')
    call("prepare", folder / "mine.toml", "--out", folder / "out", "--vocab-size", 600)
    return folder


def test_info_says_what_is_there_and_verifies_it(corpus):
    said = call("info", corpus / "out", "--verify", "--context", 64)
    assert "recipe mine" in said
    assert "source rows: 60 documents" in said
    assert "vocabulary 600" in said
    assert "windows of 64 tokens divide" in said


def test_show_prints_documents_with_their_source(corpus):
    said = call("show", corpus / "out", "-n", 2, "--characters", 50)
    assert said.count("rows/rows.jsonl:") == 2
    assert call("show", corpus / "out", "--split", "validation", "-n", 1).count("rows/rows.jsonl:") == 1


def test_a_prepared_tokenizer_is_reused(corpus, tmp_path):
    call("prepare", corpus / "mine.toml", "--out", tmp_path / "again", "--tokenizer", corpus / "out")
    tokenizers = [folder / "tiktoken.model" for folder in (corpus / "out", tmp_path / "again")]
    assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()


def test_failures_are_errors_with_names(corpus, tmp_path):
    with pytest.raises(StorageError, match="exists already"):
        call("prepare", corpus / "mine.toml", "--out", corpus / "out")
    with pytest.raises(InvalidInput, match="no prepared corpus here"):
        call("info", tmp_path)
    with pytest.raises(InvalidInput, match="must be one of train, validation"):
        call("show", corpus / "out", "--split", "test")
