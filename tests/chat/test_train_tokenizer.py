"""Training: what is learned is what is frequent, and what comes out is a tokenizer of the size asked for."""

from __future__ import annotations

import random
import sys
from collections import Counter

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.chat.tokenizer import PRETOKENIZER
from openk3.chat.train_tokenizer import train_tokenizer
from openk3.errors import InvalidInput, MissingDependency


def made_up_texts(seed: int, documents: int = 40) -> list[str]:
    """Texts with a skewed vocabulary of words in several scripts, so that there is something to learn."""
    r = random.Random(seed)
    letters = "etaoinshrdluETA中文字かな0123éü"
    words = ["".join(r.choices(letters, k=r.randint(1, 8))) for _ in range(400)]
    weights = [1 / (i + 1) for i in range(len(words))]
    ends = [" ", " ", " ", ", ", ".\n", "\n\n    "]
    return [
        "".join(word + r.choice(ends) for word in r.choices(words, weights, k=200)) for _ in range(documents)
    ]


TEXTS = made_up_texts(0)
TRAINED = train_tokenizer(TEXTS, 900)


@pytest.mark.parametrize("vocab_size", [512, 513, 700, 901])
def test_the_vocabulary_has_exactly_the_size_asked_for(vocab_size):
    tokenizer = train_tokenizer(TEXTS, vocab_size)
    assert (tokenizer.vocab_size, tokenizer.n_ranks) == (vocab_size, vocab_size - 256)


def test_the_same_texts_in_any_order_give_the_same_tokenizer():
    shuffled = random.Random(1).sample(TEXTS, len(TEXTS))
    assert train_tokenizer(shuffled, 900).sha256 == TRAINED.sha256
    assert train_tokenizer(made_up_texts(2), 900).sha256 != TRAINED.sha256


def test_the_first_merge_is_the_most_frequent_pair_within_a_piece():
    pairs: Counter[bytes] = Counter()
    for text in TEXTS:
        for piece in regex.findall(PRETOKENIZER, text, flags=regex.V1):
            data = piece.encode()
            pairs.update(data[i : i + 2] for i in range(len(data) - 1))
    best = max(pairs.values())
    first = TRAINED.decode_bytes([256])
    assert pairs[first] == best


def test_no_token_reaches_over_a_border_of_the_pre_tokeniser():
    for rank in range(256, TRAINED.n_ranks):
        token = TRAINED.decode_bytes([rank])
        try:
            text = token.decode()
        except UnicodeDecodeError:
            continue  # a part of a character
        assert len(regex.findall(PRETOKENIZER, text, flags=regex.V1)) == 1, token


def test_it_compresses_as_the_trainer_itself_does():
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import models, pre_tokenizers, trainers

    own = tokenizers.Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PRETOKENIZER), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=644, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    own.train_from_iterator(TEXTS, trainer)
    unseen = made_up_texts(0, documents=60)[40:]
    theirs = sum(len(own.encode(text).ids) for text in unseen)
    ours = sum(map(len, TRAINED.encode_batch(unseen)))
    assert ours == pytest.approx(theirs, rel=0.005)
    assert ours < 0.5 * sum(len(text.encode()) for text in unseen)


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=100))
def test_a_trained_tokenizer_brings_every_text_back(text):
    assert TRAINED.decode(TRAINED.encode(text)) == text


def test_texts_too_small_for_the_vocabulary_are_refused_with_what_they_allow():
    with pytest.raises(InvalidInput, match=r"makes a vocabulary of \d+, not 900; give more text") as caught:
        train_tokenizer(["to be or not to be, that is to be"], 900)
    possible = int(str(caught.value).split("vocabulary of ")[1].split(",")[0])
    assert train_tokenizer(["to be or not to be, that is to be"], possible).vocab_size == possible


def test_a_pair_that_occurs_once_is_not_learned():
    with pytest.raises(InvalidInput, match="after 0 merges"):
        train_tokenizer(["abcdefgh"], 513)
    assert train_tokenizer(["abcdefgh abc"], 514).decode([257]) == "abc"


def test_a_vocabulary_without_room_for_bytes_and_control_ids_is_refused():
    with pytest.raises(InvalidInput, match="vocab_size 511 is too small"):
        train_tokenizer(TEXTS, 511)


def test_a_missing_trainer_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingDependency, match=r"tokenizers package.*openk3\[data\]"):
        train_tokenizer(TEXTS, 900)
