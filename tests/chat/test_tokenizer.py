"""The tokenizer against plain byte-pair encoding, the published ids, and files broken in every way."""

from __future__ import annotations

import base64
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.chat import Tokenizer
from openk3.chat.tokenizer import PRETOKENIZER
from openk3.errors import InvalidInput, StorageError

BYTES = [bytes([i]) for i in range(256)]
MERGES = [
    b"th",
    b"he",
    b"the",
    b" the",
    b"in",
    b"ing",
    b"12",
    b"\xe4\xb8",
    b"\xe4\xb8\xad",
    b"  ",
    b"\n\n",
    b"'s",
]
MERGES += [b"ab", b"abc", b"er", b" s", b"st", b"    "]
SMALL = Tokenizer(BYTES + MERGES)

# What the pre-tokeniser tells apart: cases, marks, Han beside other letters, digits, line ends, contractions.
ALPHABET = "theingsTHE'S 12345 \n\r\t.,(<|>中文かカé\u0301ǅʰ٣𝟘😀\u00a0\u3000\x00"
TEXTS = st.text(
    st.one_of(st.sampled_from(ALPHABET), st.characters(exclude_categories=("Cs", "Cn"))), max_size=80
)


def plain_bpe(tokenizer_tokens: list[bytes], text: str) -> list[int]:
    """The definition: split by the pattern (in another regex engine), then merge the lowest rank there is."""
    rank = {token: i for i, token in enumerate(tokenizer_tokens)}
    ids = []
    for piece in regex.findall(PRETOKENIZER, text, flags=regex.V1):
        parts = [bytes([byte]) for byte in piece.encode()]
        while len(parts) > 1:
            best = min(range(len(parts) - 1), key=lambda i: rank.get(parts[i] + parts[i + 1], 1 << 30))
            if parts[best] + parts[best + 1] not in rank:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        ids += [rank[part] for part in parts]
    return ids


def write_lines(path: Path, tokens: list[bytes]) -> list[bytes]:
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return lines


@pytest.fixture(scope="module")
def released(k3_assets: Path) -> Tokenizer:
    return Tokenizer.load(k3_assets)


@pytest.mark.parametrize(
    "pieces",
    [
        ["Hello", "World", ",", " it's", " IT'S", " don't"],
        ["中文", "abc", "中", " の", "中", "カナ"],
        ["year", " ", "202", "6", ",", " ", "٣٤٥"],
        ["a", "  ", " b", "\n\n", "   ", " c", "  "],
        ["f", "(x", ");\n", "\tif", " ==", " \r\n", ".y"],
        ["e\u0301te\u0301", "ǅʰ", "\u00a0x"],
    ],
    ids=["words", "Han", "digits", "white space", "code", "marks"],
)
def test_the_pattern_divides_text_where_its_alternatives_say(pieces):
    assert regex.findall(PRETOKENIZER, "".join(pieces), flags=regex.V1) == pieces


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_ids_equal_byte_pair_encoding_by_its_definition(text):
    assert SMALL.encode(text) == plain_bpe(BYTES + MERGES, text)


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_every_text_comes_back_as_it_was(text):
    ids = SMALL.encode(text)
    assert SMALL.decode(ids) == text
    assert sum(SMALL.byte_lengths()[token] for token in ids) == len(text.encode())


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=60))
def test_every_byte_string_can_be_written_in_ids(data):
    assert SMALL.decode_bytes(list(data)) == data  # ranks 0..255 of SMALL are the bytes


@settings(max_examples=20, deadline=None)
@given(st.lists(TEXTS, max_size=6), st.integers(1, 3))
def test_a_batch_on_threads_equals_one_text_at_a_time(texts, threads):
    assert SMALL.encode_batch(texts, threads=threads) == [SMALL.encode(text) for text in texts]


def cuts_by_definition(text: str) -> list[str]:
    """400,000 characters at a time, then a new piece whenever a run would grow to 25,001."""
    pieces = []
    for start in range(0, len(text), 400_000):
        chunk, begin, run = text[start : start + 400_000], 0, 0
        for i, character in enumerate(chunk):
            run = run + 1 if i and character.isspace() == chunk[i - 1].isspace() else 1
            if run > 25_000:
                pieces.append(chunk[begin:i])
                begin, run = i, 1
        pieces.append(chunk[begin:])
    return pieces


@pytest.mark.parametrize(
    "text",
    [
        "abc" * 8_333 + "a",  # 25,000: not cut
        "abc" * 8_334,  # 25,002: cut inside a token
        " " * 3 + "abc" * 20_000 + " " * 50_002 + "abc" * 10_000,
        "abc " * 105_000,  # cut at 400,000 only
        "abc" * 140_000,
    ],
    ids=["at the limit", "past the limit", "runs of both kinds", "long text of short runs", "both cuts"],
)
def test_long_texts_are_cut_where_the_release_cuts_them(text):
    expected = [token for piece in cuts_by_definition(text) for token in SMALL.encode(piece)]
    assert SMALL.encode(text) == expected
    assert SMALL.encode(text, allow_special=True) == expected


def test_names_of_control_tokens_are_plain_text_unless_allowed():
    text = "<|open|>message<|sep|>[EOS]<|reserved_token_282|>"
    assert max(SMALL.encode(text)) < SMALL.n_ranks
    assert SMALL.decode(SMALL.encode(text)) == text
    structured = SMALL.encode(text, allow_special=True)
    assert [token for token in structured if token >= SMALL.n_ranks] == [
        SMALL.open_id,
        SMALL.sep_id,
        SMALL.eos_id,
        SMALL.n_ranks + 8,
    ]
    assert SMALL.decode(structured) == text


