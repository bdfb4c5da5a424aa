"""Deduplication against Jaccard similarities computed from the words themselves."""

from __future__ import annotations

import random
import re
import sys

import pytest

from openk3.data.dedup import exact_duplicates, near_duplicates
from openk3.data.recipe import DeduplicationRules
from openk3.errors import MissingDependency

RULES = DeduplicationRules()


def shingles(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def similarity(a: str, b: str) -> float:
    a_set, b_set = shingles(a), shingles(b)
    return len(a_set & b_set) / len(a_set | b_set)


def family(r: random.Random, copies: int) -> list[str]:
    """A made-up text and edited copies of it, from nearly the same to hardly related."""
    words = [f"w{r.randrange(3000)}" for _ in range(300)]
    texts = [" ".join(words)]
    for _ in range(copies):
        edited = list(words)
        for i in r.sample(range(300), r.choice([0, 1, 2, 5, 8, 12, 20, 60])):
            edited[i] = f"x{r.randrange(10**6)}"
        texts.append(" ".join(edited))
    return texts


@pytest.fixture(scope="module")
def texts() -> list[str]:
    r = random.Random(0)
    made = [text for _ in range(15) for text in family(r, 8)]
    r.shuffle(made)
    return made


def test_no_text_is_dropped_below_the_threshold_and_each_for_a_kept_one(texts):
    dropped = near_duplicates(texts, RULES)
    assert len(dropped) > 20
    for copy, original in dropped.items():
        assert original < copy
        assert original not in dropped
        assert similarity(texts[copy], texts[original]) >= 0.75


def test_kept_texts_are_unlike_each_other_but_for_a_few_at_the_threshold(texts):
    dropped = near_duplicates(texts, RULES)
    kept = [text for i, text in enumerate(texts) if i not in dropped]
    pairs = [similarity(a, b) for i, a in enumerate(kept) for b in kept[:i]]
    assert max(pairs) < 0.9  # found with probability 0.9996 at that similarity
    missed = sum(s >= 0.75 for s in pairs)
    assert missed <= 0.3 * (missed + len(dropped))  # 0.23 exactly at the threshold


def test_texts_shorter_than_a_shingle_and_unlike_texts_are_left_alone():
    assert near_duplicates(["one two three", "one two three", "", ""], RULES) == {}
    r = random.Random(1)
    assert near_duplicates([family(r, 0)[0] for _ in range(30)], RULES) == {}


def test_the_order_of_words_matters():
    words = [f"w{i}" for i in range(200)]
    assert near_duplicates([" ".join(words), " ".join(reversed(words))], RULES) == {}
    assert near_duplicates([" ".join(words), " ".join(words).upper()], RULES) == {1: 0}


def test_exact_duplicates_agree_up_to_space_case_and_compatible_characters():
    texts = ["Fine \n Text", "other", "fine text", "ﬁne\u3000TEXT", "fine  texts", "other"]
    assert exact_duplicates(texts) == {2: 0, 3: 0, 5: 1}


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(MissingDependency, match=r"datasketch package.*openk3\[data\].*near = false"):
        near_duplicates(["a"], RULES)
