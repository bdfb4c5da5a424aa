"""`openk3 tokenizer` as people call it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from openk3.chat import Tokenizer
from openk3.cli.tokenizer import app
from openk3.errors import InvalidInput


def call(*arguments: object, stdin: bytes | None = None) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=stdin, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def file(tmp_path):
    return Tokenizer([bytes([i]) for i in range(256)] + [b"th", b"the"]).save(tmp_path)


def test_what_encode_prints_decode_turns_back(file):
    ids = call("encode", file, "the é\n")
    assert ids.split() == ["257", "32", "195", "169", "10"]
    assert call("decode", file, *ids.split()) == "the é\n\n"
    assert call("decode", file, stdin=call("encode", file, stdin="the é\n".encode()).encode()) == "the é\n\n"


def test_control_tokens_are_encoded_on_request_and_pieces_shown(file):
    assert call("encode", file, "[EOS]", "--special") == "259\n"
    assert call("encode", file, "the[EOS]", "--special", "--pieces") == "257 'the'\n259 '[EOS]'\n"
    assert len(call("encode", file, "[EOS]").split()) == 5


def test_info_names_sizes_and_control_ids(file):
    said = call("info", file)
    assert "vocabulary 514 = 258 ranks + 256 control ids" in " ".join(said.split())
    assert "[EOS]" in said
    assert "<|end_of_msg|>" in said


def test_train_learns_from_a_recipe(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(f"text number {i}: " + "the quick brown fox and others " * (3 + i))
    source = '[[sources]]\nname = "t"\nkind = "tree"\npath = "."\ninclude = ["*.txt"]\n'
    rules = "[cleaning]\nmin_compressed = 0\n[deduplication]\nnear = false\n"
    (tmp_path / "mine.toml").write_text(f'name = "mine"\n{rules}{source}')
    call("train", tmp_path / "mine.toml", "--vocab-size", 530, "--out", tmp_path / "new.model")
    assert Tokenizer.load(tmp_path / "new.model").vocab_size == 530


def test_failures_are_errors_with_names(file, tmp_path):
    with pytest.raises(InvalidInput, match="'x' is not an id"):
        call("decode", file, "1", "x")
    with pytest.raises(InvalidInput, match=r"standard input: byte 1 \(0xff\) is not UTF-8"):
        call("encode", file, stdin=b"a\xff")
    with pytest.raises(InvalidInput, match="no such vocabulary file"):
        call("info", tmp_path / "none.model")
