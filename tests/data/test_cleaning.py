"""Cleaning: source code keeps its meaning, junk goes, and every document is accounted for."""

from __future__ import annotations

import ast
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.data.cleaning import Cleaner, repeated_line_share
from openk3.data.recipe import CleaningRules
from openk3.data.stdlib import stdlib_documents

PROSE = "A sentence that is long enough to be kept, with nothing wrong in it.\n"
LONGER = PROSE + "And another one, which says something else and is as harmless as the first.\n"


def cleaned(text: str, **rules) -> str | None:
    return Cleaner(CleaningRules(**rules))(text)


def test_marks_and_control_characters_go_and_line_ends_become_one_kind():
    dirty = "\ufeff" + PROSE.replace("\n", "\r\n") + "form\ffeed\x00 \x7f\x85\ttab\rold mac\n"
    assert cleaned(dirty, max_controls=0.1) == PROSE + "formfeed \ttab\nold mac\n"


def test_composed_and_decomposed_letters_are_kept_apart_unless_asked():
    text = PROSE + 'assert "e\u0301" != "\u00e9"\n'
    assert cleaned(text) == text
    assert cleaned(text, nfc=True) == PROSE + 'assert "\u00e9" != "\u00e9"\n'


def test_cleaned_sources_of_the_standard_library_mean_what_they_meant():
    documents = list(stdlib_documents())
    changed = kept = 0
    cleaner = Cleaner(CleaningRules())
    for document in random.Random(0).sample(documents, 60):
        text = cleaner(document.text)
        if text is not None:
            kept += 1
            changed += text != document.text
            assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(document.text))
    assert kept > 50
    assert cleaner.counts["dropped_repetitive"] == cleaner.counts["dropped_repeated_lines"] == 0


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "empty"),
        (" \n\t\x00 ", "empty"),
        ("short", "short"),
        (PROSE + "\x01\x02" * 5, "binary"),
        (PROSE + "\ufffd" * 5, "binary"),
        (PROSE * 3, "repeated_lines"),
        ("abc" * 5000, "repetitive"),
    ],
)
def test_each_rule_refuses_what_it_says_and_counts_it(text, rule):
    cleaner = Cleaner(CleaningRules())
    assert cleaner(text) is None
    assert {name: count for name, count in cleaner.counts.items() if count} == {
        "documents": 1,
        f"dropped_{rule}": 1,
    }


def test_counts_add_up():
    cleaner = Cleaner(CleaningRules())
    outcomes = [cleaner(text) for text in (PROSE, "", LONGER + "a\x00b", PROSE * 9, "x", PROSE + "a\r\nb")]
    dropped = sum(count for name, count in cleaner.counts.items() if name.startswith("dropped_"))
    assert (cleaner.counts["documents"], dropped) == (6, outcomes.count(None)) == (6, 3)
    assert (cleaner.counts["repaired"], cleaner.counts["removed_characters"]) == (2, 2)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(["a", "  a", "bb", "ccc", ""]), max_size=12))
def test_the_share_of_repeated_lines_counts_every_line_after_its_first(lines):
    stripped = [line.strip() for line in lines]
    total = sum(map(len, stripped))
    repeated = sum(len(line) * (count - 1) for line, count in Counter(stripped).items())
    assert repeated_line_share("\n".join(lines)) == pytest.approx(repeated / total if total else 0)
