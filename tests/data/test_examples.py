"""Best-fit packing of examples: nothing lost, nothing divided, little padding, and none that can teach."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.data.examples import Example, Examples, best_fit
from openk3.data.loader import collate
from openk3.errors import InvalidInput

PAD = 999_999
BUDGET = 16


@st.composite
def some_examples(draw) -> list[Example]:
    lengths = draw(st.lists(st.integers(1, BUDGET), min_size=1, max_size=25))
    masks = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    starts = np.cumsum([0, *lengths]).tolist()
    return [
        Example(list(range(start, start + n)), mask)
        for start, n, mask in zip(starts, lengths, masks, strict=False)
    ]


@settings(max_examples=100, deadline=None)
@given(some_examples(), st.integers(0, 100), st.integers(0, 2))
def test_an_epoch_holds_every_example_whole_with_the_targets_of_its_mask(examples, seed, epoch):
    packed = Examples(examples, BUDGET, seed, pad_id=PAD)
    first = sum(packed.packs_per_epoch(earlier) for earlier in range(epoch))
    found = []
    for index in range(first, first + packed.packs_per_epoch(epoch)):
        assert packed.epoch(index) == epoch
        batch = collate([packed.sample(index)])
        assert len(batch.tokens) == BUDGET
        borders = batch.cu_seqlens.tolist()
        for start, stop in itertools.pairwise(borders):
            tokens, targets = batch.tokens[start:stop].tolist(), batch.targets[start:stop].tolist()
            real = batch.token_mask[start:stop].tolist()
            if tokens[0] == PAD:
                assert stop == BUDGET
                assert (set(tokens), set(targets), set(real)) == ({PAD}, {-100}, {False})
            else:
                assert all(real)
                found.append((tokens, targets))
    expected = []
    for example in examples:
        pairs = zip(example.tokens[1:], example.loss_mask[1:], strict=True)
        targets = [token if learned else -100 for token, learned in pairs]
        expected.append((list(example.tokens), [*targets, -100]))
    assert sorted(found) == sorted(expected)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=40))
def test_best_fit_puts_each_into_the_fullest_pack_with_room(lengths):
    used: list[int] = []
    pack_of = {position: n for n, pack in enumerate(best_fit(lengths, 20)) for position in pack}
    for position, pack in sorted(pack_of.items()):
        length = lengths[position]
        possible = [p for p, n in enumerate(used) if n + length <= 20]
        if pack == len(used):
            assert not possible
            used.append(0)
        else:
            assert used[pack] == max(used[p] for p in possible)
        used[pack] += length
    assert sum(used) == sum(lengths)


def test_padding_stays_small_where_examples_are_much_shorter_than_the_budget():
    r = np.random.RandomState(0)
    examples = [Example([1] * n, [True] * n) for n in r.randint(20, 300, 2000).tolist()]
    packed = Examples(examples, 1024, 0, pad_id=PAD)
    assert packed.padding_fraction() < 0.03
    total = sum(len(example.tokens) for example in examples)
    padding = sum(int((packed.sample(i).tokens == PAD).sum()) for i in range(packed.packs_per_epoch()))
    assert packed.padding_fraction() == pytest.approx(padding / (padding + total))
    assert packed.packs_per_epoch() >= math.ceil(total / 1024)


def test_epochs_pack_the_examples_differently():
    examples = [Example([i] * (3 + i % 7), [True] * (3 + i % 7)) for i in range(60)]
    packed = Examples(examples, BUDGET, 0, pad_id=PAD)
    first = packed.sample(0).tokens.tolist()
    assert first != packed.sample(packed.packs_per_epoch(0)).tokens.tolist()
    assert first != Examples(examples, BUDGET, 1, pad_id=PAD).sample(0).tokens.tolist()


def test_an_example_over_the_budget_is_an_error_unless_cutting_is_asked_for():
    examples = [Example(list(range(5)), [True] * 5), Example(list(range(20)), [True] * 20)]
    with pytest.raises(InvalidInput, match="example 1: 20 tokens, the budget is 16"):
        Examples(examples, BUDGET, 0, pad_id=PAD)
    packed = Examples(examples, BUDGET, 0, pad_id=PAD, too_long="truncate")
    assert (packed.truncated, packed.truncated_tokens) == (1, 4)
    (whole,) = (s for s in map(packed.sample, range(2)) if len(s.lengths) == 1)
    assert whole.tokens.tolist() == list(range(16))
    assert whole.targets.tolist() == [*range(1, 16), -100]


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "0 examples"),
        ([Example([1, 2], [True])], "example 0: 2 tokens and a loss mask of 1"),
        ([Example([1], [True]), Example([], [])], "example 1: 0 tokens"),
    ],
)
def test_examples_that_cannot_be_are_refused_by_number(examples, message):
    with pytest.raises(InvalidInput, match=message):
        Examples(examples, BUDGET, 0, pad_id=PAD)
