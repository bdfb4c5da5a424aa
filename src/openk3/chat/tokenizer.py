"""The K3 tokenizer: byte-level BPE ranks in tiktoken's file format, and 256 control ids above them.

A vocabulary file has one `base64(token) rank` line per rank, ranks counting up from 0. The control ids are
not in the file: they are the next 256 ids, whatever the number of ranks, so that a small vocabulary trained
here and the released one (163,584 + 256) differ in nothing but the ranks. Does not know messages, roles or
the template: text goes in and out as it is, and BOS is never added.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import tiktoken

from openk3.errors import InvalidInput, StorageError

FILE_NAME = "tiktoken.model"
CONTROL_IDS = 256

# Alternatives in order of preference; `&&` is the intersection of character classes.
PRETOKENIZER = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# Names by offset from the first control id; the others are reserved and named after their id.
CONTROL_NAMES = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}

# The release cuts long inputs at these lengths before BPE; ids near a cut depend on it.
PIECE_CHARACTERS = 400_000
RUN_CHARACTERS = 25_000

# The lookbehinds start a match at the start of a run only, which keeps the search linear.
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{RUN_CHARACTERS + 1},}}|(?<!\s)\s{{{RUN_CHARACTERS + 1},}}")


class Tokenizer:
    """Text to ids and back, losslessly for every Unicode text.

    Args:
        tokens: the byte string of each rank, rank 0 first: distinct, not empty, the 256 single bytes among
            them.

    Raises:
        InvalidInput: one of these does not hold; the text names the rank.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        rank_of: dict[bytes, int] = {}
        for rank, token in enumerate(tokens):
            if not token or token in rank_of:
                fault = f"repeats rank {rank_of[token]}" if token else "is empty"
                raise InvalidInput(f"tokenizer: rank {rank} ({token!r}) {fault}; tokens must be distinct")
            rank_of[token] = rank
        if missing := [byte for byte in range(256) if bytes([byte]) not in rank_of]:
            raise InvalidInput(
                f"tokenizer: {len(missing)} of the 256 single bytes have no rank (the first is "
                f"0x{missing[0]:02x}), so not every text could be encoded; the vocabulary file is incomplete"
            )
        self.n_ranks = len(tokens)
        self.vocab_size = self.n_ranks + CONTROL_IDS
        self.control_tokens = {
            CONTROL_NAMES.get(offset, f"<|reserved_token_{self.n_ranks + offset}|>"): self.n_ranks + offset
            for offset in range(CONTROL_IDS)
        }
        self.bos_id = self.control_tokens["[BOS]"]
        self.eos_id = self.control_tokens["[EOS]"]  # ends a document; chat ends messages with end_of_msg
        self.end_of_msg_id = self.control_tokens["<|end_of_msg|>"]
        self.open_id = self.control_tokens["<|open|>"]
        self.close_id = self.control_tokens["<|close|>"]
        self.sep_id = self.control_tokens["<|sep|>"]
        self.unk_id = self.control_tokens["[UNK]"]
        self.pad_id = self.control_tokens["[PAD]"]
        self._tokens = list(tokens)
        self._encoding = tiktoken.Encoding(
            "openk3", pat_str=PRETOKENIZER, mergeable_ranks=rank_of, special_tokens=self.control_tokens
        )

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a vocabulary file, or the `tiktoken.model` of a folder.

        Raises:
            InvalidInput: no such file, or not a vocabulary; the text names the file and the line.
        """
        file = _vocabulary_file(Path(path))
        tokens = _parse(file)
        try:
            return cls(tokens)
        except InvalidInput as error:
            raise InvalidInput(f"{file}: {error}") from error

    def save(self, path: str | Path) -> Path:
        """Write the vocabulary to `path` (a folder gets a `tiktoken.model`) and return the file's path.

        Raises:
            StorageError: the write failed; a file that was there before is still there.
        """
        file = Path(path)
        if file.is_dir():
            file = file / FILE_NAME
        beside = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with beside.open("wb") as stream:
                stream.write(self._file_content())
                stream.flush()
                os.fsync(stream.fileno())
            beside.replace(file)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise StorageError(f"{file}: cannot save the tokenizer: {error.strerror or error}") from error
        return file

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the vocabulary file as `save` writes it: two tokenizers agree if and only if it does."""
        return hashlib.sha256(self._file_content()).hexdigest()

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of `text`. A control token's name in the text is its id only if `allow_special`.

        Text that comes from a user, a tool or a document is encoded without special tokens, so that it cannot
        forge structure.

        Raises:
            InvalidInput: the text holds a lone surrogate, which is no Unicode text.
        """
        if allow_special:
            pieces = (
                self._encoding.encode(piece, allowed_special="all", disallowed_special=())
                for piece in _pieces(text)
            )
        else:
            pieces = (self._encoding.encode_ordinary(piece) for piece in _pieces(text))
        return [token for piece in pieces for token in piece]

    def encode_batch(self, texts: Sequence[str], *, threads: int | None = None) -> list[list[int]]:
        """`encode` of many texts (without special tokens) on several threads, by default one per core."""
        pieces = [list(_pieces(text)) for text in texts]
        encoded = iter(
            self._encoding.encode_ordinary_batch(
                [piece for text in pieces for piece in text], num_threads=threads or os.cpu_count() or 1
            )
        )
        return [[token for _ in text for token in next(encoded)] for text in pieces]

    def decode(self, ids: Sequence[int], *, errors: str = "replace") -> str:
        """Text of `ids`, control tokens as their names. `errors` is for ids that end inside a character."""
        return self.decode_bytes(ids).decode("utf-8", errors=errors)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Bytes of `ids`, exactly.

        Raises:
            InvalidInput: an id is outside the vocabulary; the text names it and its position.
        """
        for position, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                raise InvalidInput(
                    f"tokenizer: id {token} at position {position} is not in 0..{self.vocab_size - 1}"
                )
        return self._encoding.decode_bytes(ids)

    def byte_lengths(self) -> list[int]:
        """How many bytes of text each id stands for: `[vocab_size]`, 0 for control ids."""
        return [len(token) for token in self._tokens] + [0] * CONTROL_IDS

    def _file_content(self) -> bytes:
        lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(self._tokens))
        return b"".join(lines)