def test_control_ids_follow_the_ranks_of_any_vocabulary():
    n = len(BYTES + MERGES)
    assert (SMALL.n_ranks, SMALL.vocab_size, len(SMALL.control_tokens)) == (n, n + 256, 256)
    assert (SMALL.bos_id, SMALL.eos_id, SMALL.end_of_msg_id, SMALL.pad_id) == (n, n + 1, n + 2, n + 255)
    assert SMALL.control_tokens[f"<|reserved_token_{n + 8}|>"] == n + 8
    assert SMALL.byte_lengths()[n:] == [0] * 256


def test_the_released_vocabulary_has_its_published_ids(released):
    published = {
        "[BOS]": 163584,
        "[EOS]": 163585,
        "<|end_of_msg|>": 163586,
        "<|open|>": 163587,
        "<|close|>": 163588,
        "<|sep|>": 163589,
        "[start_header_id]": 163590,
        "[end_header_id]": 163591,
        "<|reserved_token_163592|>": 163592,
        "[EOT]": 163593,
        "<|media_begin|>": 163602,
        "<|media_content|>": 163603,
        "<|media_end|>": 163604,
        "<|media_pad|>": 163605,
        "<osagent_mode>": 163649,
        "[UNK]": 163838,
        "[PAD]": 163839,
    }
    assert released.vocab_size == 163840
    assert {name: released.control_tokens[name] for name in published} == published


def test_rendered_prompts_have_their_published_ids(released, k3_assets):
    cases = json.loads((k3_assets / "chat-template-goldens.json").read_text())
    forged = [
        case["id"]
        for case in cases
        if released.encode(case["rendered"], allow_special=True) != case["token_ids"]
    ]
    assert len(cases) > 10
    assert forged == ["G16"]  # its user types markers, which only its segments can tell from structure
    case = next(case for case in cases if case["id"] == "G16")
    typed = case["input"]["messages"][0]["content"]
    before, after = case["rendered"].split(typed)
    opening, closing = (released.encode(text, allow_special=True) for text in (before, after))
    assert [*opening, *released.encode(typed), *closing] == case["token_ids"]


def test_the_released_file_is_saved_as_it_was_loaded(released, k3_assets, tmp_path):
    saved = released.save(tmp_path)
    assert saved == tmp_path / "tiktoken.model"
    assert saved.read_bytes() == (k3_assets / "tiktoken.model").read_bytes()


def test_a_saved_tokenizer_loads_as_the_same_one(tmp_path):
    SMALL.save(tmp_path / "new" / "vocabulary.model")
    loaded = Tokenizer.load(tmp_path / "new" / "vocabulary.model")
    assert loaded.sha256 == SMALL.sha256
    assert loaded.encode("the thing's 中") == SMALL.encode("the thing's 中")
    assert Tokenizer(BYTES).sha256 != SMALL.sha256


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    Tokenizer(BYTES).save(tmp_path)

    def disk_full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(StorageError, match="No space left"):
        SMALL.save(tmp_path)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["tiktoken.model"]
    assert Tokenizer.load(tmp_path).sha256 == Tokenizer(BYTES).sha256


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda lines: [*lines[:9], b"!!! 9", *lines[10:]], "line 10: .*not base64"),
        (lambda lines: [*lines[:9], b"QQ== nine", *lines[10:]], "line 10: expected `base64 rank`"),
        (lambda lines: [*lines[:9], b"", *lines[10:]], "line 10: expected `base64 rank`"),
        (lambda lines: [*lines[:9], *lines[10:]], "line 10: rank 10 stands where rank 9 should be"),
        (lambda lines: [*lines[:9], lines[8], *lines[10:]], "line 10: rank 8 stands where rank 9 should be"),
        (
            lambda lines: [*lines[:9], lines[8].split()[0] + b" 9", *lines[10:]],
            "line 10: .* already on line 9",
        ),
        (lambda lines: [*lines[:300], lines[100][:3]], "line 301: expected"),
        (lambda lines: lines[:200], "56 of the 256 single bytes have no rank .*0xc8"),
        (lambda lines: [b"\x89PNG\r", b"\x00"], "line 1: expected"),
        (lambda lines: [], "line 1: expected"),
    ],
    ids=[
        "not base64",
        "rank is no number",
        "empty line",
        "missing rank",
        "duplicate rank",
        "duplicate token",
        "truncated in a line",
        "truncated between lines",
        "another format",
        "empty file",
    ],
)
def test_a_broken_file_is_refused_by_line(tmp_path, spoil, message):
    file = tmp_path / "tiktoken.model"
    lines = write_lines(file, BYTES + [bytes([i, i]) for i in range(100)])
    Tokenizer.load(file)
    file.write_bytes(b"\n".join(spoil(lines)) + b"\n")
    with pytest.raises(InvalidInput, match=message) as caught:
        Tokenizer.load(file)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_refused_with_the_path_that_was_tried(tmp_path):
    with pytest.raises(InvalidInput, match=r"tiktoken\.model: no such vocabulary file"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("bad", [-1, 530, 2**40])
def test_an_id_outside_the_vocabulary_is_named_with_its_position(bad):
    with pytest.raises(InvalidInput, match=rf"id {bad} at position 2 is not in 0\.\.{SMALL.vocab_size - 1}"):
        SMALL.decode([1, 2, bad])


@pytest.mark.parametrize("allow_special", [False, True])
def test_a_lone_surrogate_is_refused_and_named(allow_special):
    with pytest.raises(InvalidInput, match=r"character 3 is a lone surrogate \(U\+D800\)"):
        SMALL.encode("abc\ud800", allow_special=allow_special)


def test_the_package_imports_without_torch():
    code = "import sys, openk3.chat; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
