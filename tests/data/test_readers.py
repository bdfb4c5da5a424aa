"""Readers: what is in the file comes out, and what is wrong with it is named by file and place."""

from __future__ import annotations

import gzip
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.data.documents import Document, cut, read_jsonl, read_parquet, read_text, read_tree
from openk3.errors import InvalidInput, MissingDependency

TEXT = "erste Zeile\r\nzweite: é 中文 😀\n\ttab"
BAD = b"gut " + b"\xff\xfe" + b" weiter"  # the first bad byte is number 4


def test_a_text_file_is_one_document_with_its_line_ends(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(TEXT.encode())
    assert read_text(file) == Document(TEXT, "a.txt")
    assert read_text(file, "other/name") == Document(TEXT, "other/name")


@pytest.mark.parametrize("suffix", [".gz", ".dz"])
def test_packed_text_is_unpacked(tmp_path, suffix):
    file = tmp_path / f"a.txt{suffix}"
    file.write_bytes(gzip.compress(TEXT.encode()))
    assert read_text(file).text == TEXT
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(InvalidInput, match=rf"a\.txt\{suffix}: damaged gzip"):
        read_text(file)


def test_bad_utf8_is_refused_by_file_and_byte_or_replaced_on_request(tmp_path):
    file = tmp_path / "bad.txt"
    file.write_bytes(BAD)
    with pytest.raises(InvalidInput, match=r"bad\.txt: byte 4 \(0xff\) is not UTF-8"):
        read_text(file)
    assert read_text(file, errors="replace").text == "gut \ufffd\ufffd weiter"


def test_a_missing_file_is_refused(tmp_path):
    for read in (read_text, lambda path: next(read_jsonl(path)), lambda path: next(read_parquet(path))):
        with pytest.raises(InvalidInput, match="nowhere: no such file"):
            read(tmp_path / "nowhere")


def test_jsonl_gives_one_document_per_line_that_is_not_blank(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"body": TEXT, "n": 1}, {"body": "", "n": 2}]
    file.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    assert list(read_jsonl(file, "body")) == [Document(TEXT, "rows.jsonl:1"), Document("", "rows.jsonl:3")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"line 2: not JSON"),
        (b'["text"]', r"line 2: no string field 'text'; it is not a JSON object"),
        (b'{"body": "a", "id": 7}', r"line 2: no string field 'text'; it has \['body', 'id'\]"),
        (b'{"text": null}', r"line 2: no string field 'text'"),
        (b'{"text": "\xff"}', r"line 2: byte 25 \(0xff\) is not UTF-8"),
        (b'{"text": "ab\\ud800"}', r"line 2: character 2 is a lone surrogate \(U\+D800\)"),
    ],
)
def test_a_broken_line_of_jsonl_is_named(tmp_path, line, message):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"text": "ok"}\n' + line + b"\n")
    with pytest.raises(InvalidInput, match=rf"rows\.jsonl: {message}"):
        list(read_jsonl(file))


def test_surrogates_of_jsonl_are_replaced_on_request_and_pairs_are_kept(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n')
    assert [document.text for document in read_jsonl(file, errors="replace")] == ["a\ufffdb", "😀"]


def test_parquet_gives_one_document_per_row(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "rows.parquet"
    for kind in (pyarrow.string(), pyarrow.large_string()):
        table = pyarrow.table({"body": pyarrow.array([TEXT, "b"], kind), "n": [1, 2]})
        parquet.write_table(table, file)
        assert list(read_parquet(file, "body")) == [
            Document(TEXT, "rows.parquet:0"),
            Document("b", "rows.parquet:1"),
        ]
        with pytest.raises(InvalidInput, match=r"no string column 'n'; its columns are body .*, n \(int64\)"):
            next(read_parquet(file, "n"))


def test_broken_rows_of_parquet_are_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", None]}), file)
    with pytest.raises(InvalidInput, match="row 1: column 'text' is null"):
        list(read_parquet(file))
    raw = pyarrow.array([b"fine", BAD], pyarrow.binary())
    unchecked = pyarrow.StringArray.from_buffers(2, raw.buffers()[1], raw.buffers()[2])
    parquet.write_table(pyarrow.table({"text": unchecked}), file)
    with pytest.raises(InvalidInput, match=r"row 1: byte 4 \(0xff\) is not UTF-8"):
        list(read_parquet(file))
    file.write_bytes(b"no parquet")
    with pytest.raises(InvalidInput, match="not a parquet file"):
        list(read_parquet(file))


def test_a_missing_parquet_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependency, match=r"pyarrow package.*openk3\[data\]"):
        next(read_parquet(tmp_path / "rows.parquet"))


def test_a_tree_gives_its_matching_files_in_order_of_path(tmp_path):
    for name in ("b.py", "a/z.py", "a/test/x.py", "a/readme.md", "a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link.py").symlink_to(tmp_path / "b.py")
    found = list(read_tree(tmp_path, ["*.py"], ["*/test/*"]))
    assert found == [Document(name, name) for name in ("a.py", "a/z.py", "b.py")]
    with pytest.raises(InvalidInput, match=r"no file matches \['\*\.rs'\]"):
        list(read_tree(tmp_path, ["*.rs"]))
    with pytest.raises(InvalidInput, match="no such folder"):
        list(read_tree(tmp_path / "c"))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["x" * 700, "word ", "\n", "\n\n", "é"]), max_size=60), st.integers(8, 900))
def test_parts_of_a_cut_document_are_the_document_again(pieces, characters):
    document = Document("".join(pieces), "book")
    parts = list(cut(document, characters))
    assert "".join(part.text for part in parts) == document.text
    assert all(len(part.text) <= characters for part in parts)
    assert all(part.text for part in parts) or document.text == ""
    names = ["book"] if len(parts) == 1 else [f"book#{i}" for i in range(len(parts))]
    assert [part.source for part in parts] == names


def test_a_document_is_cut_at_a_blank_line_before_a_line_before_anywhere():
    text = "a" * 60 + "\n\n" + "b" * 20 + "\n" + "c" * 20
    assert [part.text for part in cut(Document(text, "s"), 100)] == [text[:62], text[62:]]
    text = text.replace("\n\n", "  ")
    assert [part.text for part in cut(Document(text, "s"), 100)] == [text[:83], text[83:]]
    text = text.replace("\n", " ")
    assert [part.text for part in cut(Document(text, "s"), 100)] == [text[:100], text[100:]]