def _vocabulary_file(path: Path) -> Path:
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise InvalidInput(
            f"{file}: no such vocabulary file; give a {FILE_NAME} or a folder that holds one "
            "(`openk3 tokenizer train` makes one)"
        )
    return file


def _parse(file: Path) -> list[bytes]:
    """Tokens of a vocabulary file by rank. Errors name the line."""
    lines = file.read_bytes().removesuffix(b"\n").split(b"\n")
    tokens: list[bytes] = []
    line_of: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        where = f"{file}: line {number}"
        fields = line.split()
        if len(fields) != 2 or not fields[1].isdigit():
            shown = line[:40].decode("ascii", errors="replace")
            raise InvalidInput(f"{where}: expected `base64 rank`, got {shown!r}")
        if (rank := int(fields[1])) != number - 1:
            raise InvalidInput(
                f"{where}: rank {rank} stands where rank {number - 1} should be; ranks count up from 0, one "
                "a line, none missing and none twice"
            )
        try:
            token = base64.b64decode(fields[0], validate=True)
        except binascii.Error as error:
            raise InvalidInput(f"{where}: {fields[0].decode('ascii', 'replace')!r} is not base64") from error
        if token in line_of:
            raise InvalidInput(f"{where}: token {token!r} is already on line {line_of[token]}")
        line_of[token] = number
        tokens.append(token)
    return tokens


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text as the release does; short texts come back whole."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidInput(
                f"tokenizer: character {error.start} is a lone surrogate (U+{ord(text[error.start]):04X}); "
                "decode the bytes it came from as UTF-8"
            ) from error
    for start in range(0, len(text), PIECE_CHARACTERS):
        piece = text[start : start + PIECE_CHARACTERS]
        cuts = [0]
        if len(piece) > RUN_CHARACTERS:
            for run in _LONG_RUN.finditer(piece):
                cuts += range(run.start() + RUN_CHARACTERS, run.end(), RUN_CHARACTERS)
        for begin, end in zip(cuts, [*cuts[1:], len(piece)], strict=True):
            yield piece[begin:end]
