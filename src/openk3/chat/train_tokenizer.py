"""Train byte-level BPE ranks on a corpus, with the K3 pre-tokeniser, for any vocabulary size.

The `tokenizers` package counts the pairs and picks the merges; what comes out is a `Tokenizer`, whose
encoding is tiktoken's. The two agree unless two merges make the same bytes, where tiktoken takes the lower
rank.
"""

from __future__ import annotations

from collections.abc import Iterable

from openk3.chat.tokenizer import CONTROL_IDS, PRETOKENIZER, Tokenizer
from openk3.errors import InvalidInput, MissingDependency

SMALLEST_VOCABULARY = 256 + CONTROL_IDS


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn `vocab_size` ids in total: 256 single bytes, merges by frequency, 256 control ids.

    Deterministic: the same texts, in any order, give the same ranks.

    Raises:
        InvalidInput: fewer than 512 ids asked for, or the texts are too small for so many.
        MissingDependency: the `tokenizers` package is not installed.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise InvalidInput(
            f"tokenizer: vocab_size {vocab_size} is too small; 256 bytes and {CONTROL_IDS} control ids need "
            f"{SMALLEST_VOCABULARY}"
        )
    try:
        import tokenizers
        from tokenizers import models, pre_tokenizers, trainers
    except ImportError as error:
        raise MissingDependency(
            "training a tokenizer needs the tokenizers package; install the extra: pip install openk3[data]"
        ) from error

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PRETOKENIZER), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - CONTROL_IDS,
        min_frequency=2,  # a pair seen once is no pattern
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)

    byte_of = _bytes_by_character()
    ranked = sorted(bpe.get_vocab().items(), key=lambda entry: entry[1])
    tokens = [bytes(byte_of[character] for character in token) for token, _ in ranked]
    if len(tokens) + CONTROL_IDS != vocab_size:
        raise InvalidInput(
            f"tokenizer: after {len(tokens) - 256} merges no pair of the texts occurs twice, which makes "
            f"a vocabulary of {len(tokens) + CONTROL_IDS}, not {vocab_size}; give more text or ask for less"
        )
    return Tokenizer(tokens)


def _bytes_by_character() -> dict[str, int]:
    """The byte behind each character of byte-level BPE: printable Latin-1 itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
